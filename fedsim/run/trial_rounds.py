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
from fedsim.core.errors import ConfigError, DivergenceError, RunError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.numerical import is_numerical
from fedsim.core.rewind import Rewind
from fedsim.run.contracts import (
    RUN_OBJECT_TYPES,
    changed_paths,
    close_to,
    contains_user_code,
    first_difference,
    snapshot_of,
    state_fields,
)
from fedsim.run.setup import Setup
from fedsim.run.user_code import failure_text, plain
from fedsim.strategies import State
from fedsim.trainer import run_to_completion

SECONDS = 0.35  # after which further rounds are left out
MOST_CLIENTS = 8  # of each replicate in a round
MOST_PARAMETERS = 10_000  # of models that so many clients train
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
        self._stage = "who is available"  # that is at work
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
            if turn and time.process_time() > until:
                break
            with self._errors(f"in round {t}"), torch.no_grad():
                state = self._round(state, memory, t)
            if not torch.isfinite(state.model).all():
                break
        return self.stages

    def _round(self, state: State, memory: Memory, t: int) -> State:
        run, self._stage = self.run, "who is available"
        active = self._fewer(run.delivery.not_in_flight(run.availability.sample(t), memory))
        self._note(t, "who is available", active, {}, {})
        self._stage = "who computes"
        cohort = run.pace(run.strategy.cohort(state, active), t)
        seconds = {"virtual seconds": torch.tensor(run.pace.seconds)}
        self._note(t, "who computes", cohort, _numbers(cohort.host.steps), seconds)
        self._stage = "what clients start from"
        start = run.submodels(run.strategy.start(state, cohort), cohort, t)
        start_rows = start if isinstance(start, dict) else {"params": start}
        self._note(t, "what clients start from", cohort, start_rows, {})
        self._stage, model = "what clients send", state.model.clone()
        report = run_to_completion(run.delivery.steps(start, cohort, t, state.model, memory))
        if not torch.equal(model.nan_to_num(), state.model.nan_to_num()):
            raise ConfigError(f"{self.label('what clients send')} writes into the server's model that it is given")
        rows = {f"end {name}": value for name, value in report.carry.items()} | {"loss": report.loss}
        rows |= {"rates": report.lr_sum, "samples": torch.as_tensor(report.samples)} | _numbers(report.rounds_late)
        rows |= {} if report.gradient_weight is None else {"gradient weight": report.gradient_weight}
        lasting = memory.clients | memory.server | {"rate": report.lr}
        lasting |= {} if report.deployed is None else {"deployed": report.deployed}
        self._note(t, "what clients send", report.cohort, rows, lasting)
        self._stage = "what the server receives"
        report = run.uplink(report, memory)
        self._note(t, "what the server receives", report.cohort, {"rows": report.innovation}, memory.uplink)
        self._stage = "the server's next state"
        state = run.strategy.aggregate(state, report, t)
        self._note(t, "the server's next state", report.cohort, {}, state_fields(state))
        return state

    def _fewer(self, active: Cohort) -> Cohort:
        positions = [range(a, min(b, a + self.limit)) for a, b in itertools.pairwise(active.bounds)]
        count = sum(map(len, positions))
        self.limited = self.limited or count < len(active)
        return active if count == len(active) else active.subset(np.concatenate([np.array(p, int) for p in positions]))

    def _note(
        self, t: int, name: str, cohort: Cohort, rows: Mapping[str, Tensor], lasting: Mapping[str, Tensor]
    ) -> None:
        """Keep of each replicate its rows of the cohort, [n, …] of all, and what is `lasting` of it, [R, …] or
        [R·m, …]."""
        replicates, clients = cohort.shape
        by_replicate: list[Values] = []
        numbers = (cohort.host.virtual % clients, cohort.host.count, cohort.host.probability)
        host = dict(zip(("clients", "counts", "chances"), map(torch.as_tensor, numbers), strict=True))
        for r, (a, b) in enumerate(itertools.pairwise(cohort.bounds)):
            values = {key: value[a:b].clone() for key, value in (host | dict(rows)).items()}
            for key, value in lasting.items():
                if value.dim() and len(value) % replicates == 0:
                    values[f"{key} of the replicate"] = value.unflatten(0, (replicates, -1))[r].clone()
            by_replicate.append(values)
        self.stages.append(Stage(t, name, by_replicate))

    @contextlib.contextmanager
    def _errors(self, moment: str) -> Iterator[None]:
        before = streams.rng_state()
        try:
            yield
        except (ConfigError, DivergenceError):
            raise
        except RunError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            if is_numerical(error):
                raise
            message = failure_text(error, self.components, self.label(self._stage))
            raise ConfigError(f"{message}, {moment}") from error
        if not streams.states_equal(before, streams.rng_state()):
            raise ConfigError(
                f"{' or '.join(_labels(self.components))} draws from a global random stream {moment}, which depends on "
                "all that was drawn before; use fedsim.core.rng, whose numbers are functions of seed, round and client"
            )

    def label(self, stage: str) -> str:
        """The user's parts that may be behind a stage; all of the user's where none of them is its own."""
        return " or ".join(
            _labels({g: p for g, p in self.components.items() if plain(g) in STAGES[stage]}) or _labels(self.components)
        )

    def changed(self, stage: str, before: Mapping[str, Any]) -> str:
        """Where a part of the stage has changed, in parentheses."""
        for group, component in self.components.items():
            if plain(group) in STAGES[stage] and (paths := changed_paths(component, before[group])):
                return f" ({paths[0]} has changed)"
        return ""


def _labels(components: Mapping[str, Any]) -> list[str]:
    return [
        f"{plain(group)}={type(component).__name__}"
        for group, component in components.items()
        if contains_user_code(component)
    ]


def _numbers(values: np.ndarray | None) -> Values:
    return {} if values is None else {"numbers": torch.as_tensor(values)}


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
    rewind = Rewind(*run.components_by_group.values(), skip=RUN_OBJECT_TYPES)
    try:
        with _quiet(), streams.restore_states():
            _check_rounds(run, seeds)
    finally:
        rewind()


def _check_rounds(run: Setup, seeds: Sequence[int]) -> None:
    rounds = [t for t in sorted({*ROUNDS, run.rounds - 1}) if 0 <= t < run.rounds]
    trial = _replica_without_draws(run, seeds)
    if trial is None:
        return
    before = {group: snapshot_of(component) for group, component in trial.components.items()}
    start = time.process_time()
    try:
        stages = trial.play(rounds, start + SECONDS)
        streams.reseed(1)
        trial.play(rounds[:1], start)  # a count by turns is then at another turn
        repeated_stages = trial.play(rounds, time.process_time() + SECONDS)
    except ConfigError:
        if trial.limited or not _fails_with_all_seeds(run, seeds):
            return
        raise
    except Exception:  # it is not the user's: the run itself says so
        return
    for stage, repeated in zip(stages, repeated_stages, strict=False):
        pairs = zip(stage.values, repeated.values, strict=True)
        if any(first_difference(values, repeated_values) is not None for values, repeated_values in pairs):
            raise ConfigError(
                f"{trial.label(stage.name)}: {stage.name} in round {stage.round} differs when the same rounds are "
                f"simulated a second time{trial.changed(stage.name, before)}; what is kept outside of a State or "
                "`memory` is in no checkpoint, so make it a function of seed, client and round (fedsim.core.rng)"
            )
    for r, seed in reversed(list(enumerate(seeds))):
        if len(seeds) == 1 or not run.per_seed:
            _check_single_seed(run, trial, stages, r, seed, rounds)


def _fails_with_all_seeds(run: Setup, seeds: Sequence[int]) -> bool:
    """Does a part also fail in the first rounds with all of the run's seeds? If not, it is made for their number."""
    all_seeds = run.federation.seeds
    if len(all_seeds) == len(seeds):
        return True
    try:
        TrialRounds(run, all_seeds).play([t for t in ROUNDS[:3] if t < run.rounds], time.process_time() + SECONDS)
    except ConfigError:
        return True
    return False


def _replica_without_draws(run: Setup, seeds: Sequence[int]) -> TrialRounds | None:
    """A replica, set up without a draw from a global stream; None where the parts are made for the run's own seeds."""
    streams_before = streams.rng_state()
    try:
        trial = TrialRounds(run, seeds)
    except ConfigError:
        if len(seeds) == len(run.federation.seeds):
            raise
        return None
    if not streams.states_equal(streams_before, streams.rng_state()):
        raise ConfigError(
            f"{' or '.join(_labels(trial.components))} draws from a global random stream while it is set up; use "
            "fedsim.core.rng, whose numbers are functions of seed, round and client"
        )
    return trial


def _check_single_seed(
    run: Setup, trial: TrialRounds, stages: list[Stage], replicate: int, seed: int, rounds: Sequence[int]
) -> None:
    try:
        single_stages = TrialRounds(run, (seed,)).play(rounds, time.process_time() + SECONDS / 2)
    except Exception:  # made for all of the run's seeds
        return
    for stage, single in zip(stages, single_stages, strict=False):
        if not (_finite(stage.values[replicate]) and _finite(single.values[0])):
            return  # rows that diverge are treated together
        if _close(stage.values[replicate], single.values[0]):
            continue
        finding = f"{trial.label(stage.name)}: {stage.name} in round {stage.round} differs"
        if len(stages[0].values) == 1:
            raise ConfigError(
                f"{finding} in a second simulation of the same parts; what they keep in classes and globals is shared "
                "by all simulations, so keep it in attributes that `setup` or `initial` sets"
            )
        raise ConfigError(
            f"{finding} for seed {seed} when no other seed is simulated with it; use numbers of clients and seeds in "
            "place of rows and positions, and the cohort's sums and means, which work seed by seed"
        )


def _finite(values: Values) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values.values())


def _close(values: Values, single_values: Values) -> bool:
    return all(close_to(value, single_values[name]) for name, value in values.items() if name in single_values)


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
