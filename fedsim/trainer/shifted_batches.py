"""What data answer to at a local step: what the server deployed, or the model at which the rule has the client be."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.func import vmap

from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, LocalRule
from fedsim.shift import Shift
from fedsim.shift.shift import LAG_ENTRIES


class ShiftedBatches:
    """The shift's `answers_to` under a rule that may deploy other models than the client's own.

    Args:
        rule, shift: of the run.
        rows: of a chunk (carry [c, …], θ [c, d]), or of one client.
    """

    def __init__(self, rule: LocalRule, shift: Shift, rows: bool) -> None:
        self.shift, self.explores = shift, type(rule).deploys is not LocalRule.deploys
        self._shift_rows: Any = vmap(shift) if rows else shift
        self._move_samples: Any = vmap(shift.move) if rows else shift.move
        self._deployed_model: Any = rule.deploys
        if rows and not rule.batched:
            self._deployed_model = vmap(rule.deploys)
        elif rule.batched and not rows:
            self._deployed_model = lambda carry: rule.deploys({name: value[None] for name, value in carry.items()})[0]

    def __call__(self, carry: Carry, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """The carry with what is remembered, and θ: as the server deployed it, or the client's own, by the rule."""
        if deployed is not None or not self.explores:
            return self.shift.answers_to(carry, deployed)
        new_carry, theta = self.shift.answers_to(carry | {"params": self._deployed_model(carry)}, None)
        return new_carry | {"params": carry["params"]}, theta

    def shifted(self, batch: Batch, carry: Carry, theta: Tensor) -> tuple[Batch, Tensor]:
        """The batch as it answers θ, and what was deployed last, [d] or [c, d]."""
        if self.shift.mixture is None:
            return self._shift_rows(batch, theta), theta
        mixing_state = {name: carry[name] for name in LAG_ENTRIES & carry.keys()}
        return self._move_samples(batch, mixing_state, theta), self.shift.newest_deployment(theta)
