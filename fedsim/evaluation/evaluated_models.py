"""The models of a run that are evaluated: the server's, or the mean of clients' models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.columns import ParameterPartition
from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory
from fedsim.evaluation.calibration import CALIBRATED, ClassifierCalibration
from fedsim.strategies import State, Strategy

RECEIVED_MODEL_NAME = "received"


class EvaluatedModels:
    """The models [R, d] that `EvaluationOptions.of` names.

    'client_mean' is the mean over all m clients of each client's model. If clients keep their own models under the
    strategy (FedPBC, FedAWE), these are used. Otherwise it is the model that each received last: all start with x^0,
    and clients that participated in round t have x^{t+1} after it, as in FedAWE and FedPBC. This makes algorithms
    comparable. 'calibrated' is the server's model with a last layer that is trained again, see `ClassifierCalibration`.

    Args:
        models: names of the models to evaluate.
        strategy, federation: of the run.
        columns: the columns of a row that the strategy sees.
        calibration: makes 'calibrated' of the server's model, if it is evaluated.
    """

    def __init__(
        self,
        models: list[str],
        strategy: Strategy[Any],
        federation: Federation,
        columns: ParameterPartition,
        calibration: ClassifierCalibration | None = None,
    ) -> None:
        self.models, self.strategy, self.federation, self.columns = models, strategy, federation, columns
        self.calibration = calibration
        keeps_client_models = type(strategy).client_mean is not Strategy.client_mean
        self.receives = "client_mean" in models and not keeps_client_models

    def memory(self, model: Tensor) -> dict[str, Tensor]:
        """[R·m, d] the model that each client received last, before round 0; empty if not needed."""
        return {RECEIVED_MODEL_NAME: self.federation.broadcast(model)} if self.receives else {}

    def record_received_models(self, memory: Memory, state: State, cohort: Cohort) -> None:
        """Record that the participants of the round that led to `state` have its model."""
        if self.receives:
            took_part = cohort.subset((cohort.host_index.multiplicity > 0).nonzero()[0])
            took_part.scatter(memory.evaluated[RECEIVED_MODEL_NAME], took_part.broadcast(state.model))

    def __call__(self, name: str, state: State, memory: Memory) -> Tensor:
        """[R, d] one of the models, with all columns."""
        rows = self.columns.full_server_rows(self._shared_columns_model(name, state, memory), memory, self.federation)
        if name != CALIBRATED:
            return rows
        assert self.calibration is not None
        return self.calibration(rows)

    def _shared_columns_model(self, name: str, state: State, memory: Memory) -> Tensor:
        if name in ("global", CALIBRATED):
            return state.model
        if self.receives:
            return self.federation.mean_over_clients(memory.evaluated[RECEIVED_MODEL_NAME])
        return self.strategy.client_mean(state, self.federation)
