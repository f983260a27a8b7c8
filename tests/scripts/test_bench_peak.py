"""The products of a step are all of its products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["b", "c", "d", "p-cnn"])
def test_products_are_those_that_pytorch_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds a folder of its own
    import bench_peak
    from bench_workloads import loss_of

    work = bench_peak.WORKS[name]()
    work.batch = 3
    module = work.module()
    with FlopCounterMode(display=False) as counted:
        loss = loss_of(module(torch.rand(3, *work.data.shape)), torch.arange(3))
        torch.autograd.grad(loss, list(module.parameters()))
    assert bench_peak.operations(bench_peak.products(work)) == counted.get_total_flops()
