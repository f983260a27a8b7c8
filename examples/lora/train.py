"""LoRA adapters of a small GPT-2, trained by FedAvg on a text of your own: `python train.py FILE`."""

from __future__ import annotations

import functools
import sys

from adapters import gpt2

from fedsim import EvaluationOptions, Simulation
from fedsim.data.datasets import Text
from fedsim.local import Adam

simulation = Simulation(
    Text(sys.argv[1], length=16, clients=4),
    functools.partial(gpt2, rank=8),
    output="logits",
    clients=4,
    local=Adam(lr=0.02, steps=20, batch_size=8),
    rounds=5,
    evaluation=EvaluationOptions(every=5),
)
frozen = sum(p.numel() for p in simulation.model.training_module.parameters() if not p.requires_grad)
print(f"{frozen:,} parameters are frozen, {simulation.model.dimension:,} are of adapters")
last = simulation.run().history[-1]
print(f"accuracy {last['test_accuracy']:.1%}; the last round sent {last['bytes_up']:,} bytes to the server")
