"""The plain loop: one module, one client after another, in-place SGD; what one writes without a simulator."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
import workload as w

asked = w.options()
clock = w.Clock(asked)
torch.manual_seed(0)
draw = np.random.default_rng(1)
x, y = map(torch.from_numpy, w.data(asked.workload))
model = w.torch_model(asked.workload).train()
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=w.LR)
start, steps = w.torch_vector(model), 0
for _ in range(clock.total):
    server = [p.detach().clone() for p in parameters]
    mean = [torch.zeros_like(p) for p in server]
    for client in draw.choice(w.CLIENTS, w.ACTIVE, replace=False):
        with torch.no_grad():
            for p, value in zip(parameters, server, strict=True):
                p.copy_(value)
        for batch in torch.randperm(w.SAMPLES).split(w.BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[client, batch]), y[client, batch]).backward()
            optimizer.step()
            steps += 1
        with torch.no_grad():
            for total, p in zip(mean, parameters, strict=True):
                total.add_(p, alpha=1 / w.ACTIVE)
    with torch.no_grad():
        for p, value in zip(parameters, mean, strict=True):
            p.copy_(value)
    clock.tick()
w.report(clock, start, w.torch_vector(model), steps, "one module, torch.optim.SGD", torch.get_num_threads(), ["torch"])
