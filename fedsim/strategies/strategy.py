"""The interface of an aggregation strategy: initial rows, next model, memory. It uses only rows and their sums."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from torch import Tensor
from typing_extensions import Self

from fedsim.availability import Availability
from fedsim.core.column_names import ColumnsByName
from fedsim.core.constraints import PositivePerSeed, Validated
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.federation import Cohort, Federation, FullDataGradients
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.local import LocalRule


@dataclass
class State:
    """What survives a round: tensors only, so that it can be checkpointed. Strategies with memory add fields.

    Attributes:
        model: [R, d] the server's model x^t.
    """

    model: Tensor


S = TypeVar("S", bound=State)


class Strategy(Validated, ABC, Generic[S]):
    """One aggregation algorithm. An empty round leaves the state as it is, unless the paper says otherwise.

    Attributes:
        weighting: w_i in the objective Σ w_i F_i that it minimises, 'uniform' 1/m, or 'data' fractions. A run's losses,
            optimum and reference points weigh clients likewise.
        vectors_down: how many vectors of the model's size the server sends to each client that takes part in a round.
        vectors_up: how many each of them sends. Both for counting bytes (`fedsim.run.traffic`).
        server_sees: what the server uses of the rows G_i, for claims of privacy: 'sum', only Σ_{i∈A} G_i / m; 'mean',
            only mean_{i∈A} G_i; 'rows', more than that.
        side_information: what it hears of clients that is no G_i, and so meets no stage of `uplink`, in words; ''
            for nothing.
        sends_rows: whether it uses G_i at all; else stages of `uplink` are refused.
        needs_full_gradients: whether clients compute loss and gradient of all their data at a model
            (`full_data_gradients`).
        needs_validation_losses: whether clients compute losses of models on their validation samples
            (`Federation.validation_oracle`).
        clustered: whether the server has several models, and clients take that which suits them (`start`): the model
            that a client has, for personal evaluation, and that newcomers begin with. Its state has them as `clusters`
            [R, k, d], and as `choice` [R·m] int64 which of them each client trained last, −1 before.
        supports_stale: whether it is defined for rows that began rounds ago, with an older model (`Report.staleness`).
        arrivals: after how many arriving updates the server steps in an event-driven run (`clock=events`); None: when
            those of all selected clients have arrived.

    `server_sees` and `supports_stale` describe what the methods do: a subclass that overrides a method, other than
    `__init__` and the checks, has the defaults again unless it sets them.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf(
            "weighting",
            lambda component, run: component.weighting != "data" or not run.has_equal_data_fractions,
            "clients that hold different numbers of samples",
        ),
    )

    weighting: str = "uniform"
    vectors_down: int = 1
    vectors_up: int = 1
    server_sees: str = "rows"
    side_information: str = ""
    sends_rows: bool = True
    needs_full_gradients: bool = False
    needs_validation_losses: bool = False
    clustered: bool = False
    supports_stale: bool = False
    arrivals: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        overridden_methods = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
        if overridden_methods - {"__init__", "check", "check_local", "check_columns"}:
            for flag_name in ("server_sees", "supports_stale"):
                if flag_name not in vars(cls):
                    setattr(cls, flag_name, getattr(Strategy, flag_name))

    def check(self, availability: Availability) -> None:
        """Refuse, before the first round, an availability process the algorithm cannot run under."""

    def check_local(self, local_rule: LocalRule) -> None:
        """Refuse, before the first round, a local rule the algorithm cannot run with. What `start` hands to a rule that
        does not use it is refused anyway."""

    def check_columns(self, columns: ColumnsByName) -> None:
        """Refuse, before the first round, a model whose rows the algorithm cannot aggregate."""

    def initial(self, model: Tensor, federation: Federation) -> S:
        """The state before round 0, from the initial models [R, d]."""
        return cast(S, State(model))

    def cohort(self, state: S, active: Cohort) -> Cohort:
        """Who computes: the active clients, unless the paper says otherwise."""
        return active

    def start(self, state: S, cohort: Cohort) -> Tensor | dict[str, Tensor]:
        """[n, d] the rows local training starts from (or a carry that holds them as 'params'): the broadcast x^t."""
        return cohort.broadcast(state.model)

    @abstractmethod
    def aggregate(self, state: S, report: Report, t: int) -> S:
        """The state after round t. Per-client memory may be updated in place."""

    def mean(self, cohort: Cohort, values: Tensor) -> Tensor:
        """[n, …] → [R, …] the mean over participating clients, weighted as the objective is."""
        return cohort.mean(values, None if self.weighting == "uniform" else cohort.weights(self.weighting))

    def client_mean(self, state: S, federation: Federation) -> Tensor:
        """[R, d] the mean of all clients' own models; x^t where they keep none.

        A run that asks for the clients' mean of a strategy that does not override this takes the mean of what each
        client received last (`fedsim.evaluation.EvaluatedModels`).
        """
        return state.model


def full_data_gradients(cohort: Cohort, models: Tensor) -> FullDataGradients:
    """What the cohort's clients say of all their data at their replicate's model [R, d]; for strategies with
    `needs_full_gradients`."""
    assert cohort.federation.full_data_oracle is not None, (
        "a strategy that asks clients says so by needs_full_gradients = True"
    )
    return cohort.federation.full_data_oracle(cohort, models)


class ServerRateStrategy(Strategy[S]):
    """A strategy with a server learning rate.

    Args:
        server_lr: η_g, or a list of one per seed.
    """

    def __init__(self, server_lr: PositivePerSeed = 1.0) -> None:
        self.server_lr = as_per_seed(server_lr)


@dataclass
class ClientModels(State):
    """State of strategies whose clients keep their own model between rounds.

    Attributes:
        models: [R·m, d] x_i^t.
    """

    models: Tensor

    @classmethod
    def broadcast(cls, model: Tensor, federation: Federation, **memory: Any) -> Self:
        """Everybody starts from the server's model."""
        return cls(model, federation.broadcast(model), **memory)


C = TypeVar("C", bound=ClientModels)


class KeepsClientModels(Strategy[C]):
    """A strategy whose clients start from their own x_i^t, not from the broadcast. Memory: one model per client."""

    def start(self, state: C, cohort: Cohort) -> Tensor:
        return cohort.gather(state.models)

    def client_mean(self, state: C, federation: Federation) -> Tensor:
        return federation.mean_over_clients(state.models, self.weighting)
