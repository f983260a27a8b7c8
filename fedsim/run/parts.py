"""The parts of a run, one for each group of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedsim.availability import Availability
from fedsim.availability.clock import AllWork, Clock, Delay, NoClock, NoDelay, Work
from fedsim.core.ranks import ProcessRanks
from fedsim.data.contamination import Contamination, NoContamination
from fedsim.data.datasets import Dataset
from fedsim.data.drift import Drift, NoDrift
from fedsim.data.partition import Partition
from fedsim.evaluation import EvaluationOptions
from fedsim.evaluation.personal import Personal
from fedsim.local import SGD, LocalRule
from fedsim.models.capacity import Capacity, FullCapacity
from fedsim.models.selectors import Selector
from fedsim.run.ownership import PartCopier
from fedsim.run.rules import Stop
from fedsim.run.wiring import uplink_from_stages
from fedsim.shift import NoShift, Shift
from fedsim.strategies import FedAvg, Strategy
from fedsim.trainer import Execution
from fedsim.uplink import Uplink
from fedsim.uplink.attack import Attack

PART_TYPES = {  # arguments of a `Simulation` that are parts
    "dataset": Dataset, "partition": Partition, "availability": Availability, "strategy": Strategy, "local": LocalRule,
    "drift": Drift, "shift": Shift, "contamination": Contamination, "columns": Selector, "capacity": Capacity,
    "personal": Personal,
    "evaluation": EvaluationOptions, "execution": Execution, "stop": Stop, "attack": Attack, "clock": Clock,
    "work": Work, "delay": Delay, "ranks": ProcessRanks,
}  # fmt: skip
PARTS_NEVER_COPIED = ("personal", "stop", "trainer")  # parts that runs never modify and that are not copied


@dataclass(frozen=True)
class Parts:
    """The run's own copies of the user's parts, and defaults of the others.

    The fields have the names of the groups. Warnings about settings come in the order of the fields.

    Attributes:
        dataset: all of it; `Population` has that of the clients that there are.
        partition, availability, columns, uplink, attack: None where the user gave none.
        trainer: how everything is computed.
    """

    dataset: Dataset
    partition: Partition | None = None
    availability: Availability | None = None
    drift: Drift = field(default_factory=NoDrift)
    shift: Shift = field(default_factory=NoShift)
    contamination: Contamination = field(default_factory=NoContamination)
    local: LocalRule = field(default_factory=SGD)
    strategy: Strategy[Any] = field(default_factory=FedAvg)
    uplink: Uplink | None = None
    attack: Attack | None = None
    clock: Clock = field(default_factory=NoClock)
    work: Work = field(default_factory=AllWork)
    delay: Delay = field(default_factory=NoDelay)
    columns: Selector | None = None
    capacity: Capacity = field(default_factory=FullCapacity)
    personal: Personal = field(default_factory=Personal)
    stop: Stop = field(default_factory=Stop)
    trainer: Execution = field(default_factory=Execution)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)

    @classmethod
    def copy_of(cls, dataset: Dataset, **components: Any) -> Parts:
        """Build from the user's parts by group; None stands for the default. Objects that two parts share are shared by
        their copies.

        Raises:
            ConfigError: `uplink` is neither an uplink nor stages of one.
        """
        part_copies = PartCopier()
        given_components = {group: component for group, component in components.items() if component is not None}
        for group in (group for group in given_components if group not in PARTS_NEVER_COPIED):
            given_components[group] = part_copies(
                uplink_from_stages(given_components[group]) if group == "uplink" else given_components[group]
            )
        return cls(
            part_copies(dataset), **given_components
        )  # last: a part that modifies its samples has copied them by now
