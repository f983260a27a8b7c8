"""Numbers of clients, looked up."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.heterogeneity import entry_of_client


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_an_entry_is_what_indexing_gives_also_under_vmap(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table, numbers = (
        torch.arange(5 * max(1, torch.Size(shape).numel())).reshape(5, *shape).to(dtype),
        torch.tensor([4, 0, 4]),
    )
    assert torch.equal(torch.func.vmap(lambda number: entry_of_client(table, number))(numbers), table[numbers])
    assert all(torch.equal(entry_of_client(table, number), table[number]) for number in numbers)
