"""The run: its preparation, and the round from start to end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.memory import Memory
from fedsim.core.report import Report
from fedsim.core.torch_warnings import suppress_vmap_warning
from fedsim.evaluation.performative.references import unshifted_minimisers
from fedsim.run import determinism
from fedsim.run.carry_contract import check_strategy_carry
from fedsim.run.checkpoint import CONTENT_ENTRY, Checkpointer
from fedsim.run.content import content_fingerprints
from fedsim.run.contracts import user_code_errors
from fedsim.run.divergence import DivergenceGuard, check_initial_models, divergence_remedy
from fedsim.run.folder import with_folder_lock
from fedsim.run.layout import RankLayout
from fedsim.run.progress import Progress
from fedsim.run.rehearsal import check_evaluation, rehearse_run
from fedsim.run.run_files import MODEL_HEADER_KEY
from fedsim.run.settings import report_standstill
from fedsim.run.setup import Setup
from fedsim.run.strategy_contract import check_initial_state
from fedsim.run.tracker import Tracker
from fedsim.run.tracking import Result, RunConfig, Tracking
from fedsim.run.user_code import UserCodeWatch, user_code_error_context
from fedsim.strategies import State
from fedsim.trainer import TaskGenerator, run_to_completion
from fedsim.trainer.device_memory import raise_malloc_thresholds

log = logging.getLogger(__name__)


class Simulation(Setup):
    """A federation that can be trained; `Setup` has its arguments.

    Example:
        >>> from fedsim.data.datasets import Digits
        >>> from fedsim.models import Linear
        >>> result = Simulation(Digits(), Linear, clients=10, rounds=2).run()
        >>> sorted(result.final)[-1]
        'train_loss'
    """

    def initial_state(self) -> State:
        """Return the strategy's state before round 0."""
        rows = self.model.initial(self.federation.seeds)
        check_initial_models(self.model, rows)
        model = self.model.columns.select_shared(rows)
        if self.start == "ps":
            if "distance_to_ps" not in self.references:
                raise ConfigError("start=ps, but no performatively stable point is known; see shift.references")
            model = self.references["distance_to_ps"].to(model)
        elif self.start == "erm":
            model = unshifted_minimisers(self.model, self.data, model).to(model)
        with user_code_errors(f"strategy={type(self.strategy).__name__}: initial", self.strategy):
            state: State = self.strategy.initial(model, self.federation)
        return state

    @suppress_vmap_warning()
    @determinism.with_numerical_settings
    def run(
        self,
        out: str | Path | None = None,
        resume: bool = False,
        tracking: Tracking | None = None,
        config: RunConfig | None = None,
    ) -> Result:
        """Train for all rounds.

        Args:
            out: run folder; None keeps everything in memory.
            resume: continue from the checkpoint in `out`, if there is one.
            tracking: what is written and shown.
            config: what is written down about the configuration; the command line passes its own.

        Raises:
            ConfigError: before the first round, where `out` cannot be used, or another process uses it.
            CheckpointError: where its checkpoint is damaged or another run's.
            DivergenceError: when a model becomes non-finite.
            OutputError: when a file in `out` cannot be written any more.
            PeerError: when another rank ends.
            RunError: when the device has no room, or none but nondeterministic algorithms where others are asked for.
        """
        return run_to_completion(self.run_as_generator(out, resume, tracking, config))

    @with_folder_lock
    def run_as_generator(
        self,
        out: str | Path | None = None,
        resume: bool = False,
        tracking: Tracking | None = None,
        config: RunConfig | None = None,
    ) -> TaskGenerator[Result]:
        """The steps of `run` as a generator that yields the clients' local work of each round, so that
        `fedsim.run.together` can compute that of several runs at once."""
        tracking, config, folder = tracking or Tracking(), config or RunConfig(), None if out is None else Path(out)
        raise_malloc_thresholds(self.device)
        with user_code_error_context(self.components):
            state = self.initial_state()
            check_initial_state(self, state)
            memory = self.initial_memory(state)
        checkpoints = self.checkpointer(folder, tracking, config.identity, state, memory)
        state, progress = self.load_checkpoint(checkpoints, state, resume)
        first_model, first_round = state.model.clone(), progress.rounds
        with user_code_error_context(self.components):
            self.rehearse(state, memory)
        self.evaluator.references = self.references
        self.log_privacy()
        divergence_guard = self.make_divergence_guard(progress)
        self.round_clock.start_round(progress.virtual, memory, progress.joules)
        output_folder = folder if self.federation.ranks.is_main_rank else None
        with Tracker(self, output_folder, tracking, checkpoints, divergence_guard, progress, config) as tracker:
            tracker.start(state)
            state = yield from self.training_local_tasks(state, memory, tracker)
            report_standstill(self, first_model, state.model, progress.rounds - first_round)
            return tracker.finish(state)

    def training_local_tasks(self, state: State, memory: Memory, tracker: Tracker) -> TaskGenerator[State]:
        """The remaining rounds: from the strategy's state before the first of them to that after the last."""
        user_code = UserCodeWatch(self.components_by_group)
        for t in tracker.iterate_rounds():
            state, report = yield from user_code.watch_steps(
                self.generate_round_tasks(t, state, memory, tracker.divergence_guard), t
            )
            tracker.record_round(t, state, report)
        return state

    def generate_round_tasks(
        self, t: int, state: State, memory: Memory, divergence_guard: DivergenceGuard
    ) -> TaskGenerator[tuple[State, Report]]:
        """Round t: from the strategy's state before it to that after it, and the report that led there."""
        active = self.delayed_updates.idle_clients(self.availability.sample(t), memory)  # who, with p_i^t
        cohort = self.round_clock(
            divergence_guard.without_dropped_replicates(self.strategy.cohort(state, active), t), t
        )  # in time
        start = self.submodels(self.strategy.start(state, cohort), cohort, t)  # [n, d] rows
        report = yield from self.delayed_updates.generate_round_tasks(
            start, cohort, t, state.model, memory, divergence_guard.accepted_rows
        )
        self.submodels.check(report, t)
        report = self.uplink(report, memory)  # what reaches the server
        with divergence_guard.raise_as_divergence(t, state, report):
            state = self.strategy.aggregate(state, report, t)  # linear algebra
        return state, report

    def checkpointer(
        self, folder: Path | None, tracking: Tracking, identity: Mapping[str, Any], state: State, memory: Memory
    ) -> Checkpointer:
        """Return the checkpointer of this run, with the header that identifies the run's content."""
        identity = {"seeds": list(self.federation.seeds), "strategy": type(self.strategy).__name__, **identity}
        layout = RankLayout.from_components(self.strategy, memory, state.model, self.federation)
        content = content_fingerprints(self) if folder is not None and self.federation.ranks.is_main_rank else {}
        header = {MODEL_HEADER_KEY: self.model_metadata(), CONTENT_ENTRY: content}
        return Checkpointer(folder, tracking.checkpoint_every, identity, memory, layout, header)

    def load_checkpoint(self, checkpoints: Checkpointer, state: State, resume: bool) -> tuple[State, Progress]:
        """Return state and progress of the checkpoint, if the run is to resume and there is one; otherwise those before
        round 0."""
        progress, executor_cache = (
            Progress.at_start(self.federation.num_replicates),
            self.training.trainer_factory.executor_cache,
        )
        path = checkpoints.path
        if resume and path is not None and checkpoints.exists():
            state, progress = checkpoints.read(state)
            if progress.rounds > self.rounds:
                raise ConfigError(
                    f"rounds={self.rounds}, but the run in {path.parent} has completed {progress.rounds}; raise rounds"
                )
            log.info("resumed %s after round %d", path, progress.rounds)
        executor_cache.update(progress.executors)
        progress.executors = executor_cache  # results of later executor trials go into the next checkpoint
        return state, progress

    def rehearse(self, state: State, memory: Memory) -> None:
        """Refuse, before anything is written, parts that would fail or be silently wrong in the middle of the run."""
        check_strategy_carry(self, state, memory)
        rehearse_run(self, state, memory)
        check_evaluation(self, state, memory)

    def log_privacy(self) -> None:
        """Log the privacy claim, if rows have noise."""
        if (private := self.privacy(self.rounds)) is not None:
            log.info("privacy: %s", private.statement)

    def make_divergence_guard(self, progress: Progress) -> DivergenceGuard:
        """Return the guard that detects non-finite rows and models; replicates that were dropped before stay
        dropped."""
        name, remedy_text = type(self.strategy).__name__, divergence_remedy(self.trainer.local_rule, self.strategy)
        eval_every = self.evaluation.every
        return DivergenceGuard(self.federation, name, self.on_nonfinite, eval_every, progress.dropped, remedy_text)
