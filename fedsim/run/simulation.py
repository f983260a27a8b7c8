"""A run: what a user chooses, what precedes its first round, and the round, all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from fedsim.availability import Availability
from fedsim.availability.clock import Clock, Delay, Work
from fedsim.core.constraints import Count, NonNegative, OneOf, validated
from fedsim.core.effects import Declarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.memory import Memory
from fedsim.core.ranks import Ranks
from fedsim.data.contamination import Contamination
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.checked import check_samples
from fedsim.data.partition import Partition
from fedsim.evaluation import EvaluationOptions
from fedsim.evaluation.performative.references import unshifted_minimisers
from fedsim.evaluation.personal import Personal
from fedsim.local import LocalRule
from fedsim.models.losses import Loss
from fedsim.models.selectors import Selector
from fedsim.run import determinism, hints
from fedsim.run.carry_contract import check_carry
from fedsim.run.checkpoint import CONTENT, Checkpointer
from fedsim.run.content import content
from fedsim.run.contracts import user_code_errors
from fedsim.run.divergence import ON_NONFINITE, DivergenceGuard, check_start, remedy
from fedsim.run.folder import with_lock
from fedsim.run.layout import Layout
from fedsim.run.model_choice import ModelChoice
from fedsim.run.parts import KINDS, Parts
from fedsim.run.progress import Progress
from fedsim.run.rehearsal import dry_run, try_evaluation
from fedsim.run.rules import Stop
from fedsim.run.run_files import HEADER
from fedsim.run.settings import report_standstill
from fedsim.run.setup import Setup
from fedsim.run.strategy_contract import check_state
from fedsim.run.tracker import Tracker
from fedsim.run.tracking import Result, Tracking
from fedsim.run.wiring import Compute, check_kinds, check_seeds
from fedsim.shift import Shift
from fedsim.strategies import State, Strategy
from fedsim.trainer import Execution, TaskGenerator, run_to_completion
from fedsim.trainer.device_memory import configure_allocator
from fedsim.uplink import Uplink
from fedsim.uplink.attack import Attack

log = logging.getLogger(__name__)


STARTS = ("random", "ps", "erm")


@validated
class Simulation(Setup):
    """A federation that can be trained. The arguments are the groups of a configuration, and its few plain keys.

    Parts are copied before they are set up (`fedsim.run.ownership`), so that the same objects may be given to several
    simulations.

    Args:
        dataset: what samples exist.
        model: builds a fresh `nn.Module`; called with `shape` and `classes` if it takes them (see `RowModel`).
        clients: m, or 'all' that come with the data. Of more than m that do, partition=natural draws m.
        partition: who holds which; the natural one where the data set has owners, else iid.
        availability: who can take part.
        strategy: the aggregation algorithm.
        local: the local rule.
        shift, contamination: how data answer the model, and which are rotten.
        rounds: T.
        seeds: one replicate each, simulated together.
        loss, ridge: per-sample loss (the data set's by default) and penalty.
        output: which of the things that the module returns, where it is not a tensor: a name, or a number.
        start: 'random': the model's own initialisation; 'ps': the performatively stable point (p-fedavg Fig. 11);
            'erm': the best model on data that have not answered yet (the program of p-fedavg's authors).
        on_nonfinite: 'stop', 'drop_client' or 'drop_replicate', see `fedsim.run.divergence`.
        columns: which parts of the model stay with the client; everything travels unless given.
        personal: whose own models are scored too, and who joins when training is over.
        evaluation: when which model is evaluated.
        stop: when the run ends before its last round.
        uplink: what happens to rows between local work and aggregation.
        attack: who lies, and how: before the uplink.
        clock: how long clients take in virtual seconds, and who is late.
        work: how much of a round's local steps each does.
        delay: how many rounds later rows arrive.
        execution: where and how all is computed.
        ranks: the processes that share the run (`Ranks.join()` under torchrun); a lone one unless given.

    Example:
        >>> from fedsim.data.datasets import Digits
        >>> from fedsim.models import Linear
        >>> result = Simulation(Digits(), Linear, clients=10, rounds=2).run()
        >>> sorted(result.final)[-1]
        'train_loss'
    """

    effective_if: Declarations = (
        EffectiveIf(
            "uplink",
            lambda component, run: run.clients_send or not component.components.uplink.stages,
            "a strategy whose clients send something",
            attribute="components.uplink",
        ),
        EffectiveIf(
            "attack",
            lambda component, run: run.clients_send or not component.components.attack.active,
            "a strategy whose clients send something",
            attribute="components.attack",
        ),
    )

    def __init__(  # noqa: PLR0913 (users call it with keywords: the groups and keys of a configuration)
        self,
        dataset: Dataset,
        model: Callable[..., nn.Module] | nn.Module,
        clients: int | str = 100,
        partition: Partition | None = None,
        availability: Availability | None = None,
        strategy: Strategy[Any] | None = None,
        local: LocalRule | None = None,
        shift: Shift | None = None,
        contamination: Contamination | None = None,
        rounds: Count = 100,
        seeds: Sequence[int] = (0,),
        loss: str | Loss | None = None,
        ridge: NonNegative = 0.0,
        output: str | int | None = None,
        start: Annotated[str, OneOf(*STARTS)] = "random",
        on_nonfinite: Annotated[str, OneOf(*ON_NONFINITE)] = "stop",
        columns: Selector | None = None,
        personal: Personal | None = None,
        evaluation: EvaluationOptions | None = None,
        execution: Execution | None = None,
        stop: Stop | None = None,
        uplink: Uplink | None = None,
        attack: Attack | None = None,
        clock: Clock | None = None,
        work: Work | None = None,
        delay: Delay | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        check_kinds(KINDS, locals())
        execution = execution or Execution()
        compute = Compute.of(execution, ranks or Ranks())
        check_samples(dataset, loss)  # on the host, before the samples move
        components = Parts.copied(
            dataset.to(compute.device), evaluation=evaluation, uplink=uplink, partition=partition,
            availability=availability, strategy=strategy, local=local, shift=shift, contamination=contamination,
            attack=attack, columns=columns, clock=clock, work=work, delay=delay, personal=personal, stop=stop,
            trainer=execution,
        )  # fmt: skip
        choice = ModelChoice(model, loss, ridge, output, execution.precision)
        super().__init__(components, choice, compute, clients, check_seeds(seeds), rounds, start, on_nonfinite)

    def initial_state(self) -> State:
        """The strategy's state before round 0."""
        rows = self.model.initial(self.federation.seeds)
        check_start(self.model, rows)
        model = self.model.columns.shared_part(rows)
        if self.start == "ps":
            if "distance_to_ps" not in self.references:
                raise ConfigError("start=ps, but no performatively stable point is known; see shift.references")
            model = self.references["distance_to_ps"].to(model)
        elif self.start == "erm":
            model = unshifted_minimisers(self.model, self.data, model).to(model)
        with user_code_errors(f"strategy={type(self.strategy).__name__}: initial", self.strategy):
            state: State = self.strategy.initial(model, self.federation)
        return state

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
    ) -> TaskGenerator[Result]:
        """What `run` does, but for the clients' local work, which is handed out every round: `fedsim.run.together` does
        that of several runs at once."""
        tracking, folder = tracking or Tracking(), None if out is None else Path(out)
        configure_allocator(self.device)
        state = self.initial_state()
        check_state(self, state)
        memory = self._memory_at_start(state)
        checkpoints = self._checkpointer(folder, tracking, identity or {}, state, memory)
        state, progress = self._resumed(checkpoints, state, resume)
        first_model, first_round = state.model.clone(), progress.rounds
        self._rehearse(state, memory)
        self.evaluator.references = self.references
        self._log_privacy()
        guard = self._guard(progress)
        self.pace.begin(progress.virtual)
        output_folder = folder if self.federation.ranks.is_first else None
        with Tracker(self, output_folder, tracking, checkpoints, guard, progress, settings, config) as tracker:
            tracker.begin(state)
            for t in tracker.rounds():
                active = self.delivery.not_in_flight(self.availability.sample(t), memory)  # who, with p_i^t
                cohort = self.pace(
                    guard.without_given_up(self.strategy.cohort(state, active), t), t
                )  # who computes, in time
                start = self.strategy.start(state, cohort)  # [n, d] rows
                report = yield from self.trainer.steps(start, cohort, t, state.model, memory, guard.accept)
                report = self.uplink(self.delivery(report, memory), memory)  # what reaches the server
                with guard.catch_errors(t, state, report):
                    state = self.strategy.aggregate(state, report, t)  # linear algebra
                tracker.round(t, state, report)
            report_standstill(self, first_model, state.model, progress.rounds - first_round)
            return tracker.finish(state)

    def _memory_at_start(self, state: State) -> Memory:
        """What clients, evaluation and uplink remember before round 0, given the strategy's state."""
        memory = self.trainer.memory(state.model)
        memory.evaluated = self.models.memory(state.model) | self.participation.memory()
        self.uplink.remember(memory, self.federation, state.model)
        return memory

    def _checkpointer(
        self, folder: Path | None, tracking: Tracking, identity: dict[str, Any], state: State, memory: Memory
    ) -> Checkpointer:
        """What keeps checkpoints, with the header that tells what this run is made of."""
        identity = {"seeds": list(self.federation.seeds), "strategy": type(self.strategy).__name__} | identity
        layout = Layout.of(self.strategy, memory, state.model, self.federation)
        made_of = content(self) if folder is not None and self.federation.ranks.is_first else {}
        header = {HEADER: self.model_metadata(), CONTENT: made_of}
        return Checkpointer(folder, tracking.checkpoint_every, identity, memory, layout, header)

    def _resumed(self, checkpoints: Checkpointer, state: State, resume: bool) -> tuple[State, Progress]:
        """State and progress of the checkpoint, if the run is to resume and there is one; else those before round 0."""
        progress, executor_cache = Progress.at_start(self.federation.replicates), self.training.trainers.executor_cache
        path = checkpoints.path
        if resume and path is not None and checkpoints.exists():
            state, progress = checkpoints.read(state)
            if progress.rounds > self.rounds:
                raise ConfigError(
                    f"rounds={self.rounds}, but the run in {path.parent} has completed {progress.rounds}; raise rounds"
                )
            log.info("resumed %s after round %d", path, progress.rounds)
        executor_cache.update(progress.executors)
        progress.executors = executor_cache  # what trials find from here on goes into the next checkpoint
        return state, progress

    def _rehearse(self, state: State, memory: Memory) -> None:
        """Refuse, before anything is written, what would fail or be silently wrong in the middle of the run."""
        check_carry(self, state, memory)
        dry_run(self, state, memory)
        try_evaluation(self)

    def _log_privacy(self) -> None:
        """Log what may be claimed of the clients' privacy, where rows have noise."""
        if (private := self.privacy(self.rounds)) is not None:
            log.info("privacy: %s", private.statement)

    def _guard(self, progress: Progress) -> DivergenceGuard:
        """What notices rows and models that become non-finite; it goes on with those that were dropped."""
        name, advice = type(self.strategy).__name__, remedy(self.trainer.rule, self.strategy)
        eval_every = self.evaluation.every
        return DivergenceGuard(self.federation, name, self.on_nonfinite, eval_every, progress.dropped, advice)
