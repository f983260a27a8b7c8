"""Options of where and how a run is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fedsim.core.constraints import AutoOrCount, OneOf, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.placement import STORAGE_PLACES
from fedsim.models.precision import PRECISIONS

EXECUTORS = ("auto", "fused", "grouped", "vmap", "loop")
COMPILE_MODES = ("replay", "never", "graph", "default", "reduce-overhead", "max-autotune")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Execution(Validated):
    """Options that change results only by rounding, except for `dtype` and `precision`.

    Attributes:
        executor, chunk, workers, trial, compile: see `fedsim.trainer.choose`. `compile='graph'` is experimental.
        dtype: 'float32' or 'float64'.
        precision: of training: 'full', 'tf32' or 'bf16', see `fedsim.models.precision`. 'bf16' is experimental.
        cache_frozen: compute the outputs of the model's first frozen layers once for the data set, where nothing
            changes them (see `fedsim.run.frozen_layers`). They replace the inputs in memory.
        memory: where what is remembered of each client lies between rounds: 'device', 'host' or 'disk' (see
            `fedsim.core.placement`); the rows of a round are on the device in any case, and the numbers are the same.
        device: 'auto', 'cpu', 'cuda', …
        deterministic: the same bits from every run on the same device, see `fedsim.run.determinism`.
    """

    effective_if = (
        EffectiveIf(
            "workers", lambda component, run: component.executor != "vmap", "{at}.executor=loop, fused, grouped or auto"
        ),
        EffectiveIf("trial", lambda component, run: component.executor == "auto", "{at}.executor=auto"),
    )

    executor: Annotated[str, OneOf(*EXECUTORS)] = "auto"
    chunk: AutoOrCount = "auto"
    workers: AutoOrCount = "auto"
    trial: bool = True
    compile: Annotated[str, OneOf(*COMPILE_MODES)] = "replay"
    dtype: Annotated[str, OneOf(*DTYPES)] = "float32"
    precision: Annotated[str, OneOf(*PRECISIONS)] = "full"
    cache_frozen: bool = False
    memory: Annotated[str, OneOf(*STORAGE_PLACES)] = "device"
    device: Any = "auto"
    deterministic: bool = False
