"""What ranks hold, gathered and dealt out again: the tensors of a single process. Ranks take turns in this process."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.run.layout import RankLayout

REPLICATES, CLIENTS, COUNT = 2, 7, 3
MAIL: dict[tuple[int, int], deque[Tensor]] = {}
SHARED: dict[str, Any] = {}


class Turn:
    """`ProcessRanks` as far as a layout uses them; what is sent waits until the other rank's turn."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_ranks, self.is_main_rank = rank, COUNT, rank == 0
        self.client_slice = slice(rank, None, COUNT)

    def send(self, value: Tensor, to: int) -> None:
        assert value.is_contiguous()
        MAIL.setdefault((self.rank, to), deque()).append(value.clone())

    def receive(self, like: Tensor, sender: int) -> Tensor:
        value = MAIL[sender, self.rank].popleft()
        assert (value.numel(), value.dtype) == (like.numel(), like.dtype)
        return value.reshape(like.shape)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return SHARED["lengths"]

    def broadcast_object(self, value: Any) -> Any:
        return SHARED.setdefault("first", value)


def layout(rank: int) -> RankLayout:
    return RankLayout(Turn(rank), (REPLICATES, CLIENTS), frozenset({"memory"}))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_on_its_way() -> Any:
    MAIL.clear(), SHARED.clear()
    yield
    assert not any(MAIL.values())  # each message was received


def part(whole: Tensor, rank: int) -> Tensor:
    """The rows of the rank's clients."""
    return whole.unflatten(0, (REPLICATES, CLIENTS))[:, rank::COUNT].flatten(0, 1)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_what_is_gathered_is_the_whole_and_what_is_dealt_are_its_parts(shape: tuple[int, ...]) -> None:
    whole = torch.randn(REPLICATES * CLIENTS, *shape)
    parts = [part(whole, rank) for rank in range(COUNT)]
    for rank in (2, 1):
        assert layout(rank).gather("memory", parts[rank]) is parts[rank]
    assert torch.equal(layout(0).gather("memory", parts[0]), whole)
    assert layout(1).global_shape("memory", parts[1]) == whole.shape
    dealt = [layout(rank).scatter("memory", whole if rank == 0 else None, parts[rank]) for rank in range(COUNT)]
    assert all(map(torch.equal, dealt, parts))
    assert layout(1).gather("model", parts[1]) is parts[1]  # not divided
    assert layout(1).global_shape("model", parts[1]) == parts[1].shape


def test_rows_under_way_are_in_the_order_of_a_single_process() -> None:
    """By the round in which they began, then by client; and each rank gets those of its own clients again."""
    virtual = torch.tensor([0, 3, 9, 13, 1, 4, 12, 2, 5, 8])
    began = torch.tensor([4, 4, 4, 4, 6, 6, 6, 7, 7, 7])
    rows = {"virtual": virtual, "began": began, "params": torch.randn(10, 2, 3), "loss": torch.randn(10).double()}
    owner = virtual % CLIENTS % COUNT
    parts = [{name: value[owner == rank] for name, value in rows.items()} for rank in range(COUNT)]
    SHARED["lengths"] = [len(held["virtual"]) for held in parts]
    assert min(SHARED["lengths"]) > 0
    for rank in (1, 2):
        assert layout(rank).gather_rows(parts[rank]) is parts[rank]
    gathered = layout(0).gather_rows(parts[0])
    assert gathered.keys() == rows.keys()
    assert all(torch.equal(gathered[name], rows[name]) for name in rows)
    dealt = [layout(rank).scatter_rows_to_ranks(rows if rank == 0 else {}) for rank in range(COUNT)]
    for held, expected in zip(dealt, parts, strict=True):
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_nothing_under_way_is_nothing_everywhere() -> None:
    assert [layout(rank).gather_rows({}) for rank in range(COUNT)] == [{}] * COUNT
    assert [layout(rank).scatter_rows_to_ranks({}) for rank in range(COUNT)] == [{}] * COUNT
