"""A few rounds of a run, tried with its own clients before a folder is made, stage by stage.

Whatever parts a user brings, three things must make no difference to what a replicate's rounds give: that the same
rounds were tried before, what the global random streams are, and which other replicates there are. A replica of the run
(`Setup.replica`) is taken through its rounds twice, and once for each seed alone; the first stage that differs names
the part. Clients are trained one at a time there, so that numbers do not depend on who else is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core import streams
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.numerical import is_numerical
from fedsim.core.rewind import Rewind
from fedsim.run.contracts import OF_RUN, brings_foreign, changed_paths, close_to, fields, identical, snapshot_of
from fedsim.run.setup import Setup
from fedsim.run.user_code import error_of_parts
from fedsim.strategies import State
from fedsim.trainer import run_to_completion

SECONDS = 0.6  # after which further rounds are left out
MOST_CLIENTS = 24  # of each replicate in a round
MOST_PARAMETERS = 100_000  # of models that so many clients train
MOST_NUMBERS = 2e7  # of client memory
FEW_CLIENTS, FEW_STEPS = 2, 2  # with larger models; and local steps
ROUNDS = (0, 1, 2, 3, 5, 10, 100)  # and the last

STAGES: dict[str, tuple[str, ...]] = {
    "who is available": ("availability", "delay", "clock"),
    "who computes": ("strategy", "clock", "work"),
    "what clients start from": ("strategy", "capacity"),
    "what clients send": ("local", "shift", "contamination", "partition", "delay", "clock", "work"),
    "what the server receives": ("uplink", "attack"),
    "the server's next state": ("strategy",),
}

Values = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What came out of one stage of a round.

    Attributes:
        round: t.
        name: of the stage.
        values: of each replicate, name → tensor.
    """

    round: int
    name: str
    values: list[Values]


class TrialRounds:
    """Rounds of a replica of a run.

    Args:
        run: whose parts are tried.
        seeds: of the replicas.
    """

    def __init__(self, run: Setup, seeds: Sequence[int]) -> None:
        self.run = run.replica(seeds, FEW_STEPS)
        self.limit = MOST_CLIENTS if run.model.dimension <= MOST_PARAMETERS else FEW_CLIENTS
        self.limited = False
        self.components = self.run.components_by_group
        self.stages: list[Stage] = []

    def play(self, rounds: Sequence[int], until: float) -> list[Stage]:
        """From the initial model on; rounds that would begin after `until` on the clock are left out.

        Raises:
            ConfigError: a part raised an error.
        """
        run, self.stages = self.run, []
        with self._errors("before round 0"):
            models = run.model.columns.shared_part(run.model.initial(run.federation.seeds))
            state = run.strategy.initial(models, run.federation)
            memory = run.memory_at_start(state)
            run.pace.begin(None, memory)
        for turn, t in enumerate(rounds):
            if turn and time.perf_counter() > until:
                break
            with self._errors(f"in round {t}"), torch.no_grad():
                state = self._round(state, memory, t)
            if not torch.isfinite(state.model).all():
                break
        return self.stages

    def _round(self, state: State, memory: Memory, t: int) -> State:
        run = self.run
        active = self._fewer(run.delivery.not_in_flight(run.availability.sample(t), memory))
        self._note(t, "who is available", active, {})
        cohort = run.pace(run.strategy.cohort(state, active), t)
        seconds = {"virtual seconds": torch.tensor(run.pace.seconds), **_numbers(cohort, cohort.host.steps)}
        self._note(t, "who computes", cohort, seconds)
        start = run.submodels(run.strategy.start(state, cohort), cohort, t)
        handed = start if isinstance(start, dict) else {"params": start}
        self._note(t, "what clients start from", cohort, handed)
        model = state.model.clone()
        report = run_to_completion(run.delivery.steps(start, cohort, t, state.model, memory))
        if not torch.equal(model.nan_to_num(), state.model.nan_to_num()):
            raise ConfigError(f"{self._label('what clients send')} writes into the server's model that it is given")
        local = {f"end {name}": value for name, value in report.carry.items()} | {"loss": report.loss}
        local |= {"rates": report.lr_sum, "rate": report.lr, "samples": torch.as_tensor(report.samples)}
        local |= {} if report.deployed is None else {"deployed": report.deployed}
        local |= {} if report.gradient_weight is None else {"gradient weight": report.gradient_weight}
        local |= {f"memory {name}": value for name, value in (memory.clients | memory.server).items()}
        self._note(t, "what clients send", report.cohort, local | _numbers(report.cohort, report.rounds_late))
        report = run.uplink(report, memory)
        received = {"rows": report.innovation} | {f"memory {name}": value for name, value in memory.uplink.items()}
        self._note(t, "what the server receives", report.cohort, received)
        state = run.strategy.aggregate(state, report, t)
        self._note(t, "the server's next state", report.cohort, fields(state))
        return state

    def _fewer(self, active: Cohort) -> Cohort:
        positions = [range(a, min(b, a + self.limit)) for a, b in itertools.pairwise(active.bounds)]
        count = sum(map(len, positions))
        self.limited = self.limited or count < len(active)
        return active if count == len(active) else active.subset(np.concatenate([np.array(p, int) for p in positions]))

    def _note(self, t: int, name: str, cohort: Cohort, values: Mapping[str, Tensor]) -> None:
        """Keep what belongs to each replicate: rows of the cohort, of all clients, or of replicates."""
        replicates, clients = cohort.shape
        by_replicate: list[Values] = []
        host = {**_numbers(cohort, cohort.host.count), "chance": torch.as_tensor(cohort.host.probability)}
        for r, (a, b) in enumerate(itertools.pairwise(cohort.bounds)):
            own = {"clients": torch.as_tensor(cohort.host.virtual[a:b] % clients)}
            for key, value in (host | dict(values)).items():
                if value.dim() and len(value) == len(cohort) and key not in ("model", "virtual seconds", "rate"):
                    own[key] = value[a:b].clone()
                elif value.dim() and len(value) and len(value) % replicates == 0:
                    own[key] = value.unflatten(0, (replicates, -1))[r].clone()
            by_replicate.append(own)
        self.stages.append(Stage(t, name, by_replicate))

    @contextlib.contextmanager
    def _errors(self, when: str) -> Iterator[None]:
        before = streams.rng_state()
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            message = None if is_numerical(error) else error_of_parts(error, self.components)
            if message is None:
                raise
            raise ConfigError(f"{message}, {when}") from error
        if not streams.states_equal(before, streams.rng_state()):
            raise ConfigError(
                f"{' or '.join(_labels(self.components))} draws from a global random stream {when}, which depends on "
                "all that was drawn before; use fedsim.core.rng, whose numbers are functions of seed, round and client"
            )

    def _label(self, stage: str) -> str:
        """The user's parts that may be behind a stage; all of the user's where none of them is its own."""
        return " or ".join(
            _labels({g: p for g, p in self.components.items() if g in STAGES[stage]}) or _labels(self.components)
        )

    def changed(self, stage: str, before: Mapping[str, Any]) -> str:
        """Where a part of the stage has changed, in parentheses."""
        for group, part in self.components.items():
            if group in STAGES[stage] and (paths := changed_paths(part, before[group])):
                return f" ({paths[0]} has changed)"
        return ""


def _labels(components: Mapping[str, Any]) -> list[str]:
    return [f"{group}={type(part).__name__}" for group, part in components.items() if brings_foreign(part)]


def _numbers(cohort: Cohort, values: np.ndarray | None) -> Values:
    return {"numbers": torch.as_tensor(values)} if values is not None and len(values) == len(cohort) else {}


def check_rounds(run: Setup) -> None:
    """Try a few rounds of a run, with parts that are somebody's own.

    Raises:
        ConfigError: what a part gave depends on what must make no difference.
    """
    federation = run.federation
    if not _labels(run.components_by_group) or federation.ranks.count > 1 or run.trainer.rule.pooled:
        return
    if 2 * federation.clients * run.model.dimension > MOST_NUMBERS:
        return
    seeds = federation.seeds[:2]
    rewind = Rewind(*run.components_by_group.values(), skip=OF_RUN)
    try:
        with _quiet(), streams.restore_states():
            _check_rounds(run, seeds)
    finally:
        rewind()


def _check_rounds(run: Setup, seeds: Sequence[int]) -> None:
    rounds = [t for t in sorted({*ROUNDS, run.rounds - 1}) if 0 <= t < run.rounds]
    try:
        trial = TrialRounds(run, seeds)
    except ConfigError:  # made for the run's own seeds
        if len(seeds) == len(run.federation.seeds):
            raise
        return
    before = {group: snapshot_of(part) for group, part in trial.components.items()}
    began = time.perf_counter()
    try:
        first = trial.play(rounds, began + SECONDS)
        streams.reseed(1)
        again = trial.play(rounds, time.perf_counter() + SECONDS)
    except ConfigError:
        if trial.limited:
            return
        raise
    except Exception:  # it is not the user's: the run itself says so
        return
    for one, other in zip(first, again, strict=False):
        if any(identical(a, b) is not None for a, b in zip(one.values, other.values, strict=True)):
            raise ConfigError(
                f"{trial._label(one.name)}: {one.name} in round {one.round} differs when the same rounds are simulated "
                f"a second time{trial.changed(one.name, before)}; what is kept outside of a State or `memory` is in no "
                "checkpoint, so make it a function of seed, client and round (fedsim.core.rng)"
            )
    if len(seeds) > 1 and not run.per_seed:
        for r, seed in reversed(list(enumerate(seeds))):
            _check_alone(run, trial, first, r, seed, rounds)


def _check_alone(
    run: Setup, trial: TrialRounds, joint: list[Stage], replicate: int, seed: int, rounds: Sequence[int]
) -> None:
    try:
        alone = TrialRounds(run, (seed,)).play(rounds, time.perf_counter() + SECONDS / 2)
    except Exception:  # made for all of the run's seeds
        return
    for one, other in zip(joint, alone, strict=False):
        if not _alike(one.values[replicate], other.values[0]):
            raise ConfigError(
                f"{trial._label(one.name)}: {one.name} in round {one.round} differs for seed {seed} when no other seed "
                "is simulated with it; use numbers of clients and seeds in place of rows and positions, and the "
                "cohort's sums and means, which work seed by seed"
            )


def _alike(one: Values, other: Values) -> bool:
    return all(close_to(value, other[name]) for name, value in one.items() if name in other)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a replica logs was said of the run itself."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with streams.quiet_trial():
            yield
    finally:
        logging.disable(disabled)
