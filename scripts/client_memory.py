"""What clients' models cost in memory, wherever they lie (`trainer.memory`): APFL, which keeps one model per client.

A tenth of the clients take part in each of three rounds. Every case has a process of its own; from its memory that of
the same run with plain SGD, which keeps nothing, is taken off. Memory is the process's own (pages of a mapped file can
be dropped at any time, and are not counted); on a GPU also the device's.

usage: python scripts/client_memory.py [--json FILE] [--device auto] [--clients N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
from pathlib import Path

import bench_record
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import UniformK
from fedsim.core.placement import STORAGE_PLACES
from fedsim.data.datasets import Dataset
from fedsim.local import APFL, SGD
from fedsim.models import MLP, SVHNCNN
from fedsim.run.wiring import resolve_device

CASES = {"MLP 2×200, 784 inputs": (MLP, (1, 28, 28), 1000), "SVHN CNN, 3×32×32": (SVHNCNN, (3, 32, 32), 100)}
BATCH = 20


class Watch(threading.Thread):
    """The most memory of its own that the process has, looked at a hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            lines = Path("/proc/self/status").read_text().splitlines()
            own = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self.peak = max(self.peak, own * 1024)


def child(case: str, rule: str, place: str, device: str, clients: int | None) -> tuple[int, int, int]:
    """Bytes of all clients' models; the process's peak; the device's peak (0 on a CPU)."""
    model, shape, most = CASES[case]
    clients = clients or most
    owners = torch.arange(clients).repeat_interleave(BATCH)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(owners), *shape, generator=draw)
    data = Dataset("noise", x, torch.randint(0, 10, (len(owners),), generator=draw), classes=10, owners=owners)
    local = {"apfl": APFL, "sgd": SGD}[rule](lr=0.01, steps=2, batch_size=BATCH)
    simulation = Simulation(
        data, model, clients=clients, availability=UniformK(clients // 10), local=local, rounds=3,
        evaluation=EvaluationOptions(every=10**9), execution=Execution(device=device, memory=place),
    )  # fmt: skip
    watch = Watch()
    watch.start()
    simulation.run()
    watch.over.set()
    watch.join()
    cuda = simulation.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(simulation.device) if cuda else 0
    return clients * simulation.model.dimension * 4, watch.peak, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--clients", type=int, help="in place of the numbers of the cases")
    options = parser.parse_args()
    device, rows = str(resolve_device(options.device)), []
    print("| clients × model | their models | trainer.memory | of the process | of the GPU |\n|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case, (_, _, most) in CASES.items():
            _, *without = pool.apply(child, (case, "sgd", "device", device, options.clients))
            for place in (
                STORAGE_PLACES if device.startswith("cuda") else ("device", "disk")
            ):  # a CPU's device is the host
                size, *peaks = pool.apply(child, (case, "apfl", place, device, options.clients))
                process, gpu = ((a - b) / 1e6 for a, b in zip(peaks, without, strict=True))
                clients = options.clients or most
                rows.append({"case": case, "clients": clients, "models_mb": size / 1e6, "memory": place})
                rows[-1] |= {"process_mb": process, "gpu_mb": gpu}
                print(
                    f"| {clients} × {case} | {size / 1e6:,.0f} MB | {place} | {process:,.0f} MB | {gpu:,.0f} MB |",
                    flush=True,
                )
    bench_record.save(options.json, rows, device=torch.device(device))


if __name__ == "__main__":
    main()
