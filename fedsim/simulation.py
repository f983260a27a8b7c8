"""The round, all of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim import checks, determinism
from fedsim.availability import Availability
from fedsim.checkpoint import Checkpointer, Progress, read
from fedsim.contamination import Contamination, NoContamination
from fedsim.datasets import Dataset
from fedsim.divergence import ON_NONFINITE, DivergenceGuard
from fedsim.errors import ConfigError
from fedsim.evaluation import Evaluator
from fedsim.local import SGD, LocalRule
from fedsim.memory import Memory
from fedsim.models.losses import Loss
from fedsim.partition import Partition
from fedsim.performative.references import references
from fedsim.personal import Personal
from fedsim.pooled import PooledData, PooledShift
from fedsim.ranks import Layout, Ranks
from fedsim.shift import NoShift, Shift
from fedsim.strategies import FedAvg, State, Strategy
from fedsim.tracking import Result, Tracker, Tracking
from fedsim.trainer import Batches, Trainer
from fedsim.wiring import (
    bound,
    check_seeds,
    federation_of,
    personal_views,
    resolve_device,
    resolve_dtype,
    row_model,
    split,
)

log = logging.getLogger(__name__)

STARTS = ("random", "ps")
EVALUATED = ("global", "client_mean")


class Simulation:
    """A federation, wired up and checked; `run` trains it.

    Args:
        dataset: what samples exist.
        model: builds a fresh `nn.Module`; called with `shape` and `classes` if it takes them (see `RowModel`).
        clients: m.
        partition: who holds which; the natural one where the data set has owners, else iid.
        availability: who can take part.
        strategy: the aggregation algorithm.
        local: the local rule.
        shift, contamination: how data answer the model, and which are rotten.
        rounds: T.
        seeds: one replicate each, simulated together.
        loss, ridge: per-sample loss (the data set's by default) and penalty.
        eval_every: rounds between evaluations; the initial and the last model are always evaluated.
        start: 'random': the model's own initialisation; 'ps': the performatively stable point (p-fedavg Fig. 11).
        evaluate: 'global' evaluates the server's model, 'client_mean' the mean of all clients' models.
        client_samples: samples on which each client is evaluated.
        personal: whose own models are judged too, and who joins when training is over.
        device: 'auto', 'cpu', 'cuda', …
        dtype: 'float32' or 'float64'.
        executor, chunk, workers: see `fedsim.trainer.choose`.
        precision: of training: 'full', 'tf32' or 'bf16', see `fedsim.models.precision`.
        compile: 'never', or how `torch.compile` treats a vmapped step, see `fedsim.trainer.choose`.
        memory: where what is remembered of each client lies between rounds: 'device', 'host' or 'disk' (see
            `fedsim.placement`); the rows of a round are on the device in any case, and the numbers are the same.
        on_nonfinite: 'stop', 'drop_client' or 'drop_replicate', see `fedsim.divergence`.
        deterministic: the same bits from every run on the same device, see `fedsim.determinism`.
        ranks: the processes that share the run (`Ranks.join()` under torchrun); a lone one unless given.

    Example:
        >>> from fedsim.datasets import Digits
        >>> from fedsim.models import Linear
        >>> result = Simulation(Digits(), Linear, clients=10, rounds=2).run()
        >>> sorted(result.final)[-1]
        'train_loss'
    """

    def __init__(
        self,
        dataset: Dataset,
        model: Callable[..., nn.Module] | nn.Module,
        clients: int = 100,
        partition: Partition | None = None,
        availability: Availability | None = None,
        strategy: Strategy[Any] | None = None,
        local: LocalRule | None = None,
        shift: Shift | None = None,
        contamination: Contamination | None = None,
        rounds: int = 100,
        seeds: Sequence[int] = (0,),
        loss: str | Loss | None = None,
        ridge: float = 0.0,
        eval_every: int = 10,
        start: str = "random",
        evaluate: str = "global",
        client_samples: int = 20,
        personal: Personal | None = None,
        device: str = "auto",
        dtype: str = "float32",
        executor: str = "auto",
        chunk: int | str = "auto",
        workers: int | str = "auto",
        memory: str = "device",
        precision: str = "full",
        compile: str = "never",
        on_nonfinite: str = "stop",
        deterministic: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.rounds = checks.whole("rounds", rounds)
        self.eval_every = checks.whole("eval_every", eval_every)
        self.start = checks.choice("start", start, STARTS)
        self.deterministic = determinism.prepared(deterministic)
        self.on_nonfinite = checks.choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.evaluate = checks.choice("evaluate", evaluate, EVALUATED)
        checks.whole("clients", clients)
        checks.whole("client_samples", client_samples)
        ranks = ranks or Ranks()
        seeds, self.device, number = check_seeds(seeds), resolve_device(ranks.device(device)), resolve_dtype(dtype)
        rule, personal, contamination = local or SGD(), personal or Personal(), contamination or NoContamination()
        self.strategy, self.shift, self.dataset = strategy or FedAvg(), shift or NoShift(), dataset.to(self.device)
        if rule.pooled:
            log.info("one client holds the data of all %d; partition and availability do not apply", clients)
            self.shift = PooledShift(self.shift, self.dataset, clients)
            self.dataset = PooledData(self.dataset, clients)
            clients, partition, availability = 1, None, None
        self.tables = split(self.dataset, partition, clients, seeds)
        self.federation = federation_of(seeds, clients, self.dataset, self.tables, self.device, number, ranks, memory)
        self.model = row_model(model, self.dataset, loss, ridge, self.device, number, precision)
        personal.check(clients, self.dataset.stream, bool(self.tables) and self.tables[0].validation is not None)
        self.availability = bound(availability, personal.newcomers, self.federation, rounds)
        self.strategy.check(self.availability)
        contamination.setup(self.federation, self.dataset)

        keyed = bool(self.model.dropout_keys)
        batches = Batches(self.dataset, self.tables, self.federation, rule, contamination, keyed)
        self.shift.setup(self.federation, batches, self.model)
        rule.setup(batches, self.shift, self.model)

        def trainer_of(other: LocalRule) -> Trainer:
            own = batches if other is rule else batches.under(other)
            return Trainer(other, self.model, self.shift, own, executor, chunk, workers, compile)

        self.trainer = trainer_of(rule)
        self.evaluator = Evaluator(self.model, batches, self.federation, self.shift, client_samples)
        self.personal, self.newcomers = personal_views(
            personal, self.strategy, self.trainer, trainer_of, self.evaluator, self.tables
        )

    def initial_state(self) -> State:
        """The strategy's state before round 0."""
        model = self.model.initial(self.federation.seeds)
        if self.start == "ps":
            if "distance_to_ps" not in self.references:
                raise ConfigError("start=ps, but no performatively stable point is known; see shift.references")
            model = self.references["distance_to_ps"].to(model)
        return self.strategy.initial(model, self.federation)

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
            ConfigError: before the first round, where `out` cannot be used.
            CheckpointError: where its checkpoint is damaged or another run's.
            DivergenceError: when a model becomes non-finite.
            OutputError: when a file in `out` cannot be written any more.
            PeerError: when another rank ends.
            RunError: when the device has no room, or none but nondeterministic algorithms where others are asked for.
        """
        tracking = tracking or Tracking()
        identity = {"seeds": list(self.federation.seeds), "strategy": type(self.strategy).__name__} | (identity or {})
        folder = None if out is None else Path(out)
        state, progress = self.initial_state(), Progress()
        memory = self.trainer.memory(state.model)
        ranks = self.federation.ranks
        layout = Layout.of(self.strategy, memory, state.model, self.federation)
        checkpoints = Checkpointer(folder, tracking.checkpoint_every, identity, memory, layout)
        if resume and checkpoints.path is not None and ranks.tell(checkpoints.path.exists()):
            state, progress = read(checkpoints.path, state, identity, memory, layout)
            if progress.rounds > self.rounds:
                raise ConfigError(
                    f"rounds={self.rounds}, but the run in {folder} has completed {progress.rounds}; raise rounds"
                )
            log.info("resumed %s after round %d", checkpoints.path, progress.rounds)
        self._check_carry(state, memory)
        self.evaluator.references = self.references
        name, written = type(self.strategy).__name__, folder if ranks.first else None
        guard = DivergenceGuard(self.federation, name, self.on_nonfinite, self.eval_every, progress.dropped)
        with Tracker(self, written, tracking, checkpoints, guard, progress, settings, config) as tracker:
            tracker.begin(state)
            for t in range(progress.rounds, self.rounds):
                active = self.availability.sample(t)
                cohort = guard.present(self.strategy.cohort(state, active), t)
                start = self.strategy.start(state, cohort)
                report = self.trainer.run(start, cohort, t, state.model, memory, guard.accept)
                state = self.strategy.aggregate(state, report, t)
                tracker.round(t, state, report)
            return tracker.finish(state)

    @functools.cached_property
    def references(self) -> dict[str, torch.Tensor]:
        """θ^PS and θ^PO, [R, d] float64, as 'distance_to_ps' and 'distance_to_po': those there are and are wanted."""
        weighting = getattr(self.strategy, "weighting", "uniform")
        random = self.model.initial(self.federation.seeds)
        return references(self.model, self.shift, self.trainer.batches, self.federation, random, weighting)

    def _check_carry(self, state: State, memory: Memory) -> None:
        """Whatever the strategy hands to the local rule must be used there: asked with nobody in the cohort.

        Nor may it bear the name of something that rule or shift remember.
        """
        shape = (self.federation.replicates, self.federation.clients)
        nobody = self.federation.cohort(np.zeros(shape), np.zeros(shape))
        start = self.strategy.start(state, nobody)
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
