"""Projection onto the feasible set Θ, a box or a ball."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedsim.core import checks
from fedsim.core.constraints import Positive, validate_arguments
from fedsim.core.errors import ConfigError


@validate_arguments
class Projection:
    """The nearest point of Θ = {lo ≤ θ_k ≤ hi for all k} or of Θ = {‖θ‖ ≤ r}; θ itself where neither is given.

    Args:
        box: [lo, hi], or None.
        ball: r, or None.
    """

    def __init__(self, box: Sequence[float] | None = None, ball: Positive | None = None) -> None:
        if box is not None and ball is not None:
            raise ConfigError(
                f"{{box}}={box} and {{ball}}={ball} exclude each other; set one to null",
                mentions=("box", "ball"),
            )
        if box is not None:
            if isinstance(box, str) or not isinstance(box, Sequence) or len(box) != 2:
                raise ConfigError(f"{{box}}={box!r} must be two numbers, such as [-1,1]", mentions=("box",))
            low, high = (checks.check_finite("box", edge) for edge in box)
            if low >= high:
                raise ConfigError(f"{{box}}={list(box)} is empty; give the lower edge first", mentions=("box",))
            box = (low, high)
        self.box = box
        self.ball = ball

    def __call__(self, params: Tensor) -> Tensor:
        """[..., d] → [..., d]."""
        if self.box is not None:
            return params.clamp(*self.box)
        if self.ball is not None:
            return params * (self.ball / params.norm(dim=-1, keepdim=True).clamp(min=self.ball))
        return params
