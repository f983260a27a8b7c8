"""How far a round is from the processor's matrix products: workloads (b), (c), (d) of `bench.py` and p-cnn.

Every linear and convolutional layer of a step is three products (forward, the weight's gradient, and but for the first
layer the input's); a convolution is that of its patches. In one process take turns: whole rounds of fedsim, a raw
PyTorch loop over as many steps and samples (`limit`), the bare products of those shapes (`products`: `torch.mm` into
memory that is there, nothing else), and one large product, the processor's peak. Each is told by its GFLOP/s, those of
the layers' products alone. Meant for one thread and its processor time.

usage: OMP_NUM_THREADS=1 python scripts/bench_peak.py [--json FILE] [--only c,d] [--repeat 5] [--active 5] [--clock cpu]
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import bench_options
import bench_record
import torch
from bench import interleaved, timed
from bench_rounds import Rounds
from bench_workloads import WORKLOADS, Workload, limit_round, p_cnn
from torch import Tensor, nn

WORKS: dict[str, Callable[[], Workload]] = {name: WORKLOADS[name] for name in ("b", "c", "d")} | {"p-cnn": p_cnn}
LARGE = 1024  # rows and columns of the product that shows the peak
CPU = torch.device("cpu")

Product = tuple[int, int, int]  # [m, k] · [k, n]


def products(work: Workload) -> list[Product]:
    """Those of one step of one client."""
    found: list[Product] = []

    def linear(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        wide = inputs[0].shape[-1]
        add(inputs[0].numel() // wide, wide, output.shape[-1])

    def convolution(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        assert module.groups == 1
        add(output.numel() // output.shape[1], module.weight[0].numel(), output.shape[1])

    def add(m: int, k: int, n: int) -> None:
        backward = [(n, m, k), (m, n, k)]
        found.extend([(m, k, n), *backward[: 2 if found else 1]])

    module = work.module()
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            part.register_forward_hook(linear if isinstance(part, nn.Linear) else convolution)
    module(torch.rand(work.batch, *work.data.shape))
    return found


def operations(shapes: list[Product]) -> float:
    """Additions and multiplications."""
    return 2.0 * sum(m * k * n for m, k, n in shapes)


def multiply(shapes: list[Product], times: int) -> Callable[[], None]:
    """So many times these products, one after another."""
    ready = [(torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)) for m, k, n in shapes]

    def run() -> None:
        for _ in range(times):
            for a, b, out in ready:
                torch.mm(a, b, out=out)

    return run


def measure(work: Workload, repeat: int, clock: str) -> dict[str, Any]:
    """GFLOP/s of all contenders, and the share of a round that its bare products would take."""
    rounds = Rounds(work, [0], "cpu", {}, 0.2, False, clock)
    steps = work.steps * (work.clients if work.active is None else work.active)
    shapes, large = products(work), [(LARGE, LARGE, LARGE)]
    contenders = {
        "fedsim": rounds.seconds,
        "limit": timed(limit_round(work, CPU), CPU, clock),
        "products": timed(multiply(shapes, steps), CPU, clock),
        "peak": timed(multiply(large, 10), CPU, clock),
    }
    counted = {name: steps * operations(shapes) for name in contenders} | {"peak": 10 * operations(large)}
    times = interleaved(contenders, repeat)
    shares = [a / b for a, b in zip(times["products"], times["fedsim"], strict=True)]
    return {
        "workload": work.name,
        "what": work.what,
        "executor": rounds.simulation.trainer.executor_choice.describe(),
        "gflops": {name: counted[name] / statistics.median(taken) / 1e9 for name, taken in times.items()},
        "products_share_of_a_round": statistics.median(shares),
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
    }


def main() -> None:
    parser = bench_options.parser(__doc__ or "", WORKS, "cpu")
    parser.add_argument("--active", type=int, help="clients of a round, in place of the workload's own number")
    options = parser.parse_args()
    wanted = bench_options.wanted(parser, options.only, WORKS)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; GFLOP/s")
    rows = []
    for name in wanted:
        work = WORKS[name]()
        row = measure(
            work if options.active is None else dataclasses.replace(work, active=options.active),
            options.repeat,
            options.clock,
        )
        told = ", ".join(f"{who} {rate:.0f}" for who, rate in row["gflops"].items())
        print(f"({name}) {told}; the products alone are {row['products_share_of_a_round']:.0%} of a round", flush=True)
        rows.append(row)
    bench_record.save(options.json, rows, repeat=options.repeat, clock=options.clock)


if __name__ == "__main__":
    main()
