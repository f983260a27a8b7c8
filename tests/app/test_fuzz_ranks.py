"""Random compositions that two ranks share give the numbers of one process, or are refused by all of them."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import configuration
from test_fuzz import close, composition

from fedsim.app.build import build
from fedsim.core import ConfigError, DivergenceError, Ranks

NUMBERS = range(600, 640)
Ended = list[list[dict[str, Any]] | str]


def ended(numbers: Sequence[int], ranks: Ranks) -> Ended:
    """The history of each composition, or what it was refused with."""
    found: Ended = []
    for number in numbers:
        try:
            simulation, tracking, _ = build(configuration(*composition(number)), ranks)
            found.append(simulation.run(tracking=tracking).history)
        except (ConfigError, DivergenceError) as error:
            found.append(type(error).__name__)
    return found


def of_ranks(rank: int, numbers: Sequence[int], folder: Path) -> None:
    """One of two spawned processes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    (folder / f"{rank}.json").write_text(json.dumps(ended(numbers, Ranks.join())))
    os._exit(0)


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=of_ranks, args=(rank, NUMBERS, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    expected = ended(NUMBERS, Ranks())
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [type(one) for one in first] == [type(one) for one in second] == [type(one) for one in expected]
    ran = [(one, other) for one, other in zip(first, expected, strict=True) if isinstance(other, list)]
    assert len(ran) >= 30
    for one, other in ran:
        close(one, other)
