"""Personal rules, and their plain autograd client by client."""

from __future__ import annotations

import functools

import numpy as np
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import APFL, Ditto, Inverse, PerFedAvg, PFedMe
from fedsim.models import MLP

SIZES = (1, 9, 4, 3, 8)


double = functools.partial(Execution, dtype="float64")


LOCAL = {"lr": 0.2, "epochs": 2, "batch_size": 4, "drop_last": False, "schedule": Inverse(offset=3.0)}


RULES = {
    "apfl": lambda **o: APFL(alpha=0.3, personal_lr=0.35, **LOCAL | o),
    "apfl, adaptive": lambda **o: APFL(alpha=0.3, adaptive=True, alpha_decay=0.02, **LOCAL | o),
    "apfl, adaptive every step": lambda **o: APFL(alpha=0.6, adaptive=True, alpha_every="step", **LOCAL | o),
    "apfl, adaptive, a rate of its own": lambda **o: APFL(alpha=0.3, adaptive=True, personal_lr=0.35, **LOCAL | o),
    "apfl, outputs": lambda **o: APFL(alpha=0.3, mix="outputs", **LOCAL | o),
    "apfl, outputs, adaptive": lambda **o: APFL(alpha=0.3, mix="outputs", adaptive=True, **LOCAL | o),
    "perfedavg": lambda **o: PerFedAvg(inner_lr=0.3, **LOCAL | o),
    "perfedavg, second order": lambda **o: PerFedAvg(inner_lr=0.3, second_order=True, **LOCAL | o),
    "perfedavg, inner step kept": lambda **o: PerFedAvg(inner_lr=0.3, keep_inner=True, **LOCAL | o),
    "pfedme": lambda **o: PFedMe(penalty=2.0, inner_steps=3, inner_lr=0.1, **LOCAL | o),
    "pfedme, fresh batches": lambda **o: PFedMe(
        penalty=2.0, inner_steps=3, inner_lr=0.1, fresh_batches=True, **LOCAL | o
    ),
    "ditto": lambda **o: Ditto(penalty=0.7, personal_lr=0.35, weight_decay=0.1, **LOCAL | o),
    "pfedme, warm": lambda **o: PFedMe(penalty=2.0, inner_steps=3, inner_lr=0.1, warm_start=True, **LOCAL | o),
}


MODEL = functools.partial(MLP, hidden=(5,))


def labelled() -> Dataset:
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = torch.as_tensor(draw.standard_normal((len(owners), 4))), torch.as_tensor(draw.integers(0, 3, len(owners)))
    return Dataset("labelled", x, y, classes=3, owners=torch.as_tensor(owners))


def simulation_of(model=MODEL, **options) -> Simulation:
    given = {"clients": len(SIZES), "seeds": (3, 5), "rounds": 3, "evaluation": EvaluationOptions(every=1)}
    options = given | {"execution": double()} | options
    return Simulation(options.pop("dataset", None) or labelled(), model, **options)


def watched(simulation: Simulation) -> Simulation:
    """The simulation, whose client memory can be read at `simulation.clients` while it is played or run."""
    initial = simulation.trainer.initial_memory

    def once(model):
        memory = initial(model)
        simulation.clients = memory.clients
        return memory

    simulation.trainer.initial_memory = once
    return simulation


module = MODEL((4,), 3).double()


SHAPES = {name: p.shape for name, p in module.named_parameters()}
