"""The round, all of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.core.memory import Memory
from fedsim.models.probe import said_of_forward
from fedsim.models.row_model import is_built_in
from fedsim.performative.references import unshifted
from fedsim.results.models import HEADER
from fedsim.run import determinism, hints
from fedsim.run.checkpoint import CONTENT, Checkpointer, read
from fedsim.run.content import content
from fedsim.run.contracts import within
from fedsim.run.divergence import DivergenceGuard, check_start, remedy
from fedsim.run.folder import with_lock
from fedsim.run.layout import Layout
from fedsim.run.progress import Progress
from fedsim.run.rehearsal import dry_run
from fedsim.run.settings import report_standstill
from fedsim.run.setup import Setup
from fedsim.run.strategy_contract import check_state
from fedsim.run.tracker import Tracker
from fedsim.strategies import State
from fedsim.tracking import Result, Tracking
from fedsim.trainer import Steps, run_to_completion

log = logging.getLogger(__name__)


class Simulation(Setup):
    """A federation that can be trained; `Setup` has its arguments.

    Example:
        >>> from fedsim.datasets import Digits
        >>> from fedsim.models import Linear
        >>> result = Simulation(Digits(), Linear, clients=10, rounds=2).run()
        >>> sorted(result.final)[-1]
        'train_loss'
    """

    def initial_state(self) -> State:
        """The strategy's state before round 0."""
        rows = self.model.initial(self.federation.seeds)
        check_start(self.model, rows)
        model = self.model.columns.seen(rows)
        if self.start == "ps":
            if "distance_to_ps" not in self.references:
                raise ConfigError("start=ps, but no performatively stable point is known; see shift.references")
            model = self.references["distance_to_ps"].to(model)
        elif self.start == "erm":
            model = unshifted(self.model, self.data, model).to(model)
        with within(f"strategy={type(self.strategy).__name__}: initial", self.strategy):
            return self.strategy.initial(model, self.federation)

    @hints.suppress_vmap_warning()
    @determinism.if_asked
    def run(
        self,
        out: str | Path | None = None,
        resume: bool = False,
        tracking: Tracking | None = None,
        identity: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        config: str | None = None,
    ) -> Result:
        """Train for all rounds.

        Args:
            out: run folder; None keeps everything in memory.
            resume: continue from the checkpoint in `out`, if there is one.
            tracking: what is written and shown.
            identity: settings a resumed run must share (the command line passes its resolved configuration).
            settings: named values for TensorBoard's HPARAMS table.
            config: YAML that is kept as config.yaml in `out`.

        Raises:
            ConfigError: before the first round, where `out` cannot be used, or another process uses it.
            CheckpointError: where its checkpoint is damaged or another run's.
            DivergenceError: when a model becomes non-finite.
            OutputError: when a file in `out` cannot be written any more.
            PeerError: when another rank ends.
            RunError: when the device has no room, or none but nondeterministic algorithms where others are asked for.
        """
        return run_to_completion(self.steps(out, resume, tracking, identity, settings, config))

    @with_lock
    def steps(
        self,
        out: str | Path | None = None,
        resume: bool = False,
        tracking: Tracking | None = None,
        identity: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        config: str | None = None,
    ) -> Steps[Result]:
        """What `run` does, but for the clients' local work, which is handed out every round: `fedsim.run.together` does
        that of several runs at once."""
        tracking = tracking or Tracking()
        identity = {"seeds": list(self.federation.seeds), "strategy": type(self.strategy).__name__} | (identity or {})
        folder = None if out is None else Path(out)
        state, progress = self.initial_state(), Progress()
        check_state(self, state)
        memory = self.trainer.memory(state.model)
        memory.evaluated = self.models.memory(state.model) | self.participation.memory()
        self.uplink.remember(memory, self.federation, state.model)
        ranks = self.federation.ranks
        layout = Layout.of(self.strategy, memory, state.model, self.federation)
        made_of = content(self) if folder is not None and ranks.first else {}
        header = {HEADER: self.model_metadata(), CONTENT: made_of}
        checkpoints = Checkpointer(folder, tracking.checkpoint_every, identity, memory, layout, header)
        if resume and checkpoints.path is not None and ranks.broadcast_object(checkpoints.path.exists()):
            state, progress = read(checkpoints.path, state, identity, memory, layout, made_of)
            if progress.rounds > self.rounds:
                raise ConfigError(
                    f"rounds={self.rounds}, but the run in {folder} has completed {progress.rounds}; raise rounds"
                )
            log.info("resumed %s after round %d", checkpoints.path, progress.rounds)
        first_model, first_round = state.model.clone(), progress.rounds
        settled = self.training.trainers.settled
        settled.update(progress.executors)
        progress.executors = settled
        self._check_carry(state, memory)
        dry_run(self, state, memory)
        self._try_evaluation()
        self.evaluator.references = self.references
        if (private := self.privacy(self.rounds)) is not None:
            log.info("privacy: %s", private.said)
        name, output_folder = type(self.strategy).__name__, folder if ranks.first else None
        guard_options = (
            self.on_nonfinite,
            self.evaluation.every,
            progress.dropped,
            remedy(self.trainer.rule, self.strategy),
        )
        guard = DivergenceGuard(self.federation, name, *guard_options)
        with Tracker(self, output_folder, tracking, checkpoints, guard, progress, settings, config) as tracker:
            tracker.begin(state)
            for t in tracker.rounds():
                active = self.delivery.idle(self.availability.sample(t), memory)
                cohort = self.pace(guard.present(self.strategy.cohort(state, active), t), t)
                start = self.strategy.start(state, cohort)
                report = yield from self.trainer.steps(start, cohort, t, state.model, memory, guard.accept)
                report = self.uplink(self.delivery(report, memory), memory)
                with guard.watching(t, state, report):
                    state = self.strategy.aggregate(state, report, t)
                tracker.round(t, state, report)
            report_standstill(self, first_model, state.model, progress.rounds - first_round)
            return tracker.finish(state)

    def _try_evaluation(self) -> None:
        """Evaluate once before anything is written, so that a module of the user's that cannot be is refused."""
        if not is_built_in(self.model.evaluation_module):
            with said_of_forward(self.model.evaluation_module):
                self.evaluator(self.model.initial(self.federation.seeds))

    def _check_carry(self, state: State, memory: Memory) -> None:
        """Whatever the strategy hands to the local rule must be used there: asked with nobody in the cohort.

        Nor may it bear the name of something that rule or shift remember.
        """
        shape = (self.federation.replicates, self.federation.clients)
        nobody = self.federation.cohort(np.zeros(shape), np.zeros(shape))
        start = self.strategy.start(state, nobody)
        if self.pace.clock.cuts and (self.strategy.cohort(state, nobody).host.count == 0).any():
            raise ConfigError(
                f"strategy={type(self.strategy).__name__} as configured lets those compute who do not take part, and "
                "clock.deadline or clock.first would make the late do neither; give null for both, or another strategy"
            )
        local = self.trainer.rule
        handed = set(start) - {"params"} if isinstance(start, dict) else set()
        twice = ({*handed, "params"} & memory.clients.keys()) | ({"round"} & {*handed, *memory.clients})
        if twice:
            raise ConfigError(
                f"{', '.join(sorted(twice))} in the memory of local={type(local).__name__} or of "
                f"shift={type(self.shift).__name__} is the name of something else in the rows of "
                f"strategy={type(self.strategy).__name__}; rename it"
            )
        ignored = handed - local.extras
        if ignored:
            raise ConfigError(
                f"strategy={type(self.strategy).__name__} hands {', '.join(sorted(ignored))} to the local rule, but "
                f"{type(local).__name__} does not use it; choose local=sgd, or another strategy"
            )
