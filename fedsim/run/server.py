"""Second step of a setup: the model that the server trains, the availability of clients, and the uplink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsim.availability import Availability
from fedsim.availability.clock import Clock, DeadlineAvailability, Events
from fedsim.core import checks
from fedsim.core.errors import ConfigError, prefix_error_keys
from fedsim.core.federation import WEIGHTINGS
from fedsim.models import StatelessModel
from fedsim.run.frozen_layers import without_frozen_layers
from fedsim.run.model_choice import GivenModel, ModelChoice
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.wiring import bind_availability, name_newcomers_in_errors, uplink_with_attack
from fedsim.strategies import Strategy
from fedsim.strategies.strategy import KeepsClientModels
from fedsim.uplink import Uplink


@dataclass(frozen=True, eq=False)
class Server:
    """The server's side of a round.

    Attributes:
        model: that rows parameterise, with the columns that stay with clients.
        availability: who can take part in which round; bound to the population.
        strategy: what starts clients and aggregates what they send; checked against the others.
        uplink: what happens to rows between clients and server, attacks first; set up.
    """

    model: StatelessModel
    availability: Availability
    strategy: Strategy[Any]
    uplink: Uplink

    @classmethod
    def build(cls, components: Parts, population: Population, choice: ModelChoice | GivenModel, rounds: int) -> Server:
        """Build the model, and set up availability and uplink for the population.

        Args:
            components: of the run.
            population: its clients.
            choice: the model that the user chose.
            rounds: T.

        Raises:
            ConfigError: they do not fit together, or not the population.
        """
        federation, strategy = population.federation, components.strategy
        model = choice.build(population.data)
        if components.trainer.cache_frozen and isinstance(choice, ModelChoice):
            model = without_frozen_layers(model, components, population)
        if components.columns is not None:
            model.choose_private_parameters(components.columns)
        federation.columns = model.column_names
        check_columns(population, model, strategy)
        process = None if components.local.pooled else components.availability
        check_strategy_attributes(strategy)
        with name_newcomers_in_errors(population.num_newcomers):
            availability = bind_availability(process, federation, rounds, population.member_tables)
            set_arrival_target(components.clock, strategy, availability, federation.clients)
            with prefix_error_keys("strategy"):
                strategy.check(DeadlineAvailability.wrap_if_dropping(availability, components.clock))
        strategy.check_local(components.local)
        strategy.check_columns(federation.columns)
        uplink = uplink_with_attack(strategy, components.uplink, components.attack)
        uplink.setup(federation, availability)
        return cls(model, availability, strategy, uplink)


def check_strategy_attributes(strategy: Strategy[Any]) -> None:
    """Refuse attributes of a strategy with impossible values.

    Raises:
        ConfigError: naming the attribute, and what it may be.
    """
    component_label = f"strategy={type(strategy).__name__}"
    checks.check_choice(f"{component_label}: weighting", strategy.weighting, WEIGHTINGS)
    checks.check_choice(f"{component_label}: server_sees", strategy.server_sees, ("sum", "mean", "rows"))
    if (arrivals := strategy.arrivals) is not None:
        checks.check_whole_number(f"{component_label}: arrivals", arrivals)
        if (repeated_arrivals := strategy.arrivals) != arrivals:
            raise ConfigError(
                f"{component_label}: arrivals is {arrivals} and then {repeated_arrivals}; make it one number"
            )


def set_arrival_target(clock: Clock, strategy: Strategy[Any], availability: Availability, clients: int) -> None:
    """Set the number of arrivals after which the strategy updates the model, for an event-driven clock.

    Raises:
        ConfigError: they do not fit together.
    """
    if not isinstance(clock, Events):
        return
    clock.set_arrival_target(type(strategy).__name__, strategy.arrivals, strategy.supports_stale, clients)
    if clock.asynchronous and availability.law == "multiset":
        raise ConfigError(
            "availability=multiset selects clients several times at once, and under clock=events a client has one "
            "update in flight; choose another availability"
        )


def check_columns(population: Population, model: StatelessModel, strategy: Strategy[Any]) -> None:
    """Refuse inputs and rows that shift and strategy cannot use.

    Raises:
        ConfigError: naming the part, and what to give instead.
    """
    shift, dataset, tables = population.shift, population.dataset, population.tables
    if shift.active and dataset.tokens:
        raise ConfigError(f"shift={type(shift).__name__} moves numbers, but dataset={dataset.name} has tokens")
    if population.data.drift.uses_importance_weights and model.mixes_samples:
        raise ConfigError(
            "drift.moves=labels gives samples weights, and this model or loss sees a batch as a whole; use "
            "moves=features"
        )
    if shift.active and tables and tables[0].skew is not None:
        raise ConfigError(
            f"shift={type(shift).__name__} knows the data as they are stored, and the partition gives clients "
            "others; use another partition, or shift=none"
        )
    keeps_models = isinstance(strategy, KeepsClientModels) or strategy.clustered
    if len(model.columns.averaged) and keeps_models:
        raise ConfigError(
            f"strategy={type(strategy).__name__} lets clients keep models of their own, and statistics "
            f"({next(iter(model.statistics))}, …) that the server averages would reach them without a link; "
            "keep them with the client by columns=fedbn, or columns=by_name"
        )
