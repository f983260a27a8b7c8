"""The classes that a configuration may name, group by group."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.attack import Attack
from fedsim.availability import Availability, Probability, Trajectory
from fedsim.clock import Clock, Delay, Work
from fedsim.contamination import Contamination
from fedsim.core.targets import Kind
from fedsim.datasets.kinds import AUGMENTATION, DATASET, MAP_STYLE, TRANSFORM
from fedsim.local import LocalRule, Schedule
from fedsim.models.kinds import MODEL
from fedsim.models.selectors import Selector
from fedsim.partition import Partition
from fedsim.partition.flwr import PARTITIONER
from fedsim.personal import Personal
from fedsim.run.rules import Stop
from fedsim.shift import Shift
from fedsim.strategies import Strategy
from fedsim.tracking import Observer, Tracking
from fedsim.uplink import Stage, Uplink


def _of(base: type[Any], module: str, **more: Any) -> Kind:
    article = "an" if base.__name__[0] in "AEIOU" else "a"
    return Kind(f"{article} {base.__name__}", (base,), modules=(module,), **more)


OBSERVER = _of(Observer, "fedsim.tracking")
_GROUPS = {
    "dataset": DATASET,
    "partition": _of(Partition, "fedsim.partition", arguments={"partitioner": PARTITIONER}),
    "availability": _of(Availability, "fedsim.availability"),
    "shift": _of(Shift, "fedsim.shift"),
    "contamination": _of(Contamination, "fedsim.contamination"),
    "model": MODEL,
    "local": _of(LocalRule, "fedsim.local"),
    "strategy": _of(Strategy, "fedsim.strategies"),
    "uplink": _of(Uplink, "fedsim.uplink"),
    "attack": _of(Attack, "fedsim.attack"),
    "clock": _of(Clock, "fedsim.clock"),
    "work": _of(Work, "fedsim.clock"),
    "delay": _of(Delay, "fedsim.clock"),
    "columns": _of(Selector, "fedsim.models.selectors"),
    "personal": _of(Personal, "fedsim.personal"),
    "stop": _of(Stop, "fedsim.run"),
    "tracking": _of(Tracking, "fedsim.tracking", arguments={"observers": OBSERVER}),
}
_INSIDE = (
    *_GROUPS.values(),
    _of(Probability, "fedsim.availability"),
    _of(Trajectory, "fedsim.availability"),
    _of(Schedule, "fedsim.local"),
    _of(Stage, "fedsim.uplink"),
    AUGMENTATION, MAP_STYLE, TRANSFORM, OBSERVER,
    Kind("an object of your own"),
)  # fmt: skip
# Group → the kind of its object; the user's own classes may have objects of every kind among their arguments.
KINDS = {group: dataclasses.replace(kind, inside=_INSIDE) for group, kind in _GROUPS.items()}
