"""Estimators of the statistic f of a client's distribution p(z; f) that reacts to the model, and the score ∂log p/∂f
(profl §3 and §5).

Everything is for a chunk of c clients on weights: batch [c, B, …], weight [c, B] (0 for samples that do not count). The
score always appears in the mean Σ_j w_j ℓ_j ∂log p(z_j; f̂)/∂f / Σ_j w_j, so only that is computed: [c, p].

Fisher scores sum to zero at the estimate where f̂ maximises the likelihood of the same samples, so a constant added to
the loss changes nothing; the price is a factor 1 − O(p/n) on the term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch


class DistributionEstimator(ABC):
    """Attributes:

    size: p, components of f.
    """

    size: int

    @abstractmethod
    def estimate_statistic(self, batch: Batch, weight: Tensor, previous_estimate: Tensor) -> Tensor:
        """f̂ [c, p] of the samples; `previous_estimate` [c, p] is the client's previous estimate, for components unseen
        today."""

    @abstractmethod
    def score_function_gradient(self, batch: Batch, weight: Tensor, f: Tensor, losses: Tensor) -> Tensor:
        """Mean of ℓ_j ∂log p(z_j; f)/∂f over the samples, [c, p]; losses [c, B]."""

    @abstractmethod
    def variance(self, batch: Batch, weight: Tensor, f: Tensor) -> Tensor:
        """[c] σ²: n times the total variance of f̂ from n samples, over the components of f."""

    def shift_batch(self, batch: Batch, estimate_change: Tensor) -> Batch:
        """One client's batch [B, …] after f has changed by `estimate_change` [p], differentiable in it: where f is a
        location.

        Raises:
            ConfigError: f is none.
        """
        raise ConfigError(
            f"{type(self).__name__} needs a shift that moves the means of the data; use another shift, or local=profl"
        )


class NoEstimator(DistributionEstimator):
    """p = 0: the data do not react."""

    size = 0

    def estimate_statistic(self, batch: Batch, weight: Tensor, previous_estimate: Tensor) -> Tensor:
        return previous_estimate

    def score_function_gradient(self, batch: Batch, weight: Tensor, f: Tensor, losses: Tensor) -> Tensor:
        return f

    def variance(self, batch: Batch, weight: Tensor, f: Tensor) -> Tensor:
        return torch.zeros_like(f[:, :0].sum(1))

    def shift_batch(self, batch: Batch, estimate_change: Tensor) -> Batch:
        return batch


class MeanEstimator(DistributionEstimator):
    """z ~ N(f, σ²) independently per component, within each of K groups: f̂ = the groups' means, score (z − f̂)/σ².

    σ² is taken as known in the paper. Where it is not given, it is the variance of the group's samples about f̂;
    components that do not vary have no score. A group without samples keeps its last estimate, zero before its first.

    Args:
        entry_name: which entry of the batch is z: 'x' or 'y', flattened per sample.
        num_numbers: components of one flattened z.
        features: which of them f follows; None follows all.
        groups: K; group of a sample: its label y. 1 puts all samples together.
        known_variance: σ², or None.
    """

    def __init__(
        self,
        entry_name: str,
        num_numbers: int,
        features: Tensor | None = None,
        groups: int = 1,
        known_variance: float | None = None,
    ) -> None:
        self.entry, self.features, self.groups, self.known_variance = entry_name, features, groups, known_variance
        self.width = num_numbers if features is None else len(features)
        self.size = groups * self.width

    def estimate_statistic(self, batch: Batch, weight: Tensor, previous_estimate: Tensor) -> Tensor:
        z, member = self._grouped_samples(batch, weight)
        count = member.sum(1)[:, :, None]
        means = (member.mT @ z) / count.clamp(min=torch.finfo(z.dtype).tiny)
        return torch.where(count > 0, means, previous_estimate.reshape(means.shape)).flatten(1)

    def score_function_gradient(self, batch: Batch, weight: Tensor, f: Tensor, losses: Tensor) -> Tensor:
        z, member = self._grouped_samples(batch, weight)
        residual = z - self._group_mean_per_sample(member, f)
        moment = member.mT @ (losses[:, :, None] * residual) / nonzero_weight_sum(weight)[:, :, None]
        spread = self._group_variance(z, residual, member)
        return torch.where(spread > 0, moment / torch.where(spread > 0, spread, 1.0), 0.0).flatten(1)

    def variance(self, batch: Batch, weight: Tensor, f: Tensor) -> Tensor:
        z, member = self._grouped_samples(batch, weight)
        share = member.sum(1)[:, :, None] / nonzero_weight_sum(weight)[:, :, None]
        spread = self._group_variance(z, z - self._group_mean_per_sample(member, f), member)
        return torch.where(share > 0, spread / torch.where(share > 0, share, 1.0), 0.0).sum((1, 2))

    def shift_batch(self, batch: Batch, estimate_change: Tensor) -> Batch:
        z, estimate_change = batch[self.entry], estimate_change.reshape(self.groups, self.width)
        of_sample = estimate_change[batch["y"]] if self.groups > 1 else estimate_change.expand(len(z), -1)
        if self.features is not None:
            no_change = of_sample.new_zeros(len(z), z[0].numel())
            of_sample = no_change.index_copy(1, self.features, of_sample)
        return batch | {self.entry: z + of_sample.reshape(z.shape)}

    def _grouped_samples(self, batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor]:
        """z [c, B, width], and each sample's weight in each group [c, B, K]."""
        z = batch[self.entry].reshape(*weight.shape, -1).to(weight.dtype)
        z = z if self.features is None else z[:, :, self.features]
        if self.groups == 1:
            return z, weight[:, :, None]
        return z, torch.nn.functional.one_hot(batch["y"], self.groups) * weight[:, :, None]

    def _group_mean_per_sample(self, member: Tensor, f: Tensor) -> Tensor:
        """[c, B, width] the mean of each sample's group."""
        return (member > 0).to(f.dtype) @ f.reshape(len(f), self.groups, self.width)

    def _group_variance(self, z: Tensor, residual: Tensor, member: Tensor) -> Tensor:
        """[c, K, width] σ² of each group; zero where it is no more than rounding."""
        count = member.sum(1)[:, :, None].clamp(min=torch.finfo(z.dtype).tiny)
        if self.known_variance is not None:
            return torch.full_like(member.mT @ z, self.known_variance)
        variance, size = (member.mT @ values.square() / count for values in (residual, z))
        rounding = torch.finfo(z.dtype).eps * (count + 16)  # of a mean of this many numbers
        return torch.where(variance > rounding.square() * size, variance, 0.0)


class LeastSquaresEstimator(DistributionEstimator):
    """y ~ N(fᵀx, σ²) given x (house prices): f̂ = least squares, score x (y − f̂ᵀx)/σ².

    With y = (a_i − γ_i θ)ᵀx + n the law of x does not move, so f(θ) = a_i − γ_i θ is what reacts, and
    log p(z; f) = −(y − fᵀx)²/2σ² + terms without f. Where σ² is not given, it is the residuals' variance.

    Args:
        numbers: components of one flattened x.
        known_variance: σ², or None.
    """

    def __init__(self, numbers: int, known_variance: float | None = None) -> None:
        self.size, self.known_variance = numbers, known_variance

    def estimate_statistic(self, batch: Batch, weight: Tensor, previous_estimate: Tensor) -> Tensor:
        x, y = self._features_and_targets(batch, weight)
        gram, right = x.mT @ (weight[:, :, None] * x), x.mT @ (weight * y)[:, :, None]
        return (torch.linalg.pinv(gram, hermitian=True) @ right).squeeze(2)

    def score_function_gradient(self, batch: Batch, weight: Tensor, f: Tensor, losses: Tensor) -> Tensor:
        x, y = self._features_and_targets(batch, weight)
        residual = y - (x @ f[:, :, None]).squeeze(2)
        spread = self._group_variance(residual, weight)
        moment = (x.mT @ (weight * losses * residual)[:, :, None]).squeeze(2) / nonzero_weight_sum(weight)
        return torch.where(spread > 0, moment / torch.where(spread > 0, spread, 1.0), 0.0)

    def variance(self, batch: Batch, weight: Tensor, f: Tensor) -> Tensor:
        x, y = self._features_and_targets(batch, weight)
        gram = x.mT @ (weight[:, :, None] * x) / nonzero_weight_sum(weight)[:, :, None]
        spread = self._group_variance(y - (x @ f[:, :, None]).squeeze(2), weight)
        return spread[:, 0] * torch.linalg.pinv(gram, hermitian=True).diagonal(dim1=1, dim2=2).sum(1)

    def shift_batch(self, batch: Batch, estimate_change: Tensor) -> Batch:
        y = batch["y"]
        return batch | {"y": y + (batch["x"].flatten(1) @ estimate_change).reshape(y.shape)}

    def _features_and_targets(self, batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x [c, B, p] and y [c, B]."""
        return batch["x"].reshape(*weight.shape, -1), batch["y"].reshape(weight.shape).to(weight.dtype)

    def _group_variance(self, residual: Tensor, weight: Tensor) -> Tensor:
        """[c, 1] σ²."""
        if self.known_variance is not None:
            return torch.full_like(residual[:, :1], self.known_variance)
        return (weight * residual.square()).sum(1, keepdim=True) / nonzero_weight_sum(weight)


class FractionEstimator(DistributionEstimator):
    """z ~ Σ_k f_k D_k with fixed D_k and known group of every sample: f̂ = the groups' shares, score 1{group = k}/f̂_k.

    The shares sum to one, and so their changes to zero: what the scores have in common drops out of the gradient.

    Args:
        groups: K.
        entry: which entry of the batch is the group, int64 [c, B].
    """

    def __init__(self, groups: int, entry: str = "group") -> None:
        self.size, self.entry = groups, entry

    def estimate_statistic(self, batch: Batch, weight: Tensor, previous_estimate: Tensor) -> Tensor:
        return self._group_sample_weights(batch, weight).sum(1) / nonzero_weight_sum(weight)

    def score_function_gradient(self, batch: Batch, weight: Tensor, f: Tensor, losses: Tensor) -> Tensor:
        moment = (self._group_sample_weights(batch, weight) * losses[:, :, None]).sum(1) / nonzero_weight_sum(weight)
        return torch.where(f > 0, moment / torch.where(f > 0, f, 1.0), 0.0)

    def variance(self, batch: Batch, weight: Tensor, f: Tensor) -> Tensor:
        return (f * (1 - f)).sum(1)

    def _group_sample_weights(self, batch: Batch, weight: Tensor) -> Tensor:
        """[c, B, K] the weight of each sample in its group."""
        return torch.nn.functional.one_hot(batch[self.entry], self.size) * weight[:, :, None]


def nonzero_weight_sum(weight: Tensor) -> Tensor:
    """[c, 1] the sum of the weights, 1 where there are none."""
    total = weight.sum(1, keepdim=True)
    return torch.where(total > 0, total, 1.0)
