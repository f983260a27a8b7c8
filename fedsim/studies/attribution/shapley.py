"""The Shapley value: a fair division of a difference among the causes that produce it together.

The share of a cause is its effect, averaged over all orders in which the causes can be removed. Shares add up to the
whole difference, a cause without effect has share 0, and where effects add up each cause has its own effect
(Shapley, 1953).
"""

from __future__ import annotations

import math

import numpy as np


def shapley_values(coalition_values: np.ndarray) -> np.ndarray:
    """Return the causes' shares of the difference between the run with all causes and the run without them.

    Args:
        coalition_values: [2^k, R], the performance of each replicate when the causes of a subset are removed. The
            subset is the binary number of its index: cause i is removed where bit i is 1.

    Returns:
        [k, R], by how much removing each cause raises the value, averaged over all orders.
    """
    num_causes = int(math.log2(len(coalition_values)))
    if 2**num_causes != len(coalition_values):
        raise ValueError(f"{len(coalition_values)} values are not those of all subsets of some causes")
    subsets = np.arange(len(coalition_values))
    sizes = np.array([int(subset).bit_count() for subset in subsets])
    cause_shares = np.zeros((num_causes, *coalition_values.shape[1:]))
    for cause in range(num_causes):
        subsets_without = subsets[(subsets >> cause) & 1 == 0]
        orders = [math.factorial(size) * math.factorial(num_causes - size - 1) for size in sizes[subsets_without]]
        weights = np.array(orders) / math.factorial(num_causes)
        cause_shares[cause] = np.tensordot(
            weights, coalition_values[subsets_without + 2**cause] - coalition_values[subsets_without], axes=1
        )
    return cause_shares
