"""One bare vmap: 50 clients through `vmap(grad)`, batches ready in memory; no sampling, no bookkeeping."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import workload as w
from torch import Tensor
from torch.func import functional_call, grad, vmap

asked = w.options()
clock = w.Clock(asked)
torch.manual_seed(0)
x, y = map(torch.from_numpy, w.data(asked.workload))
model = w.torch_model(asked.workload).train()
server = {name: p.detach().clone() for name, p in model.named_parameters()}


def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (x,)), y)


gradients = vmap(grad(loss), randomness="different")
start, steps = w.torch_vector(model), 0
batches = [
    (x[: w.ACTIVE, k : k + w.BATCH].contiguous(), y[: w.ACTIVE, k : k + w.BATCH].contiguous())
    for k in range(0, w.SAMPLES, w.BATCH)
]
for _ in range(clock.total):
    rows = {name: p.expand(w.ACTIVE, *p.shape) for name, p in server.items()}
    for batch in batches:
        step = gradients(rows, *batch)
        rows = {name: torch.sub(row, step[name], alpha=w.LR) for name, row in rows.items()}
        steps += w.ACTIVE
    server = {name: row.mean(0) for name, row in rows.items()}
    clock.tick()
end = torch.cat([p.ravel() for p in server.values()]).numpy()
w.report(clock, start, end, steps, "vmap(grad) over 50 rows, no sampling", torch.get_num_threads(), ["torch"])
