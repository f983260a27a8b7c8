"""The round, all of it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim import checks
from fedsim.availability import Availability, Full, Withheld
from fedsim.checkpoint import Checkpointer, Progress, read
from fedsim.contamination import Contamination, NoContamination
from fedsim.datasets import Dataset
from fedsim.divergence import ON_NONFINITE, DivergenceGuard
from fedsim.errors import ConfigError
from fedsim.evaluation import Evaluator
from fedsim.federation import Federation
from fedsim.local import SGD, LocalRule
from fedsim.memory import Memory
from fedsim.models import RowModel
from fedsim.models.losses import Loss
from fedsim.partition import IID, Natural, Partition, Table
from fedsim.partition.base import Samples
from fedsim.performative.references import references
from fedsim.personal import Newcomers, Personal, PersonalEvaluator
from fedsim.personal.judge import Judge
from fedsim.personal.predictors import Predictors
from fedsim.pooled import PooledData, PooledShift
from fedsim.shift import NoShift, Shift
from fedsim.strategies import FedAvg, State, Strategy
from fedsim.tracking import Result, Tracker, Tracking
from fedsim.trainer import Batches, Trainer

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
        memory: where what local rule and shift remember of each client lies: 'device', 'host' or 'disk'.
        on_nonfinite: 'stop', 'drop_client' or 'drop_replicate', see `fedsim.divergence`.

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
        on_nonfinite: str = "stop",
    ) -> None:
        self.rounds = checks.whole("rounds", rounds)
        self.eval_every = checks.whole("eval_every", eval_every)
        self.start = checks.choice("start", start, STARTS)
        self.on_nonfinite = checks.choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.evaluate = checks.choice("evaluate", evaluate, EVALUATED)
        seeds = check_seeds(seeds)
        checks.whole("clients", clients)
        checks.whole("client_samples", client_samples)
        self.device, number = resolve_device(device), resolve_dtype(dtype)
        self.strategy = strategy or FedAvg()
        self.shift = shift or NoShift()
        self.dataset = dataset = dataset.to(self.device)
        local = local or SGD()
        if local.pooled:
            log.info("one client holds the data of all %d; partition and availability do not apply", clients)
            self.shift = PooledShift(self.shift, dataset, clients)
            self.dataset = dataset = PooledData(dataset, clients)
            clients, partition, availability = 1, None, None
        tables = self._split(partition, clients, seeds)
        self.federation = _federation(seeds, clients, dataset, tables, self.device, number)
        self.tables = tables
        loss = loss or dataset.loss
        self.model = RowModel(_builder(model, dataset, loss), loss, ridge, self.device, number)
        self._check_model(number)
        personal = personal or Personal()
        personal.check(clients, dataset.stream, bool(tables) and tables[0].validation is not None)
        availability = availability or Full()
        if personal.newcomers:
            availability = Withheld(availability, personal.newcomers)
        self.availability = availability.bind(self.federation)
        self.availability.check_rounds(rounds)
        self.strategy.check(self.availability)
        contamination = contamination or NoContamination()
        contamination.setup(self.federation, dataset)
        keyed = bool(self.model.dropout_keys)
        batches = Batches(dataset, tables, self.federation, local, contamination, keyed)
        self.shift.setup(self.federation, batches, self.model)
        local.setup(batches, self.shift, self.model)

        def trainer_of(rule: LocalRule) -> Trainer:
            own = batches if rule is local else Batches(dataset, tables, self.federation, rule, contamination, keyed)
            return Trainer(rule, self.model, self.shift, own, executor, chunk, workers, memory)

        self.trainer = trainer_of(local)
        self.evaluator = Evaluator(self.model, batches, self.federation, self.shift, client_samples)
        self.personal, self.newcomers = self._personal(personal, local, trainer_of)

    def initial_state(self) -> State:
        """The strategy's state before round 0."""
        model = self.model.initial(self.federation.seeds)
        if self.start == "ps":
            if "distance_to_ps" not in self.references:
                raise ConfigError("start=ps, but no performatively stable point is known; see shift.references")
            model = self.references["distance_to_ps"].to(model)
        return self.strategy.initial(model, self.federation)

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
        """
        tracking = tracking or Tracking()
        identity = {"seeds": list(self.federation.seeds), "strategy": type(self.strategy).__name__} | (identity or {})
        folder = None if out is None else Path(out)
        state, progress = self.initial_state(), Progress()
        memory = self.trainer.memory(state.model)
        checkpoints = Checkpointer(folder, tracking.checkpoint_every, identity, memory)
        if resume and checkpoints.path is not None and checkpoints.path.exists():
            state, progress = read(checkpoints.path, state, identity, memory)
            if progress.rounds > self.rounds:
                raise ConfigError(
                    f"rounds={self.rounds}, but the run in {folder} has completed {progress.rounds}; raise rounds"
                )
            log.info("resumed %s after round %d", checkpoints.path, progress.rounds)
        self._check_carry(state, memory)
        self.evaluator.references = self.references
        name = type(self.strategy).__name__
        guard = DivergenceGuard(self.federation, name, self.on_nonfinite, self.eval_every, progress.dropped)
        with Tracker(self, folder, tracking, checkpoints, guard, progress, settings, config) as tracker:
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

    def _personal(
        self, options: Personal, rule: LocalRule, trainer_of: Callable[[LocalRule], Trainer]
    ) -> tuple[PersonalEvaluator | None, Newcomers | None]:
        """What judges clients' own models, as far as it is asked for."""
        if not options.active:
            return None, None
        held = None if self.dataset.stream else [t.validation for t in self.tables if t.validation is not None]
        judge = Judge(self.evaluator, held, options.train_samples)
        predictors = Predictors(self.trainer, self.strategy, trainer_of)
        evaluator = PersonalEvaluator(options, self.federation, self.strategy, predictors, judge)
        newcomers = None
        if options.newcomers:
            newcomers = Newcomers(options, self.federation, self.strategy, trainer_of, rule, judge)
        return evaluator if options.over != "none" else None, newcomers

    def _split(self, partition: Partition | None, clients: int, seeds: Sequence[int]) -> list[Table]:
        """One index table per replicate; none for a stream."""
        data = self.dataset
        if data.stream:
            if partition is not None and not isinstance(partition, Natural):
                raise ConfigError(f"dataset={data.name} draws its samples per client; use partition=natural")
            if data.natural_clients != clients:
                raise ConfigError(f"clients={clients}, but dataset={data.name} was made for {data.natural_clients}")
            return []
        labels = data.train_y.cpu().numpy() if data.classes is not None and data.train_y is not None else None
        owners = data.owners.cpu().numpy() if data.owners is not None else None
        partition = partition or (IID() if owners is None else Natural())
        samples = Samples(len(data.train_x), labels, owners)
        tables = [partition.table(samples, clients, seed) for seed in seeds]
        used = [len(t.order) + (0 if t.validation is None else len(t.validation.order)) for t in tables]
        left_out = samples.total - min(used)
        if left_out:
            log.info("partition: %d of %d samples are left out", left_out, samples.total)
        return tables

    def _check_model(self, dtype: torch.dtype) -> None:
        """Two samples through model and loss."""
        data = self.dataset
        if data.stream:
            pair = torch.zeros(1, dtype=torch.int64, device=self.device)
            drawn = data.draw(pair, pair, 2, dtype)
            x, y = drawn["x"][0], drawn["y"][0] if "y" in drawn else None
        else:
            pair = torch.zeros(2, dtype=torch.int64, device=self.device)
            x = data.prepare(data.train_x[pair], dtype)
            y = None if data.train_y is None else data.train_y[pair]
        self.model.check(x, y, data.classes, data.name)


def resolve_device(device: str) -> torch.device:
    """'auto' is a GPU where there is one; an absent device is an error."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={device!r} is not usable here ({reason}); use device=auto or cpu") from error
    return chosen


def resolve_dtype(dtype: str) -> torch.dtype:
    """A floating-point type by name."""
    known = {"float32": torch.float32, "float64": torch.float64}
    return known[checks.choice("trainer.dtype", dtype, known)]


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """A non-empty list of non-negative whole numbers. Equal seeds are allowed: replicates may differ in lr."""
    if isinstance(seeds, str) or not isinstance(seeds, Sequence) or not len(seeds):
        raise ConfigError(f"seeds={seeds!r} must be a non-empty list of whole numbers, such as [0,1,2]")
    if max(checks.whole("seeds", seed, least=0) for seed in seeds) >= 2**63:
        raise ConfigError(f"seeds={list(seeds)} must be below 2^63")
    return tuple(int(seed) for seed in seeds)


def _builder(
    model: Callable[..., nn.Module] | nn.Module, dataset: Dataset, loss: str | Loss
) -> Callable[[], nn.Module] | nn.Module:
    """Give a model's constructor the data set's `shape` and `classes`, if it takes them and they are not set.

    Logistic loss takes one output for its two classes.
    """
    if isinstance(model, nn.Module):
        return model
    try:
        accepted = inspect.signature(model).parameters
    except ValueError as error:
        raise ConfigError(f"model cannot be built: {error}") from error
    fixed = model.keywords if isinstance(model, functools.partial) else {}
    known = {"shape": dataset.shape, "classes": 1 if loss == "logistic" else dataset.classes}
    return functools.partial(model, **{k: v for k, v in known.items() if k in accepted and k not in fixed and v})


def _federation(
    seeds: tuple[int, ...],
    clients: int,
    dataset: Dataset,
    tables: list[Table],
    device: torch.device,
    dtype: torch.dtype,
) -> Federation:
    """Sizes and label distributions of every virtual client."""
    if not tables:
        nothing = np.zeros(len(seeds) * clients, dtype=np.int64)
        return Federation(seeds, clients, nothing, None, device, dtype, dataset.weights)
    fractions = None
    if dataset.classes is not None and dataset.train_y is not None:
        labels = dataset.train_y.cpu().numpy()
        fractions = np.stack([table.class_fractions(labels, dataset.classes) for table in tables])
    sizes = np.concatenate([table.sizes for table in tables])
    return Federation(seeds, clients, sizes, fractions, device, dtype)
