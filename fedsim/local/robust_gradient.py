"""Robust Gradient: throws out the samples whose gradients pull the mean along one direction (profl Alg. 3)."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import IntegerAtLeast, PositiveFraction, validate_arguments

MAX_DIAGONALISED_SIDE = (
    256  # up to this many samples or parameters the Gram matrix is diagonalised; above, power iteration
)

POWER_ITERATION_TOLERANCE = 1e-6  # power iteration ends when no unit vector moves farther than this …
ITERATIONS_PER_BLOCK, MAX_BLOCKS = 10, 30  # … in a block of 10 iterations, or after 30 blocks


@validate_arguments
class GradientOutlierFilter:
    """The outlier filter, for c clients at once on masks: a client that is done stays as it is.

    A sweep centres the gradients, scores them by τ_j = ⟨g_j − ḡ, v⟩² along the top right singular vector v (eq. 9),
    counts the scores in B equal bins on [0, max τ], and keeps the samples below φ, the lower edge of the first bin that
    holds less than C·|S| of them. A client is done when its mean gradient moved by less than J of its norm, when at
    most half of its samples are left, or when a sweep removed nothing.

    The paper prints none of the three constants. With these, 500 gradients N(μ, I) lose 1 % of the clean ones and all
    outliers that lie 15 standard deviations away, up to a fifth of the samples; at 12, a fifth is often missed. A
    larger C finds nearer ones and cuts deeper into clean tails, which matters where these are long (see `ProFL`).

    Where the first bins are sparse already (many outliers, close together: nobody is near the mean), the paper's φ
    would be 0 and nothing kept; the search for φ starts at the first bin that holds C·|S| samples instead.

    Args:
        bins: B.
        sparse: C, share of the samples below which a bin counts as the tail.
        settled: J, relative change of the mean gradient below which the filter stops.
    """

    def __init__(
        self,
        bins: Annotated[int, IntegerAtLeast(2)] = 10,
        sparse: PositiveFraction = 0.0025,
        settled: PositiveFraction = 0.1,
    ) -> None:
        self.bins = bins
        self.sparse = sparse
        self.settled = settled

    def __call__(self, gradients: Tensor, mask: Tensor) -> Tensor:
        """Which samples to keep: gradients [c, B, d], mask [c, B] of the real ones → kept [c, B] bool.

        How many sweeps there are depends on the data, so every sweep ends in one transfer of a boolean to the host.
        """
        kept_mask, half_count = mask.bool(), mask.sum(1) / 2
        is_finished = half_count < 1
        while not bool(is_finished.all()):
            centred, mean = centre_gradients(gradients, kept_mask)
            remaining_mask = kept_mask & self._below_tail(gradient_outlier_scores(centred), kept_mask)
            mean_settled = (mean - centre_gradients(gradients, remaining_mask)[1]).norm(
                dim=1
            ) < self.settled * mean.norm(dim=1)
            mask_is_unchanged = (remaining_mask == kept_mask).all(1)
            kept_mask = torch.where(is_finished[:, None], kept_mask, remaining_mask)
            is_finished = is_finished | mean_settled | mask_is_unchanged | (kept_mask.sum(1) <= half_count)
        return kept_mask

    def _below_tail(self, tau: Tensor, included_mask: Tensor) -> Tensor:
        """[c, B] is τ_j below φ?"""
        max_score = tau.amax(1, keepdim=True)
        share = (tau / torch.where(max_score > 0, max_score, 1.0)).nan_to_num(
            nan=0.0
        )  # the NaN of a diverged client has no bin
        bin_index = (share * self.bins).to(torch.int64).clamp(0, self.bins - 1)
        counts = torch.zeros(len(tau), self.bins, dtype=tau.dtype, device=tau.device)
        counts.scatter_add_(1, bin_index, included_mask.to(tau.dtype))
        dense = counts >= self.sparse * included_mask.sum(1, keepdim=True)
        tail_mask = ~dense & (dense.cumsum(1) > 0)
        first_tail_bin = torch.where(tail_mask.any(1), tail_mask.to(torch.int64).argmax(1), self.bins)
        return bin_index < first_tail_bin[:, None]


def centre_gradients(gradients: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients [c, B, d] minus their mean over the mask [c, B], zero outside it; and that mean [c, d]."""
    weight = mask.to(gradients.dtype)
    mean = torch.einsum("cb,cbd->cd", weight, gradients) / weight.sum(1, keepdim=True).clamp(min=1)
    return (gradients - mean[:, None]) * weight[:, :, None], mean


def gradient_outlier_scores(centred_gradients: Tensor) -> Tensor:
    """τ [c, B]: squared projections of the rows of each matrix [c, B, d] on its top right singular vector.

    No singular value decomposition of the matrix itself: with v the top eigenvector of the smaller Gram matrix,
    τ = (X v)² where that is XᵀX, and τ = λ u² where it is XXᵀ = … λ u uᵀ ….
    """
    _, samples, dimension = centred_gradients.shape
    if min(samples, dimension) > MAX_DIAGONALISED_SIDE:
        return (centred_gradients @ _top_singular_vectors(centred_gradients)[:, :, None]).squeeze(2).square()
    if dimension <= samples:
        _, vectors = torch.linalg.eigh(centred_gradients.mT @ centred_gradients)
        return (centred_gradients @ vectors[:, :, -1:]).squeeze(2).square()
    values, vectors = torch.linalg.eigh(centred_gradients @ centred_gradients.mT)
    return values[:, -1:].clamp(min=0) * vectors[:, :, -1].square()


def _top_singular_vectors(centred_gradients: Tensor) -> Tensor:
    """[c, d] top right singular vectors, from the row of largest norm (deterministic); zero for a zero matrix."""
    longest_row = centred_gradients.square().sum(2).argmax(1)
    v = centred_gradients[torch.arange(len(centred_gradients), device=centred_gradients.device), longest_row]
    v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    for _ in range(MAX_BLOCKS):
        previous_vector = v
        for _ in range(ITERATIONS_PER_BLOCK):
            v = (centred_gradients.mT @ (centred_gradients @ v[:, :, None])).squeeze(2)
            v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
        if bool(((v - previous_vector).norm(dim=1) < POWER_ITERATION_TOLERANCE).all()):
            break
    return v
