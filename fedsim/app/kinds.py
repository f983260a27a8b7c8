"""The classes that a configuration may name, group by group."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.availability import Availability, Probability, Trajectory
from fedsim.availability.clock import Clock, Delay, Work
from fedsim.core.targets import TargetKind
from fedsim.data.contamination import Contamination
from fedsim.data.datasets.dataset_kinds import AUGMENTATION_KIND, DATASET_KIND, MAP_STYLE_DATASET_KIND, TRANSFORM_KIND
from fedsim.data.drift import Drift
from fedsim.data.partition import Partition
from fedsim.data.partition.flwr import PARTITIONER_KIND
from fedsim.evaluation.personal import Personal
from fedsim.local import LocalRule, Schedule
from fedsim.models.capacity import Capacity
from fedsim.models.kinds import MODEL_KIND
from fedsim.models.selectors import Selector
from fedsim.run.rules import Stop
from fedsim.run.tracking import Observer, Tracking
from fedsim.shift import Shift
from fedsim.strategies import Strategy
from fedsim.uplink import Stage, Uplink
from fedsim.uplink.attack import Attack


def _kind_of(base: type[Any], module: str, **options: Any) -> TargetKind:
    article = "an" if base.__name__[0] in "AEIOU" else "a"
    return TargetKind(f"{article} {base.__name__}", (base,), modules=(module,), **options)


OBSERVER_KIND = _kind_of(Observer, "fedsim.run.tracking")
_KIND_BY_GROUP = {
    "dataset": DATASET_KIND,
    "partition": _kind_of(Partition, "fedsim.data.partition", argument_kinds_by_name={"partitioner": PARTITIONER_KIND}),
    "availability": _kind_of(Availability, "fedsim.availability"),
    "drift": _kind_of(Drift, "fedsim.data.drift"),
    "shift": _kind_of(Shift, "fedsim.shift"),
    "contamination": _kind_of(Contamination, "fedsim.data.contamination"),
    "model": MODEL_KIND,
    "local": _kind_of(LocalRule, "fedsim.local"),
    "strategy": _kind_of(Strategy, "fedsim.strategies"),
    "uplink": _kind_of(Uplink, "fedsim.uplink"),
    "attack": _kind_of(Attack, "fedsim.uplink.attack"),
    "clock": _kind_of(Clock, "fedsim.availability.clock"),
    "work": _kind_of(Work, "fedsim.availability.clock"),
    "delay": _kind_of(Delay, "fedsim.availability.clock"),
    "columns": _kind_of(Selector, "fedsim.models.selectors"),
    "capacity": _kind_of(Capacity, "fedsim.models.capacity"),
    "personal": _kind_of(Personal, "fedsim.evaluation.personal"),
    "stop": _kind_of(Stop, "fedsim.run"),
    "tracking": _kind_of(Tracking, "fedsim.run.tracking", argument_kinds_by_name={"observers": OBSERVER_KIND}),
}
_ARGUMENT_KINDS = (
    *_KIND_BY_GROUP.values(),
    _kind_of(Probability, "fedsim.availability"),
    _kind_of(Trajectory, "fedsim.availability"),
    _kind_of(Schedule, "fedsim.local"),
    _kind_of(Stage, "fedsim.uplink"),
    AUGMENTATION_KIND, MAP_STYLE_DATASET_KIND, TRANSFORM_KIND, OBSERVER_KIND,
    TargetKind("an object of your own"),
)  # fmt: skip
# Group → the kind of its object; the user's own classes may have objects of every kind among their arguments.
KINDS = {group: dataclasses.replace(kind, argument_kinds=_ARGUMENT_KINDS) for group, kind in _KIND_BY_GROUP.items()}
