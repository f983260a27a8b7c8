"""`fedsim audit`: the ε that a run claims, and a lower bound from simulated attacks with canary clients."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.stored_configuration import load_run_configuration
from fedsim.core import checks
from fedsim.core.errors import ConfigError

if TYPE_CHECKING:
    from fedsim.run.simulation import Simulation
    from fedsim.uplink.accounting import Privacy
    from fedsim.uplink.auditing import PrivacyAuditResult

MAX_AUDITED_ROUNDS = 20  # audited unless the user asks for more
MAX_AUDITED_EPSILON = {
    True: 12.0,
    False: 6.0,
}  # by whether participation is known: rounds are halved until the claimed ε is at most this


def main(arguments: list[str]) -> None:
    """Audit a run, or the run that overrides describe; exit with status 1 if the claim is refuted."""
    parser = argparse.ArgumentParser("fedsim audit", description=f"Compute {COMMAND_DESCRIPTIONS['audit']}.")
    parser.add_argument(
        "what", nargs="+", metavar="RUN_OR_OVERRIDES", help="a run folder, or overrides as for a run (KEY=VALUE …)"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"number of audited rounds (those of the run, at most {MAX_AUDITED_ROUNDS})"
    )
    parser.add_argument("--worlds", type=int, default=20_000, help="number of simulated federations (20000)")
    parser.add_argument("--confidence", type=float, default=0.95, help="confidence level of the lower bound (0.95)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world (0)")
    options = parser.parse_intermixed_args(arguments)
    if not 0.5 <= options.confidence < 1:
        raise ConfigError(f"--confidence {options.confidence} must be at least 0.5 and below 1")
    from fedsim.app.build import build
    from fedsim.uplink.auditing import audit

    start = time.perf_counter()
    config, _ = load_run_configuration(options.what)
    config.device = "cpu"
    simulation = build(config)[0]
    claim, rounds = audited_claim(simulation, options.rounds)
    result = audit(
        simulation.uplink, simulation.availability, claim, rounds, options.worlds, options.confidence, options.seed
    )
    print("\n".join(report(simulation, claim, result, time.perf_counter() - start)))
    if result.violated:
        sys.exit("fedsim audit: the lower bound exceeds the ε that is claimed: the run is less private than it says")


def audited_claim(simulation: Simulation, rounds: int | None) -> tuple[Privacy, int]:
    """Return the claim after the audited rounds, and their number: as requested, or the number that shows most.

    A bound from a few thousand worlds cannot be large, so one of few rounds shows more where each costs much.
    """
    from fedsim.uplink.accounting import KNOWN_SAMPLING

    if rounds is not None and not 0 < rounds <= simulation.rounds:
        raise ConfigError(f"--rounds {rounds} must be at least 1 and at most the run's rounds={simulation.rounds}")
    number = (
        checks.check_whole_number("--rounds", rounds)
        if rounds is not None
        else min(simulation.rounds, MAX_AUDITED_ROUNDS)
    )
    while True:
        claim = simulation.privacy(number)
        if claim is None:
            raise ConfigError("there is nothing to audit: no stage of uplink adds noise; set uplink=gaussian or tree")
        if claim.epsilon is None or claim.mechanism is None:
            raise ConfigError(f"there is nothing to audit: {claim.statement}")
        if (
            rounds is not None
            or number == 1
            or claim.epsilon <= MAX_AUDITED_EPSILON[claim.mechanism.sampling == KNOWN_SAMPLING]
        ):
            return claim, number
        number //= 2


def report(simulation: Simulation, claim: Privacy, audit_result: PrivacyAuditResult, seconds: float) -> list[str]:
    """Return the printed report of an audit."""
    full_claim = simulation.privacy(simulation.rounds)
    assert full_claim is not None
    lines = [f"claimed: {full_claim.statement}"]
    if audit_result.rounds < simulation.rounds:
        lines.append(f"audited: {claim.statement}")
    lines += ["", f"{'':58}  claimed ε  lower bound  at most"]
    for finding in audit_result.findings:
        violation_mark = "  VIOLATED" if finding.violated else ""
        lines.append(
            f"{finding.method:58}  {finding.claimed:9.3f}  {finding.bound:11.3f}  "
            f"{finding.ceiling:7.1f}{violation_mark}"
        )
    lines += [
        "",
        f"ε claimed {audit_result.claimed:.4g}, lower bound {audit_result.bound:.4g} at δ = {audit_result.delta:.3g}, "
        "with "
        f"{100 * audit_result.confidence:g} % confidence",
        "a lower bound exceeds what is claimed" if audit_result.violated else "no lower bound exceeds what is claimed",
        f"{audit_result.worlds:,} worlds of {audit_result.rounds} rounds in {seconds:.1f} s "
        f"({audit_result.worlds / seconds:,.0f} worlds/s)",
    ]
    return lines
