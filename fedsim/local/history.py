"""A client's last H deployed models with its estimates f̂ at them: df/dθ ≈ Δf (Δθ)† (profl §3, eq. 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.constraints import Count, Fraction, validate_arguments
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.placement import capacity_bytes
from fedsim.local.rule import Carry

MODELS, ESTIMATES, STEPS = "deployed_models", "estimates", "own_steps"


@validate_arguments
class DeploymentHistory:
    """Ring buffers in the client's memory, for c clients at once.

    Steps are counted per client: a client that was absent continues where it stopped, and its first H steps are without
    an estimate of df/dθ.

    Args:
        length: H.
        growing: estimate df/dθ as soon as the history holds as many models as they have parameters, as in the program
            of Izzo et al.; otherwise only when it holds H (profl Alg. 1).
        rcond: singular values of Δθ below this fraction of the largest are treated as zero in its pseudo-inverse, so
            that df/dθ is estimated along the directions in which the client's models changed, and is 0 along the
            others.
    """

    def __init__(self, length: Count = 10, rcond: Fraction = 1e-4, growing: bool = False) -> None:
        self.length, self.growing = length, growing
        self.rcond = rcond

    def memory(self, federation: Federation, dimension: int, model_entry_count: int) -> Carry:
        """Empty buffers [R·m, H, d] and [R·m, H, p], and the count of steps [R·m].

        Raises:
            ConfigError: no such place holds them.
        """
        needed_bytes = (
            federation.num_memory_rows * self.length * (dimension + model_entry_count) * federation.dtype.itemsize
        )
        if needed_bytes > capacity_bytes(federation.device, federation.storage):
            raise ConfigError(
                f"local.history={self.length} needs {needed_bytes / 2**30:,.0f} GiB for "
                f"{federation.num_memory_rows} clients' models, "
                f"more than there is (trainer.memory={federation.storage}); lower it, or clients"
            )
        return {
            MODELS: federation.zeros(self.length, dimension),
            ESTIMATES: federation.zeros(self.length, model_entry_count),
            STEPS: federation.zeros(dtype=torch.int64),
        }

    def is_full(self, carry: Carry) -> Tensor:
        """[c] has the client H earlier models to compare with?"""
        return carry[STEPS] >= self.length

    def exceeds_window(self, carry: Carry, extra_steps: int) -> Tensor:
        """[c] has the client made so many steps more than the window holds?"""
        return carry[STEPS] >= self.length + extra_steps

    def min_history_length(self, dimension: int) -> int:
        """How many earlier models a client needs for an estimate of df/dθ in d dimensions."""
        return min(dimension, self.length) if self.growing else self.length

    def can_estimate_derivative(self, carry: Carry) -> Tensor:
        """[c] can the client estimate df/dθ?"""
        return carry[STEPS] >= self.min_history_length(carry[MODELS].shape[2])

    def differences(self, carry: Carry, theta: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Δθ [c, H, d] and Δf [c, H, p]; rows of zeros, which no least squares notice, where nothing is stored yet."""
        models, estimates = carry[MODELS] - theta[:, None], carry[ESTIMATES] - f[:, None]
        if not self.growing:
            return models, estimates
        stored = torch.arange(self.length, device=theta.device) < carry[STEPS][:, None]
        return models * stored[:, :, None], estimates * stored[:, :, None]

    def last_estimate(self, carry: Carry) -> Tensor:
        """[c, p] the estimate of the client's last step; zero before its first."""
        slot = (carry[STEPS] - 1) % self.length
        return carry[ESTIMATES][torch.arange(len(slot), device=slot.device), slot]

    def record_deployment(self, carry: Carry, theta: Tensor, f: Tensor) -> Carry:
        """The carry after a step that deployed θ [c, d] and estimated f [c, p]: the oldest entries are replaced."""
        slot_mask = torch.arange(self.length, device=theta.device) == (carry[STEPS] % self.length)[:, None]
        return carry | {
            MODELS: torch.where(slot_mask[:, :, None], theta[:, None], carry[MODELS]),
            ESTIMATES: torch.where(slot_mask[:, :, None], f[:, None], carry[ESTIMATES]),
            STEPS: carry[STEPS] + 1,
        }

    def transposed_derivative_product(self, carry: Carry, theta: Tensor, f: Tensor, change_direction: Tensor) -> Tensor:
        """(df/dθ)ᵀ u [c, d] at θ [c, d], f [c, p], for u = `change_direction` [c, p]; zero where a client is not
        `can_estimate_derivative`.

        df/dθ [p, d] itself, which may be large, is never formed: (Δf Δθ†)ᵀ u = (Δθᵀ)† (Δfᵀ u).
        """
        models, estimates = self.differences(carry, theta, f)
        estimate_change = estimates @ change_direction[:, :, None]
        coefficients = (torch.linalg.pinv(models, rtol=self.rcond) @ estimate_change).squeeze(2)
        return torch.where(self.can_estimate_derivative(carry)[:, None], coefficients, 0.0)

    def derivative(self, carry: Carry, theta: Tensor, f: Tensor) -> Tensor:
        """df/dθ [c, p, d] at θ [c, d], f [c, p]; zero where a client is not
        `can_estimate_derivative`."""
        models, estimates = self.differences(carry, theta, f)
        slope = (torch.linalg.pinv(models, rtol=self.rcond) @ estimates).mT
        return torch.where(self.can_estimate_derivative(carry)[:, None, None], slope, 0.0)

    def recent_steps(self, carry: Carry) -> tuple[Tensor, Tensor]:
        """Models [c, H, d] and estimates [c, H, p] of each client's last H steps, the latest first."""
        steps_ago = torch.arange(1, self.length + 1, device=carry[STEPS].device)
        slot = ((carry[STEPS][:, None] - steps_ago) % self.length)[:, :, None]
        return tuple(values.gather(1, slot.expand_as(values)) for values in (carry[MODELS], carry[ESTIMATES]))  # type: ignore[return-value]

    def regression(self, models: Tensor, estimates: Tensor) -> Tensor:
        """df/dθ [c, p, d] by eq. 6 at the first of the models [c, H, d] with its estimates [c, H, p]."""
        model_changes, estimate_changes = (values[:, 1:] - values[:, :1] for values in (models, estimates))
        return (torch.linalg.pinv(model_changes, rtol=self.rcond) @ estimate_changes).mT
