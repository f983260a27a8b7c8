"""The model that data react to at a local step: the one that the server deployed, or the one that the rule deploys
at the client."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.func import vmap

from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, LocalRule
from fedsim.shift import Shift
from fedsim.shift.shift import LAG_ENTRIES


class ShiftedBatches:
    """The shift's `response_parameters` for a rule that may deploy other models than the client's own.

    Args:
        local_rule, shift: of the run.
        rows: of a chunk (carry [c, …], θ [c, d]), or of one client.
    """

    def __init__(self, local_rule: LocalRule, shift: Shift, rows: bool) -> None:
        self.shift, self.rule_deploys_own_model = shift, type(local_rule).deploys is not LocalRule.deploys
        self._shift_rows: Any = vmap(shift) if rows else shift
        self._shift_samples: Any = vmap(shift.shift_batch) if rows else shift.shift_batch
        self._deployed_model: Any = local_rule.deploys
        if rows and not local_rule.batched:
            self._deployed_model = vmap(local_rule.deploys)
        elif local_rule.batched and not rows:
            self._deployed_model = lambda carry: local_rule.deploys(
                {name: value[None] for name, value in carry.items()}
            )[0]

    def __call__(self, carry: Carry, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """Return the carry with its memory, and θ: the model that the server deployed, or the client's own,
        depending on the rule."""
        if deployed is not None or not self.rule_deploys_own_model:
            return self.shift.response_parameters(carry, deployed)
        new_carry, theta = self.shift.response_parameters(carry | {"params": self._deployed_model(carry)}, None)
        return new_carry | {"params": carry["params"]}, theta

    def shifted_batch(self, batch: Batch, carry: Carry, theta: Tensor) -> tuple[Batch, Tensor]:
        """Return the batch as it reacts to θ, and the model that was deployed last, [d] or [c, d]."""
        if self.shift.mixture is None:
            return self._shift_rows(batch, theta), theta
        mixing_state = {name: carry[name] for name in LAG_ENTRIES & carry.keys()}
        return self._shift_samples(batch, mixing_state, theta), self.shift.newest_deployment(theta)
