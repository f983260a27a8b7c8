"""The classes that a configuration may name, group by group."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.availability import Availability, Probability, Trajectory
from fedsim.availability.clock import Clock, Delay, Work
from fedsim.core.targets import ComponentKind
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


def _make_target_kind(base: type[Any], module: str, **options: Any) -> ComponentKind:
    article = "an" if base.__name__[0] in "AEIOU" else "a"
    return ComponentKind(f"{article} {base.__name__}", (base,), modules=(module,), **options)


OBSERVER_KIND = _make_target_kind(Observer, "fedsim.run.tracking")
_KIND_BY_GROUP = {
    "dataset": DATASET_KIND,
    "partition": _make_target_kind(
        Partition, "fedsim.data.partition", argument_kinds_by_name={"partitioner": PARTITIONER_KIND}
    ),
    "availability": _make_target_kind(Availability, "fedsim.availability"),
    "drift": _make_target_kind(Drift, "fedsim.data.drift"),
    "shift": _make_target_kind(Shift, "fedsim.shift"),
    "contamination": _make_target_kind(Contamination, "fedsim.data.contamination"),
    "model": MODEL_KIND,
    "local": _make_target_kind(LocalRule, "fedsim.local"),
    "strategy": _make_target_kind(Strategy, "fedsim.strategies"),
    "uplink": _make_target_kind(Uplink, "fedsim.uplink"),
    "attack": _make_target_kind(Attack, "fedsim.uplink.attack"),
    "clock": _make_target_kind(Clock, "fedsim.availability.clock"),
    "work": _make_target_kind(Work, "fedsim.availability.clock"),
    "delay": _make_target_kind(Delay, "fedsim.availability.clock"),
    "columns": _make_target_kind(Selector, "fedsim.models.selectors"),
    "capacity": _make_target_kind(Capacity, "fedsim.models.capacity"),
    "personal": _make_target_kind(Personal, "fedsim.evaluation.personal"),
    "stop": _make_target_kind(Stop, "fedsim.run"),
    "tracking": _make_target_kind(Tracking, "fedsim.run.tracking", argument_kinds_by_name={"observers": OBSERVER_KIND}),
}
_ARGUMENT_KINDS = (
    *_KIND_BY_GROUP.values(),
    _make_target_kind(Probability, "fedsim.availability"),
    _make_target_kind(Trajectory, "fedsim.availability"),
    _make_target_kind(Schedule, "fedsim.local"),
    _make_target_kind(Stage, "fedsim.uplink"),
    AUGMENTATION_KIND, MAP_STYLE_DATASET_KIND, TRANSFORM_KIND, OBSERVER_KIND,
    ComponentKind("an object of your own"),
)  # fmt: skip
# Group → the kind of its object; the user's own classes may have objects of every kind among their arguments.
KINDS = {group: dataclasses.replace(kind, argument_kinds=_ARGUMENT_KINDS) for group, kind in _KIND_BY_GROUP.items()}
