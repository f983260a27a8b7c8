"""Strategies that are run by one rank and by several, and nothing else of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim.availability.clock import Devices, UniformDelay
from fedsim.local import APFL
from fedsim.strategies import (
    CFL,
    DSGD,
    F3AST,
    IFCA,
    MIFA,
    AdaptiveWindow,
    AmplifiedScaffold,
    CAFed,
    CentredClipping,
    FedAsync,
    FedAvg,
    FedAWE,
    FedBuff,
    FedDrift,
    FedOpt,
    FedVARP,
    Median,
    Oort,
    PowerOfChoice,
    RobustServer,
    Scaffold,
)
from fedsim.uplink.attack import LabelFlip, Mimic, MinSum

STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "f3ast": lambda: {"strategy": F3AST(k=2, beta=0.1, weighting="data")},
    "mifa": lambda: {"strategy": MIFA(memory="gradient", memory_dtype="float32")},
    "dsgd": lambda: {"strategy": DSGD("erdos_renyi", 0.7, degrees="there")},
    "late": lambda: {"strategy": FedBuff(2), "delay": UniformDelay(0, 3)},
    "ticking": lambda: {"strategy": FedAsync(0.5), "clock": Devices(0.1, 0.8, deadline=0.9, late="deliver")},
    "cfl": lambda: {"strategy": CFL(10.0, 0.0, 3)},
    "ifca": lambda: {"strategy": IFCA(2, 1.0)},
    "feddrift": lambda: {"strategy": FedDrift(0.001, 3, 1)},
    "adaptive window": lambda: {"strategy": AdaptiveWindow(0.9, 1.0, 4)},
    "fedvarp": lambda: {"strategy": FedVARP()},
    "scaffold": lambda: {"strategy": Scaffold()},
    "fedopt": lambda: {"strategy": FedOpt()},
    "amplified scaffold": lambda: {"strategy": AmplifiedScaffold(2)},
    "power of choice": lambda: {"strategy": PowerOfChoice(1, 3)},
    "oort": lambda: {"strategy": Oort(2)},
    "centred clipping": lambda: {"strategy": CentredClipping(0.7, 0.05, bucket=2)},
    "robust server": lambda: {"strategy": RobustServer(Median(), FedOpt())},
    "mimic": lambda: {"strategy": Median(0.7), "attack": Mimic(2, fraction=0.4)},
    "min-sum": lambda: {"strategy": FedAvg(0.7), "attack": MinSum(fraction=0.4)},
    "label flip": lambda: {"strategy": FedAvg(0.7), "attack": LabelFlip(fraction=0.4, since=1)},
    "ca-fed": lambda: {"strategy": CAFed()},
    "numbers per seed": lambda: {
        "strategy": FedAWE([0.9, 0.4], clip=[0.5, 0.1]),
        "local": APFL([0.2, 0.7], lr=[0.2, 0.1], steps=2, batch_size=2),
    },
}
