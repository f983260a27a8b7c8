"""Third step of a setup: how clients train, and when what they send arrives."""

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
from fedsim.trainer import FullDataQuery, Trainer, Trainers
from fedsim.uplink.attack import Attack


@dataclass(frozen=True, eq=False)
class Training:
    """The clients' side of a round, and the time that it takes.

    Attributes:
        contamination: which samples are rotten, those of label attacks included; set up for newcomers too.
        newcomer_shift: how newcomers' samples react to the deployed model; not set up yet. None without newcomers.
        trainers: makes trainers of the run's clients, and holds their shift, set up.
        trainer: that of the run's local rule.
        traffic: bytes that a client receives and sends in a round.
        pace: which clients are in time, with how much of their work; keeps virtual time.
        delivery: in which later round rows arrive.
    """

    contamination: Contamination
    newcomer_shift: Shift | None
    trainers: Trainers
    trainer: Trainer
    traffic: Traffic
    pace: RoundClock
    delivery: DelayedUpdates

    @classmethod
    def build(cls, components: Parts, population: Population, server: Server) -> Training:
        """Set up shift, contamination, local rule, clock, work and delay for the population and the model.

        Raises:
            ConfigError: they do not fit together.
        """
        contamination = components.contamination
        for stage in server.uplink.stages:
            contamination = stage.of_samples(contamination) if isinstance(stage, Attack) else contamination
        contamination.setup(population.everybody.federation, population.dataset)
        # before the members' is set up: newcomers' is set up for everybody
        newcomer_shift = copy.deepcopy(population.shift) if population.newcomers else None
        trainers = Trainers(population.data, population.shift, server.model, contamination, components.trainer)
        trainers.setup_shift()
        trainer = trainers(components.local)
        if server.strategy.needs_full_gradients:
            population.federation.full_data_oracle = FullDataQuery.of(trainers, trainer)
        traffic = Traffic.of(server.strategy, trainer.rule, server.model, server.uplink)
        pace, delivery = time_of(components, trainer, traffic, server)
        return cls(contamination, newcomer_shift, trainers, trainer, traffic, pace, delivery)


def time_of(components: Parts, trainer: Trainer, traffic: Traffic, server: Server) -> tuple[RoundClock, DelayedUpdates]:
    """Who is in time, and when updates arrive: round by round, or event by event.

    Raises:
        ConfigError: clock, work, delay and strategy do not fit together.
    """
    clock, work, delay = components.clock, components.work, components.delay
    pace: RoundClock
    delivery: DelayedUpdates
    if isinstance(clock, Events):
        pace = event_clock = EventClock(clock, work, trainer, traffic)
        delivery = EventUpdates(delay, event_clock, server.strategy, trainer)
    else:
        pace = RoundClock(clock, work, trainer, traffic)
        delivery = DelayedUpdates(delay, pace, server.strategy, trainer)
    pace.setup()
    delivery.setup()
    return pace, delivery
