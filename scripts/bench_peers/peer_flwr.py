"""Flower's simulation runtime: a ClientApp on as many Ray workers as there are cores, one core each, and FedAvg.

`run_simulation` with the message API, as its PyTorch quickstart has it: a client loads the arrays it is sent, trains on
its own DataLoader, and replies with its arrays and how many samples it has.
"""

from __future__ import annotations

import logging
import os
from typing import Any

os.environ.update(RAY_DEDUP_LOGS="0", FLWR_TELEMETRY_ENABLED="0")

import torch
import torch.nn.functional as F
import workload as w
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("flwr").setLevel(logging.WARNING)
asked = w.options()
clock = w.Clock(asked)
found: dict[str, Any] = {"steps": 0}
client_app, server_app = ClientApp(), ServerApp()
workload = asked.workload
held: dict[str, torch.Tensor] = {}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    if not held:  # once in every worker
        held["x"], held["y"] = map(torch.from_numpy, w.data(workload))
    client = int(context.node_config["partition-id"])
    model = w.torch_model(workload)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=w.LR)
    steps = 0
    for x, y in DataLoader(TensorDataset(held["x"][client], held["y"][client]), batch_size=w.BATCH, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": w.SAMPLES, "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    model = w.torch_model(workload)
    found["start"] = w.torch_vector(model)

    def after(t: int, arrays: ArrayRecord) -> None:
        if t:  # it is called before the first round too
            clock.tick()

    strategy = FedAvg(fraction_train=w.ACTIVE / w.CLIENTS, fraction_evaluate=0.0, min_available_nodes=w.CLIENTS)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=clock.total, evaluate_fn=after)
    for metrics in result.train_metrics_clientapp.values():  # means over the clients of a round
        found["steps"] += round(metrics["steps"] * w.ACTIVE)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    found["end"] = w.torch_vector(model)


if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    run_simulation(
        server_app,
        client_app,
        num_supernodes=w.CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "include_dashboard": False, "log_to_driver": False},
        },
    )
    setting = f"run_simulation, {cores} Ray workers"
    w.report(clock, found["start"], found["end"], found["steps"], setting, 1, ["flwr", "ray", "torch", "numpy"])
