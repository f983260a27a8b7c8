"""Builds the parts of a run from the user's choices: resolves settings, distributes samples, builds models and
trainers."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedsim.availability import Availability, Full
from fedsim.core import checks, rng, streams
from fedsim.core.errors import ClientCountError, ConfigError
from fedsim.core.federation import Federation
from fedsim.core.per_seed import per_seed_settings, select_replicate_settings
from fedsim.core.ranks import ProcessRanks
from fedsim.data.datasets import Dataset
from fedsim.data.drift import Drift
from fedsim.data.partition import IID, Natural, Partition, Table
from fedsim.data.partition.partition import Samples, check_partition_table, check_sample_assignment
from fedsim.data.samples import ClientData, StoredClientData, StreamClientData
from fedsim.evaluation import Evaluator
from fedsim.evaluation.personal import Personal
from fedsim.evaluation.personal.scores import ClientScorer
from fedsim.local import LocalRule
from fedsim.run.contracts import changed_attribute_paths, contains_user_code, take_snapshot, user_code_errors
from fedsim.run.determinism import prepare_cublas
from fedsim.strategies import Strategy
from fedsim.trainer import Execution
from fedsim.uplink import Uplink
from fedsim.uplink.attack import Attack

log = logging.getLogger(__name__)


DEVICE_TYPES = ("auto", "cpu", "cuda", "mps", "xpu")


def resolve_device(device: str) -> torch.device:
    """Return the device; 'auto' is a GPU if there is one. An absent device is an error."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = str(device).partition(":")
    if not isinstance(device, str) or kind not in DEVICE_TYPES[1:] or (number and not number.isdecimal()):
        suggestion_text = {"gpu": "; did you mean 'cuda'?"}.get(
            kind.lower(), checks.nearest_name_hint(kind, DEVICE_TYPES)
        )
        suggestion_text = f"; did you mean 'cuda:{device}'?" if kind.isdecimal() else suggestion_text
        raise ConfigError(
            f"device={device!r} is unknown; choose one of {', '.join(DEVICE_TYPES)}, or cuda:1{suggestion_text}"
        )
    try:
        torch_device = torch.device(device)
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError) as error:
        reason = re.split(r"\n|\. ", str(error))[0]
        raise ConfigError(f"device={device!r} is not usable here ({reason}); use device=auto or cpu") from error
    return torch_device


def resolve_dtype(dtype: str) -> torch.dtype:
    """Return a floating-point type by name."""
    return {"float32": torch.float32, "float64": torch.float64}[dtype]


@dataclass(frozen=True)
class ComputeSettings:
    """The device and the floating-point type of a run.

    Attributes:
        device: that the models are on.
        dtype: of the rows.
        ranks: the processes that share the run.
        memory: where what is remembered of each client lies between rounds, see `Execution`.
        deterministic: whether PyTorch uses deterministic algorithms alone.
    """

    device: torch.device
    dtype: torch.dtype
    ranks: ProcessRanks
    memory: str
    deterministic: bool = False

    @classmethod
    def from_execution(cls, execution: Execution, ranks: ProcessRanks) -> ComputeSettings:
        """Build from the options of an execution.

        Raises:
            ConfigError: there is no such device.
        """
        deterministic = prepare_cublas(execution.deterministic)  # before anything is computed on a GPU
        device = resolve_device(ranks.local_device(execution.device))
        return cls(device, resolve_dtype(execution.dtype), ranks, execution.memory, deterministic)


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Check that seeds are a non-empty list of non-negative whole numbers. Equal seeds are allowed: replicates may
    differ in lr."""
    if isinstance(seeds, str) or not isinstance(seeds, Sequence) or not len(seeds):
        raise ConfigError(f"seeds={seeds!r} must be a non-empty list of whole numbers, such as [0,1,2]")
    if max(checks.check_whole_number("seeds", seed, minimum=0) for seed in seeds) >= 2**63:
        raise ConfigError(f"seeds={list(seeds)} must be below 2^63")
    return tuple(int(seed) for seed in seeds)


def check_component_types(kinds: Mapping[str, type], components: Mapping[str, Any]) -> None:
    """Refuse a part that is not an object of the class that its group requires."""
    for group, kind in kinds.items():
        component = components[group]
        if component is None or isinstance(component, kind):
            continue
        public_module = kind.__module__.rpartition(".")[0] if kind.__module__.count(".") > 1 else kind.__module__
        if isinstance(component, type):
            remedy = (
                f"give an object of it: {component.__name__}(…)"
                if issubclass(component, kind)
                else f"give a {kind.__name__}"
            )
            raise ConfigError(f"{group} is the class {component.__name__}; {remedy}")
        raise ConfigError(
            f"{group}={type(component).__name__} is no {kind.__name__}; derive from {public_module}.{kind.__name__}"
        )


def settings_per_seed(
    strategy: Strategy[Any], rule: LocalRule, drift: Drift, seeds: Sequence[int]
) -> dict[str, Sequence[float]]:
    """Return key → one number per seed, for settings of strategy, local rule and drift that are given per seed.

    Raises:
        ConfigError: there are not as many numbers as seeds.
    """
    settings = {**per_seed_settings("strategy", strategy, Strategy), **per_seed_settings("local", rule, LocalRule)}
    settings |= per_seed_settings("drift", drift, Drift)
    for key, numbers in settings.items():
        if len(numbers) != len(seeds):
            raise ConfigError(f"{key} has {len(numbers)} entries, but there are {len(seeds)} seeds; give one per seed")
    return {**({"lr": rule.rates} if len(rule.rates) > 1 else {}), **settings}


def restrict_per_seed_settings(
    strategy: Strategy[Any], rule: LocalRule, drift: Drift, replicates: Sequence[int]
) -> None:
    """Restrict those settings to the numbers of these replicates, in place."""
    select_replicate_settings(strategy, replicates, Strategy)
    select_replicate_settings(rule, replicates, LocalRule)
    select_replicate_settings(drift, replicates, Drift)
    if len(rule.rates) > 1:
        rule.rates = [rule.rates[replicate] for replicate in replicates]


def resolve_data_and_client_count(
    data: Dataset, partition: Partition | None, clients: int | str
) -> tuple[Dataset, int]:
    """Return the data of the clients, and the number of clients: 'all' clients in the data, or so many of them, drawn
    by `partition.seed` alike for all replicates; a partition that makes clients makes so many."""
    natural_count = data.natural_clients
    if isinstance(clients, str):
        if clients != "all":
            raise ConfigError(f"clients={clients!r} must be a whole number of at least 1, or all")
        if natural_count is None:
            raise ConfigError(
                f"clients=all are those that come with the data, and dataset={data.name} has none; give their number"
            )
        clients = natural_count
    checks.check_whole_number("clients", clients)
    natural = partition or (None if data.owners is None else Natural())
    if (
        data.stream
        or data.owners is None
        or natural_count is None
        or not isinstance(natural, Natural)
        or natural.shuffle
    ):
        return data, clients
    if clients >= natural_count:
        return data, clients
    draw = rng.generator(natural.seed, rng.Purpose.CLIENTS)
    log.info("partition: %d of the data's %d clients, drawn by partition.seed=%d", clients, natural_count, natural.seed)
    return data.of_clients(np.sort(draw.choice(natural_count, clients, replace=False))), clients


def partition_samples(data: Dataset, partition: Partition | None, clients: int, seeds: Sequence[int]) -> list[Table]:
    """Return one index table per replicate; none for a stream."""
    if data.stream:
        if partition is not None and not isinstance(partition, Natural):
            raise ConfigError(f"dataset={data.name} draws its samples per client; use partition=natural")
        if partition is not None and partition.shuffle:
            raise ConfigError(
                f"partition.shuffle=true has no meaning for dataset={data.name}, whose clients draw their "
                "samples themselves; set it to false"
            )
        if data.natural_clients != clients:
            raise ConfigError(f"clients={clients}, but dataset={data.name} was made for {data.natural_clients}")
        return []
    partition = partition or (IID() if data.owners is None else Natural())
    if data.owners is not None and not partition.by_owner:
        log.info(
            "partition: the data set's %s clients are not used (partition=natural uses them)", data.natural_clients
        )
    kept_indices = None if data.assignable_samples is None else data.assignable_samples.cpu().numpy()
    arrays = (None if values is None else values.cpu().numpy() for values in (data.labels, data.owners))
    labels, owners = (values if kept_indices is None or values is None else values[kept_indices] for values in arrays)
    samples = Samples(
        len(data.train_x) if kept_indices is None else len(kept_indices), labels, owners, data.client_names
    )
    if contains_user_code(partition):
        table_by_seed = _user_partition_tables(partition, samples, clients, seeds)
    else:
        table_by_seed = {seed: partition.table(samples, clients, seed) for seed in dict.fromkeys(seeds)}
    table_by_seed = (
        table_by_seed
        if kept_indices is None
        else {seed: table.with_renumbered_samples(kept_indices) for seed, table in table_by_seed.items()}
    )
    tables = [table_by_seed[seed] for seed in seeds]
    used_counts = [len(t.order) + (0 if t.validation is None else len(t.validation.order)) for t in tables]
    left_out = samples.count - min(used_counts)
    if left_out:
        log.info("partition: %d of %d samples are not assigned to a client", left_out, samples.count)
    return tables


def _user_partition_tables(
    partition: Partition, samples: Samples, clients: int, seeds: Sequence[int]
) -> dict[int, Table]:
    """Return the tables of a user-defined partition by seed; the first one is requested twice.

    Raises:
        ConfigError: the second time it is another one, or the partition draws from a global stream, writes into what it
            is given, or fails.
    """
    setting, distinct_seeds = f"partition={type(partition).__name__}", list(dict.fromkeys(seeds))
    labels, owners = (None if values is None else values.copy() for values in (samples.labels, samples.owners))
    for values in (labels, owners):
        if values is not None:
            values.setflags(write=False)  # otherwise sorting labels in place would change the data
    read_only_samples = Samples(samples.count, labels, owners, samples.names)
    snapshot_before = take_snapshot(partition)
    with user_code_errors(setting, partition):
        table_by_seed = {seed: partition.table(read_only_samples, clients, seed) for seed in distinct_seeds}
    with streams.preserve_rng_states():
        streams.reseed_global_generators(1)
        repeated_table = partition.table(read_only_samples, clients, distinct_seeds[0])
    for table in table_by_seed.values():  # `table` may be overridden by the user
        if not isinstance(table, Table):
            raise ConfigError(f"{setting}: table must return a Table, and returns {type(table).__name__}")
        check_partition_table(type(partition).__name__, table, samples.count, clients)
        check_sample_assignment(type(partition).__name__, table, samples.count, clients, partition.remedy)
    first_table = table_by_seed[distinct_seeds[0]]
    if not (
        np.array_equal(first_table.order, repeated_table.order)
        and np.array_equal(first_table.offsets, repeated_table.offsets)
    ):
        paths = changed_attribute_paths(partition, snapshot_before)
        detail = f" ({paths[0]} has changed)" if paths else ""
        raise ConfigError(
            f"{setting} divides the samples in another way when it is called twice for seed "
            f"{distinct_seeds[0]}{detail}; "
            "draw by the generator that split is given, or np.random.default_rng(seed)"
        )
    return table_by_seed


def make_client_data(
    seeds: tuple[int, ...],
    clients: int,
    dataset: Dataset,
    tables: list[Table],
    compute: ComputeSettings,
    weighting: str,
    members: int | None = None,
    num_newcomers: int = 0,
    drift: Drift | None = None,
) -> ClientData:
    """Return the samples of all virtual clients, and their federation with sizes and label distributions."""
    device, dtype, ranks, storage = compute.device, compute.dtype, compute.ranks, compute.memory
    if not tables:
        no_samples = np.zeros(len(seeds) * clients, dtype=np.int64)
        shares = None if dataset.weights is None else dataset.weights[:clients]
        federation = Federation(
            seeds,
            clients,
            no_samples,
            None,
            device,
            dtype,
            shares,
            ranks,
            storage,
            weighting,
            members,
            num_newcomers=num_newcomers,
        )
        return StreamClientData(dataset, federation, drift)
    fractions = None
    if dataset.classes is not None and dataset.labels is not None:
        labels = dataset.labels.cpu().numpy()
        by_table = [table.class_fractions(labels, dataset.classes) for table in tables]
        fractions = by_table[0][np.newaxis] if len(by_table) == 1 else np.stack(by_table)
    sizes = np.concatenate([table.sizes for table in tables])
    same_names = all(table.names == tables[0].names for table in tables)
    federation = Federation(
        seeds, clients, sizes, fractions, device, dtype, None, ranks, storage, weighting, members,
        tables[0].names if same_names else None, num_newcomers=num_newcomers,
    )  # fmt: skip
    return StoredClientData(dataset, federation, tables, drift)


@contextlib.contextmanager
def name_newcomers_in_errors(num_newcomers: int) -> Iterator[None]:
    """Within the block, errors about the number of training clients name `clients` as it was set, newcomers
    included."""
    try:
        yield
    except ClientCountError as error:
        error.with_newcomer_count(num_newcomers)
        raise


def bind_availability(
    availability: Availability | None, federation: Federation, rounds: int, tables: Sequence[Table] = ()
) -> Availability:
    """Bind the availability process (by default all clients, always) to this federation, whose clients these tables
    name."""
    process = availability or Full()
    names = [table.names for table in tables if table.names is not None]
    process.bind(federation, tuple(names) if names and federation.client_names is None else None)
    process.check_rounds(rounds)
    return process


def build_client_scores(evaluator: Evaluator, options: Personal, tables: list[Table]) -> ClientScorer:
    """Return the evaluation of clients' own models on the validation samples of these tables, or on a stream's
    distribution."""
    return ClientScorer(evaluator, validation_of(evaluator.data, tables), options.train_samples)


def owners_are_clients(data: ClientData, tables: list[Table]) -> bool:
    """Return whether client i is the data's i-th owner in each replicate."""
    owners = data.dataset.owners
    if owners is None or data.dataset.test_owners is None or not tables:
        return False
    sample_owners = owners.cpu().numpy()
    return all(bool((sample_owners[t.order] == np.repeat(np.arange(len(t.sizes)), t.sizes)).all()) for t in tables)


def validation_of(data: ClientData, tables: list[Table]) -> ClientData | None:
    """Return the clients' validation samples, if the partition has split some off."""
    validation_tables = [t.validation for t in tables if t.validation is not None]
    return StoredClientData(data.dataset, data.federation, validation_tables, data.drift) if validation_tables else None


def uplink_from_stages(uplink: Any) -> Uplink:
    """Return the uplink, which may be given as its stages: one, or several in a list."""
    if isinstance(uplink, Uplink):
        return uplink
    return Uplink(uplink)


def uplink_with_attack(strategy: Strategy[Any], uplink: Uplink | None, attack: Attack | None) -> Uplink:
    """Return the uplink with the attack as its first stage.

    Raises:
        ConfigError: there are no rows for it to happen to.
    """
    attack_stages = [attack] if attack is not None and attack.active else []
    stages = [*attack_stages, *(uplink.stages if uplink is not None else ())]
    combined_uplink = Uplink(*(stages if strategy.vectors_up else ()))
    if combined_uplink.stages and not strategy.sends_rows:
        raise ConfigError(
            f"strategy={type(strategy).__name__} sends no rows for uplink or attack to change: "
            f"{strategy.side_information}; use uplink=none and attack=none, or another strategy"
        )
    return combined_uplink
