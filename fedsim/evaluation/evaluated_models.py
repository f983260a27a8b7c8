"""Which models of a run are evaluated: the server's, or the mean of those that the clients have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.columns import ParameterPartition
from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory
from fedsim.strategies import State, Strategy

RECEIVED = "received"


class EvaluatedModels:
    """The models [R, d] that `EvaluationOptions.of` names.

    'client_mean' is the mean over all m clients of the model each has. Where a strategy's clients keep models of their
    own (FedPBC, FedAWE), of those. Else of the model each received last: everybody begins with x^0, and those who took
    part in round t end it with x^{t+1}, as FedAWE's and FedPBC's clients do. So algorithms are judged alike.

    Args:
        models: names of those that are wanted.
        strategy, federation: of the run.
        columns: which of a row's the strategy sees.
    """

    def __init__(
        self, models: list[str], strategy: Strategy[Any], federation: Federation, columns: ParameterPartition
    ) -> None:
        self.models, self.strategy, self.federation, self.columns = models, strategy, federation, columns
        keeps = type(strategy).client_mean is not Strategy.client_mean
        self.receives = "client_mean" in models and not keeps

    def memory(self, model: Tensor) -> dict[str, Tensor]:
        """[R·m, d] the model each client received last, before round 0; nothing where that is not asked for."""
        return {RECEIVED: self.federation.broadcast(model)} if self.receives else {}

    def receive(self, memory: Memory, state: State, cohort: Cohort) -> None:
        """Those who took part in the round that led to `state` have its model now."""
        if self.receives:
            took_part = cohort.subset((cohort.host.count > 0).nonzero()[0])
            took_part.scatter(memory.evaluated[RECEIVED], took_part.broadcast(state.model))

    def __call__(self, name: str, state: State, memory: Memory) -> Tensor:
        """[R, d] one of the models, whole rows."""
        return self.columns.of_server(self._shared(name, state, memory), memory, self.federation)

    def _shared(self, name: str, state: State, memory: Memory) -> Tensor:
        if name == "global":
            return state.model
        if self.receives:
            return self.federation.mean_over_clients(memory.evaluated[RECEIVED])
        return self.strategy.client_mean(state, self.federation)
