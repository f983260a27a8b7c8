"""Third step of a setup: local training, and when its results arrive."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from fedsim.availability.clock import Events
from fedsim.data.contamination import Contamination
from fedsim.run.delayed_updates import DelayedUpdates
from fedsim.run.event_clock import EventClock
from fedsim.run.event_updates import EventUpdates
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.round_clock import RoundClock
from fedsim.run.server import Server
from fedsim.run.traffic import Traffic
from fedsim.shift import Shift
from fedsim.trainer import FullDataQuery, Trainer, TrainerFactory
from fedsim.uplink.attack import Attack


@dataclass(frozen=True, eq=False)
class ClientTraining:
    """The clients' side of a round, and its timing.

    Attributes:
        contamination: which samples are contaminated, those of label attacks included; set up for newcomers too.
        newcomer_shift: how newcomers' samples react to the deployed model; not set up yet. None without newcomers.
        trainer_factory: makes trainers of the run's clients, and holds their shift, set up.
        trainer: that of the run's local rule.
        traffic: bytes that a client receives and sends in a round.
        round_clock: which clients are in time, with how much of their work; keeps virtual time.
        delayed_updates: in which later round rows arrive.
    """

    contamination: Contamination
    newcomer_shift: Shift | None
    trainer_factory: TrainerFactory
    trainer: Trainer
    traffic: Traffic
    round_clock: RoundClock
    delayed_updates: DelayedUpdates

    @classmethod
    def build(cls, components: Parts, population: Population, server: Server) -> ClientTraining:
        """Set up shift, contamination, local rule, clock, work and delay for the population and the model.

        Raises:
            ConfigError: they do not fit together.
        """
        contamination = components.contamination
        for stage in server.uplink.stages:
            contamination = stage.with_label_attack(contamination) if isinstance(stage, Attack) else contamination
        contamination.setup(population.data_with_newcomers.federation, population.dataset)
        # copied before the members' shift is set up, since newcomers' is set up for all clients
        newcomer_shift = copy.deepcopy(population.shift) if population.num_newcomers else None
        trainers = TrainerFactory(population.data, population.shift, server.model, contamination, components.trainer)
        trainers.setup_shift()
        trainer = trainers(components.local)
        if server.strategy.needs_full_gradients:
            population.federation.full_data_oracle = FullDataQuery.from_trainer(trainers, trainer)
        traffic = Traffic.compute_per_round(server.strategy, trainer.local_rule, server.model, server.uplink)
        pace, delivery = make_clock_and_delivery(components, trainer, traffic, server)
        return cls(contamination, newcomer_shift, trainers, trainer, traffic, pace, delivery)


def make_clock_and_delivery(
    components: Parts, trainer: Trainer, traffic: Traffic, server: Server
) -> tuple[RoundClock, DelayedUpdates]:
    """Make the clock that decides which clients are in time and when updates arrive, by rounds or by events.

    Raises:
        ConfigError: clock, work, delay and strategy do not fit together.
    """
    clock, work_model, delay = components.clock, components.work, components.delay
    round_clock: RoundClock
    delivery: DelayedUpdates
    if isinstance(clock, Events):
        round_clock = event_clock = EventClock(clock, work_model, trainer, traffic)
        delivery = EventUpdates(delay, event_clock, server.strategy, trainer)
    else:
        round_clock = RoundClock(clock, work_model, trainer, traffic)
        delivery = DelayedUpdates(delay, round_clock, server.strategy, trainer)
    round_clock.setup()
    delivery.setup()
    return round_clock, delivery
