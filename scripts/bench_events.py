"""Updates per second of event-driven training, beside event-driven loops in plain PyTorch on the same trace.

A trace says how long each client's work takes for each version of the model, and in which order idle clients start.
fedsim and the loops follow it with the same data, so that the same clients arrive in the same order and their models
agree up to rounding, which is checked before anything is timed. 100 clients are in flight, and each holds one batch,
which it uses in each of its local steps.

- usual: a heap of arrivals; per client a deep copy of the module, a DataLoader and torch.optim.SGD.
- lean: a heap of arrivals; one module for all clients, batches ready in memory, gradients subtracted in place.

A ratio is the median over the repetitions, interleaved in one process, of the loop's time per update divided by
fedsim's. The workload `population` compares fedsim with itself: 1,000 clients in flight of a population of 1,000,000
and of 10,000, each in a process of its own, in turns.

usage: OMP_NUM_THREADS=1 python scripts/bench_events.py --clock cpu [--json FILE] [--only cnn-fedbuff] [--repeat 5]
"""

from __future__ import annotations

import copy
import heapq
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import bench_options
import bench_record
import numpy as np
import torch
import torch.nn.functional as F
from bench import interleaved
from bench_rounds import CLOCKS, Clocked
from bench_workloads import noise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Availability, Full, UniformK
from fedsim.availability.clock import Events
from fedsim.data.datasets import Dataset
from fedsim.data.partition import IID
from fedsim.data.partition.partition import Samples
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.run.plan import peak_memory_gib
from fedsim.run.tracking import Tracking
from fedsim.run.wiring import resolve_device
from fedsim.strategies import FedAsync, FedBuff, Strategy

CLIENTS, IN_FLIGHT = 200, 100
BATCH, STEPS, LR = 10, 5, 0.05
ALPHA, BUFFER = 0.6, 10
CHECKED, TOLERANCE = 60, 1e-10  # server updates in double precision, and by how much models may differ after them
SMALL_POPULATIONS = 20_000, 2_000
POPULATIONS, POPULATION_IN_FLIGHT, POPULATION_BUFFER = (1_000_000, 10_000), 1_000, 100


def mnist_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """PyTorch's first example for MNIST without dropout: two 5×5 convolutions, 21,840 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, classes),
    )  # fmt: skip


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression, whose steps take so little that the rest of an update counts."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))


MODELS = {"cnn": mnist_cnn, "logistic": logistic}
STRATEGIES: dict[str, Callable[[], Strategy[Any]]] = {
    "fedasync": lambda: FedAsync(ALPHA),
    "fedbuff": lambda: FedBuff(BUFFER),
}
POPULATION = "population"
WORKLOADS = [*(f"{model}-{strategy}" for model in MODELS for strategy in STRATEGIES), POPULATION]


@dataclass
class Trace:
    """What happens when, for T versions of the model and m clients.

    Attributes:
        seconds: [T, m] that the work takes which a client begins with a version.
        order: [T, m] the clients in the order in which idle ones start from a version.
    """

    seconds: np.ndarray
    order: np.ndarray


def data_of(clients: int) -> tuple[Dataset, list[np.ndarray]]:
    """Noise of MNIST's shape, and the samples of each client."""
    pictures = noise((1, 28, 28), clients * BATCH)
    scaled = (pictures.train_x.float() / 255 - 0.1307) / 0.3081
    data = Dataset("noise", scaled, pictures.train_y, scaled[:100], pictures.test_y, classes=10)
    table = IID().table(Samples(len(scaled), None, None), clients, seed=0)
    return data, np.split(table.order, table.offsets[1:-1])


def simulation_of(
    model: Callable[..., nn.Module], strategy: str, updates: int, process: Availability, options: Any, dtype: str
) -> Simulation:
    """The run whose trace all follow."""
    data, _ = data_of(CLIENTS)
    return Simulation(
        data, model, clients=CLIENTS, partition=IID(), availability=process, strategy=STRATEGIES[strategy](),
        local=SGD(lr=LR, steps=STEPS, batch_size=BATCH), rounds=updates,
        clock=Events(0.01, compute_spread=1.0, jitter=0.5, concurrency=IN_FLIGHT),
        evaluation=EvaluationOptions(every=10**9, client_samples=1),
        execution=Execution(device=options.device, dtype=dtype),
    )  # fmt: skip


def trace_of(simulation: Simulation, updates: int) -> Trace:
    """Its clock's numbers."""
    clock, everybody = simulation.round_clock.clock, np.arange(CLIENTS)
    assert isinstance(clock, Events)
    seconds = [STEPS * BATCH * clock.times(t, everybody, 0, 0).sample for t in range(updates)]
    return Trace(np.stack(seconds), np.stack([clock.start_order(t, everybody) for t in range(updates)]))


class Learner:
    """Local work of one client after another, in plain PyTorch.

    Args:
        module: of the model.
        data, shares: see `data_of`.
        device, dtype: of the computation.
    """

    def __init__(
        self, module: nn.Module, data: Dataset, shares: list[np.ndarray], device: torch.device, dtype: torch.dtype
    ) -> None:
        assert data.train_y is not None
        self.module = module.to(device, dtype)
        self.batches = [
            (data.train_x[share].to(device, dtype), data.train_y[share].to(device))
            for share in map(torch.as_tensor, shares)
        ]

    def train(self, client: int, start: list[Tensor]) -> list[Tensor]:
        """The parameters after the local steps from these."""
        raise NotImplementedError


class Lean(Learner):
    """One module; nothing is created but gradients."""

    def train(self, client: int, start: list[Tensor]) -> list[Tensor]:
        parameters: list[Tensor] = list(self.module.parameters())
        x, y = self.batches[client]
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        for _ in range(STEPS):
            gradients = torch.autograd.grad(F.cross_entropy(self.module(x), y), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-LR)
        return [parameter.detach().clone() for parameter in parameters]


class Usual(Learner):
    """A module, a DataLoader and an optimiser for each client."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loaders = [
            DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=BATCH, shuffle=True) for x, y in self.batches
        ]
        self.device = self.batches[0][0].device

    def train(self, client: int, start: list[Tensor]) -> list[Tensor]:
        model = copy.deepcopy(self.module)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(STEPS):  # a pass is one batch
            for x, y in self.loaders[client]:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(self.device)), y.to(self.device)).backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]


LOOPS: dict[str, type[Learner]] = {"usual": Usual, "lean": Lean}


class Server:
    """FedAsync or FedBuff over lists of parameters."""

    def __init__(self, strategy: str, model: list[Tensor]) -> None:
        self.model, self.size = model, BUFFER if strategy == "fedbuff" else 1
        self.buffer: list[tuple[int, list[Tensor], list[Tensor]]] = []

    def arrive(self, staleness: int, start: list[Tensor], end: list[Tensor]) -> None:
        """One update is here."""
        weight = (1 + staleness) ** -0.5
        if self.size == 1:
            alpha = ALPHA * weight
            self.model = [(1 - alpha) * x + alpha * y for x, y in zip(self.model, end, strict=True)]
            return
        self.buffer.append((staleness, start, end))

    def step(self) -> None:
        """The buffer is full."""
        for staleness, start, end in self.buffer:
            weight = (1 + staleness) ** -0.5 / self.size
            self.model = [x - weight * (begin - after) for x, begin, after in zip(self.model, start, end, strict=True)]
        self.buffer = []


def versions(trace: Trace, learner: Learner, strategy: str, start: list[Tensor]) -> Iterator[list[Tensor]]:
    """The server's model before its first update and after each one: a heap of arrivals, one client at a time."""
    server = Server(strategy, start)
    heap: list[tuple[float, int]] = []
    began: dict[int, tuple[int, list[Tensor]]] = {}  # client → version and model
    yield server.model
    now = 0.0
    for t in range(len(trace.order)):
        waiting = (int(i) for i in trace.order[t])
        used = set[int]()
        while len(used) < server.size:
            while len(heap) < IN_FLIGHT and (client := next(waiting, None)) is not None:
                if client not in began:
                    heapq.heappush(heap, (now + trace.seconds[t, client], client))
                    began[client] = (t, server.model)
            now, client = heapq.heappop(heap)
            version, model = began[client]
            server.arrive(t - version, model, learner.train(client, model))
            used.add(client)
        server.step()
        for client in used:
            del began[client]
        yield server.model


class Contenders:
    """fedsim and the loops on one trace.

    Args:
        name: of the workload.
        options: of the command line.
    """

    def __init__(self, name: str, options: Any) -> None:
        model, self.strategy = name.split("-")
        self.model, self.options = MODELS[model], options
        self.device = resolve_device(options.device)
        self.per_update = BUFFER if self.strategy == "fedbuff" else 1
        self.updates, self.skipped = (n // self.per_update for n in (options.updates, options.skipped))

    def difference(self) -> float:
        """Largest difference of a parameter between fedsim and the lean loop in double precision."""
        updates = max(CHECKED // self.per_update, 3)
        simulation = simulation_of(self.model, self.strategy, updates, Full(), self.options, "float64")
        start = self.parameters(simulation)
        result = simulation.run(tracking=Tracking(progress="none"))
        *_, last = versions(trace_of(simulation, updates), self.learner("lean", torch.float64), self.strategy, start)
        ours = result.state.model[0].cpu()
        theirs = torch.cat([parameter.flatten() for parameter in last]).cpu()
        moved = (theirs - torch.cat([parameter.flatten() for parameter in start]).cpu()).abs().max()
        if not moved > 1e4 * TOLERANCE:
            raise SystemExit("the model did not move, so the comparison shows nothing")
        return float((ours - theirs).abs().max())

    def parameters(self, simulation: Simulation) -> list[Tensor]:
        """The initial model as a list of tensors."""
        row = simulation.initial_state().model[0].clone()
        shapes = [parameter.shape for parameter in self.model((1, 28, 28), 10).parameters()]
        return [part.view(shape) for part, shape in zip(row.split([s.numel() for s in shapes]), shapes, strict=True)]

    def learner(self, name: str, dtype: torch.dtype) -> Learner:
        data, shares = data_of(CLIENTS)
        return LOOPS[name](self.model((1, 28, 28), 10), data, shares, self.device, dtype)

    def time(self) -> float:
        """Seconds on the clock, once the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return CLOCKS[self.options.clock]()

    def all(self) -> dict[str, Callable[[], float]]:
        """Name → seconds of one client's update, the first server updates left out."""
        process = Clocked(Full(), CLOCKS[self.options.clock])
        simulation = simulation_of(self.model, self.strategy, self.updates, process, self.options, "float32")
        clocked = simulation.availability
        assert isinstance(clocked, Clocked)
        start, trace = self.parameters(simulation), trace_of(simulation, self.updates)
        of_updates = (self.updates - self.skipped - 1) * self.per_update
        self.executor = simulation.trainer.executor_choice.describe()

        def fedsim() -> float:
            simulation.run(tracking=Tracking(progress="none"))
            self.executor = simulation.trainer.executor_choice.describe()
            return (clocked.times[self.updates - 1] - clocked.times[self.skipped]) / of_updates

        def loop(name: str) -> Callable[[], float]:
            learner = self.learner(name, torch.float32)

            def seconds() -> float:
                begin = end = 0.0
                for t, _ in enumerate(versions(trace, learner, self.strategy, start)):
                    if t == self.skipped:
                        begin = self.time()
                    elif t == self.updates - 1:
                        end = self.time()
                return (end - begin) / of_updates

            return seconds

        return {"fedsim": fedsim} | {name: loop(name) for name in LOOPS}


def measure(name: str, options: Any) -> dict[str, Any]:
    """One row of the table."""
    contenders = Contenders(name, options)
    difference = contenders.difference()
    if not difference < TOLERANCE:
        raise SystemExit(f"{name}: fedsim and the loop differ by {difference:.1e} in double precision")
    times = interleaved(contenders.all(), options.repeat)
    ratios = {loop: [a / b for a, b in zip(times[loop], times["fedsim"], strict=True)] for loop in LOOPS}
    return {
        "workload": name,
        "in_flight": IN_FLIGHT,
        "difference": difference,
        "updates_per_second": {who: 1 / statistics.median(taken) for who, taken in times.items()},
        "ratio": {loop: statistics.median(values) for loop, values in ratios.items()},
        "ratio_range": {loop: [min(values), max(values)] for loop, values in ratios.items()},
        "executor": contenders.executor,
    }


def population_child(clients: int, options: Any) -> tuple[float, float]:
    """Seconds of one client's update, and the process's peak memory in GiB."""
    pictures = noise((1, 8, 8), clients * 8)
    process = Clocked(UniformK(min(2 * POPULATION_IN_FLIGHT, clients)), CLOCKS[options.clock])
    simulation = Simulation(
        pictures, Linear, clients=clients, availability=process, strategy=FedBuff(POPULATION_BUFFER),
        local=SGD(lr=LR, steps=10, batch_size=8),
        clock=Events(0.01, compute_spread=1.0, jitter=0.5, concurrency=POPULATION_IN_FLIGHT),
        rounds=options.population_updates, evaluation=EvaluationOptions(every=10**9, client_samples=1),
        execution=Execution(device=options.device),
    )  # fmt: skip
    simulation.run(tracking=Tracking(progress="none"))
    clocked = simulation.availability
    assert isinstance(clocked, Clocked)
    times = clocked.times[options.population_updates // 3 :]
    return (times[-1] - times[0]) / (len(times) - 1) / POPULATION_BUFFER, peak_memory_gib() or math.nan


def population(options: Any) -> dict[str, Any]:
    """The row of the two populations, measured in turns."""
    sizes = SMALL_POPULATIONS if options.small_populations else POPULATIONS
    seconds: dict[int, list[float]] = {clients: [] for clients in sizes}
    peaks: dict[int, float] = {}
    for _ in range(options.repeat):
        for clients in sizes:
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                update_seconds, peaks[clients] = pool.apply(population_child, (clients, options))
            seconds[clients].append(update_seconds)
    many, few = (seconds[clients] for clients in sizes)
    return {
        "workload": POPULATION,
        "in_flight": POPULATION_IN_FLIGHT,
        "updates_per_second": {f"{clients:,} clients": 1 / statistics.median(seconds[clients]) for clients in sizes},
        "cost_ratio": statistics.median(a / b for a, b in zip(many, few, strict=True)),
        "peak_gib": {f"{clients:,} clients": peaks[clients] for clients in sizes},
    }


def show(row: dict[str, Any]) -> str:
    """One line."""
    rates = ", ".join(f"{who} {rate:,.0f}" for who, rate in row["updates_per_second"].items())
    if row["workload"] == POPULATION:
        return f"{POPULATION:18} updates/s: {rates}; the larger costs {row['cost_ratio']:.2f}× per update"
    ratios = ", ".join(f"{loop} {value:.1f}×" for loop, value in row["ratio"].items())
    return f"{row['workload']:18} updates/s: {rates}; fedsim faster than {ratios} ({row['executor']})"


def main() -> None:
    parser = bench_options.parser(__doc__ or "", WORKLOADS, "wall")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--updates", type=int, default=400, help="of clients in one repetition (default 400)")
    parser.add_argument("--skipped", type=int, default=150, help="of them that are not timed (default 150)")
    parser.add_argument("--population-updates", type=int, default=60, help="server updates (default 60)")
    parser.add_argument("--small-populations", action="store_true", help="in a test of this program")
    options = parser.parse_args()
    wanted = bench_options.wanted(parser, options.only, WORKLOADS)
    device = resolve_device(options.device)
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads; {options.repeat} repetitions")
    rows = []
    for name in wanted:
        row = population(options) if name == POPULATION else measure(name, options)
        print(show(row), flush=True)
        rows.append(row)
        settings = {
            key: getattr(options, key) for key in ("repeat", "clock", "updates", "skipped", "population_updates")
        }
        bench_record.save(options.json, rows, device=device, **settings)


if __name__ == "__main__":
    main()
