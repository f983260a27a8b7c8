"""pFedMe: personal models near the global one, which minimises the Moreau envelopes of the clients' losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.constraints import Count, Positive
from fedsim.data.samples import Batch
from fedsim.local.perfedavg import split_into_batches
from fedsim.local.rule import Carry, Objective
from fedsim.local.sgd import SGD


class PFedMe(SGD):
    """θ ≈ argmin f(θ) + λ/2 ‖θ − w‖² by K gradient steps, then w ← w − η λ (w − θ) (Dinh et al. 2020, Alg. 1).

    All K steps use the batch of the local step, or each a new one. θ is the personal model; it starts as the initial
    model. The paper's server mixing x ← (1 − β) x + β mean w_i is strategy=fedavg strategy.server_lr=β. Memory: one
    model per client.

    Args:
        penalty: λ.
        inner_steps: K.
        inner_lr: learning rate of the K steps, without a schedule; below 2 / (L + λ) for a loss of smoothness L.
        fresh_batches: a local step draws K batches, one for each of the K steps, as in the program of APFL's authors.
            If a client has fewer samples than that, the K steps get equal parts of its data.
        warm_start: the K steps start from the client's last θ, as in the authors' program; otherwise from w.
        **options: of SGD; clip and the strategy's correction act on λ (w − θ), the gradient of the envelope.
    """

    own_models = ("personal",)

    def __init__(
        self,
        penalty: Positive = 15.0,
        inner_steps: Count = 5,
        inner_lr: Positive = 0.005,
        warm_start: bool = False,
        fresh_batches: bool = False,
        batch_size: Count | None = 32,
        **options: Any,
    ) -> None:
        batches_per_step = inner_steps if fresh_batches else 1
        super().__init__(batch_size=None if batch_size is None else batches_per_step * batch_size, **options)
        self.penalty = penalty
        self.inner_steps, self.batches_per_step = inner_steps, batches_per_step
        self.inner_lr = inner_lr
        self.warm_start = warm_start

    def personal(self, carry: Carry) -> list[tuple[Tensor, Tensor]]:
        theta = carry["personal"]
        return [(theta.new_ones(()), theta)]

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        w = carry["params"]
        theta, losses = carry["personal"] if self.warm_start else w, []
        batches = split_into_batches(batch, self.batches_per_step)
        for k in range(self.inner_steps):
            gradient, loss = objective.gradient(theta, batches[k % self.batches_per_step])
            theta = theta - self.inner_lr * (gradient + self.penalty * (theta - w))
            losses.append(loss)
        return self.updated(carry, self.penalty * (w - theta), lr) | {"personal": theta}, losses[0]
