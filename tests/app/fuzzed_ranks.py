"""Random compositions run by several ranks, and what each of them ended with."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import exit_codes
from small_runs import configuration

from fedsim.app.build import build
from fedsim.core import ProcessRanks
from fedsim.core.errors import ConfigError, DivergenceError, PeerError

Ending = tuple[list[dict[str, Any]], torch.Tensor] | str


def ended(overrides: list[str], ranks: ProcessRanks | None = None) -> Ending:
    """The history and the last models of a run; or why there was none."""
    try:
        result = build(configuration(*overrides), ranks)[0].run()
    except (ConfigError, DivergenceError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return result.history, result.state.model


def _rank(rank: int, count: int, folder: Path, compositions: dict[int, list[str]]) -> None:
    """One spawned process."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    ranks = ProcessRanks.join_group()
    torch.save({number: ended(own, ranks) for number, own in compositions.items()}, folder / f"rank-{rank}")
    os._exit(0)


def spawned(count: int, folder: Path, compositions: dict[int, list[str]]) -> list[dict[int, Ending]]:
    """The endings of every composition, as each of N ranks saw them."""
    assert exit_codes(count, _rank, folder, compositions) == [0] * count
    return [torch.load(folder / f"rank-{rank}", weights_only=False) for rank in range(count)]
