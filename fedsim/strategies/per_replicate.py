"""A base class for strategies that are written for one replicate, as functions of its rows."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.per_seed import NumberOrPerSeed, PerSeed
from fedsim.core.report import Report
from fedsim.strategies.strategy import State, Strategy

NamedTensors = dict[str, Tensor]


class ReplicateRows:
    """What one replicate's k ≥ 1 clients that take part in a round bring home, those of all ranks; of a multiset a
    client is there as often as it was drawn."""

    def __init__(self, report: Report, replicate: int, cache: dict[str, list[Tensor]]) -> None:
        self._report, self._replicate, self._cache = report, replicate, cache

    def of_replicate(self, name: str, rows: Tensor) -> Tensor:
        """[k, …] this replicate's part of [n, …], one row for every row of the cohort; `name` is whatever else is
        called so."""
        if name not in self._cache:
            self._cache[name] = self._report.cohort.split_by_replicate(rows)
        return self._cache[name][self._replicate]

    def number(self, setting: NumberOrPerSeed) -> float:
        """This replicate's, where replicates have theirs (`fedsim.core.per_seed`)."""
        return setting.values[self._replicate] if isinstance(setting, PerSeed) else setting

    @property
    def start(self) -> Tensor:
        """[k, d] where each began: the server's model."""
        return self.of_replicate("start", self._report.start)

    @property
    def end(self) -> Tensor:
        """[k, d] where each arrived."""
        return self.of_replicate("end", self._report.end)

    @property
    def innovation(self) -> Tensor:
        """[k, d] start − end: positive along the descent."""
        return self.of_replicate("innovation", self._report.innovation)

    @property
    def loss(self) -> Tensor:
        """[k] mean training loss over the client's local steps."""
        return self.of_replicate("loss", self._report.loss)

    @property
    def seed(self) -> int:
        """The replicate's, for `fedsim.core.rng`."""
        return self._report.cohort.federation.seeds[self._replicate]

    @property
    def client(self) -> Tensor:
        """[k] int64 the clients' numbers."""
        return self.of_replicate("client", self._report.cohort.client_index)

    @property
    def data_fraction(self) -> Tensor:
        """[k] the fraction of all data that each client holds; 1/m where samples are drawn afresh."""
        return self.of_replicate("weight", self._report.cohort.weights("data"))

    @property
    def probability(self) -> Tensor:
        """[k] true p_i^t."""
        return self.of_replicate("probability", self._report.cohort.probability)

    def client_memory(self, name: str) -> Tensor:
        """[k, …] what the local rule remembers of each client (`Report.client_memory`)."""
        return self.of_replicate(f"remembered {name}", self._report.client_memory(name))


class PerReplicateStrategy(Strategy[State]):
    """Calls `next_model` once a round for every replicate in which somebody takes part; the others stay as they are.

    It costs one call for each replicate where `Cohort.sum` and `mean` take all together, and of several ranks an
    all-gather of the rows that are looked at. Memory per client is for those who derive from `Strategy` itself.

    Example:
        >>> class Median(PerReplicate):
        ...     def next_model(self, model, rows, memory, t):
        ...         return model - rows.innovation.median(0).values
    """

    def memory(self, model: Tensor) -> NamedTensors:
        """What the server remembers of a replicate from round to round, as before round 0: name → […]."""
        return {}

    @abstractmethod
    def next_model(self, model: Tensor, rows: ReplicateRows, memory: NamedTensors, t: int) -> Tensor:
        """[d] the next model.

        Args:
            model: [d] x^t.
            rows: of the replicate's clients that take part.
            memory: as `memory` named it; an entry is replaced by a tensor of the same shape.
            t: round.
        """

    def initial(self, model: Tensor, federation: Federation) -> State:
        memories = [self.memory(replicate_model) for replicate_model in model]
        fields = [(name, Tensor) for name in memories[0]]
        state_class = dataclasses.make_dataclass(f"{type(self).__name__}State", fields, bases=(State,))
        state: State = state_class(model, *(torch.stack([memory[name] for memory in memories]) for name in memories[0]))
        return state

    def aggregate(self, state: State, report: Report, t: int) -> State:
        field_names = [field.name for field in dataclasses.fields(state) if field.name != "model"]
        memory_before = {name: getattr(state, name) for name in field_names}
        stacked_memory: dict[str, list[Tensor]] = {}
        has_rows = [len(rows) > 0 for rows in report.cohort.split_by_replicate(report.cohort.client_index)]
        models: list[Tensor] = []
        memory_after: dict[str, list[Tensor]] = {name: [] for name in field_names}
        for replicate, model in enumerate(state.model):
            memory = {name: value[replicate] for name, value in memory_before.items()}
            if has_rows[replicate]:
                rows = ReplicateRows(report, replicate, stacked_memory)
                model = self._checked_tensor("next model", self.next_model(model, rows, memory, t), model)
                if memory.keys() != memory_before.keys():
                    changed_names = sorted(memory.keys() ^ memory_before.keys())
                    raise ConfigError(f"strategy={type(self).__name__}: {changed_names[0]} is not what `memory` named")
            models.append(model)
            for name in field_names:
                memory_after[name].append(self._checked_tensor(name, memory[name], memory_before[name][replicate]))
        return dataclasses.replace(
            state, model=torch.stack(models), **{name: torch.stack(rows) for name, rows in memory_after.items()}
        )

    def _checked_tensor(self, tensor_noun: str, checked_value: Tensor, template_tensor: Tensor) -> Tensor:
        """A tensor of this shape, or one sentence."""
        if not isinstance(checked_value, Tensor) or checked_value.shape != template_tensor.shape:
            actual_shape = (
                list(checked_value.shape) if isinstance(checked_value, Tensor) else type(checked_value).__name__
            )
            raise ConfigError(
                f"strategy={type(self).__name__}: the {tensor_noun} of a replicate must be a tensor "
                f"{list(template_tensor.shape)}, and is {actual_shape}"
            )
        return checked_value
