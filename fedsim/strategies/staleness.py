"""Weights of delayed updates as a function of their staleness."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedsim.core.constraints import OneOf
from fedsim.core.effects import EffectDeclarations, EffectiveIf

DISCOUNTS = ("constant", "polynomial", "hinge")
DiscountKind = Annotated[str, OneOf(*DISCOUNTS)]


LATE_ROWS_CONDITION = (
    lambda component, run: run.has_delayed_updates,
    "rows that arrive late: a delay, clock=events, or clock.late=deliver",
)
# When the parameters of a strategy with a `discount` have an effect.
DISCOUNT_EFFECTIVE_IF: EffectDeclarations = (
    EffectiveIf("discount", *LATE_ROWS_CONDITION, attribute="discount.kind"),
    EffectiveIf(
        "a",
        lambda component, run: component.discount.kind != "constant",
        "{at}.discount=polynomial or hinge",
        attribute="discount.a",
    ),
    EffectiveIf("a", *LATE_ROWS_CONDITION, attribute="discount.a"),
    EffectiveIf(
        "b", lambda component, run: component.discount.kind == "hinge", "{at}.discount=hinge", attribute="discount.b"
    ),
    EffectiveIf("b", *LATE_ROWS_CONDITION, attribute="discount.b"),
)


class Discount:
    """σ(d) of Xie et al. (2019), d the number of rounds between the start and the arrival of an update: constant 1;
    polynomial (1 + d)^{−a}; hinge 1 up to b rounds, then 1 / (a (d − b) + 1).

    Args:
        kind: constant, polynomial or hinge.
        a, b: parameters of the weight.
    """

    def __init__(self, kind: str, a: float, b: float) -> None:
        self.kind = kind
        self.a, self.b = a, b

    def __call__(self, staleness: np.ndarray) -> np.ndarray:
        """[n] σ of rounds [n]."""
        d = staleness.astype(np.float64)
        if self.kind == "constant":
            return np.ones_like(d)
        if self.kind == "polynomial":
            return np.asarray((1.0 + d) ** -self.a)
        return np.asarray(1.0 / (self.a * np.maximum(d - self.b, 0.0) + 1.0))
