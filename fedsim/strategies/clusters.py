"""Clusters of clients with a server model each, as IFCA, CFL and FedDrift have them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.core import ties
from fedsim.core.federation import Federation


def first_lowest(losses: Tensor) -> Tensor:
    """[n, k] → [n] int64 the first of the lowest losses of each row; losses that differ by rounding are equal."""
    lowest_loss = losses.min(1, keepdim=True).values
    is_lowest = losses <= lowest_loss + ties.relative_tolerance(losses.dtype) * lowest_loss.abs()
    return is_lowest.to(torch.uint8).argmax(1)


def client_mean_cluster_model(model: Tensor, cluster_models: Tensor, choice: Tensor, federation: Federation) -> Tensor:
    """[R, d] the mean over all clients of the models [R, k, d] of their clusters [R·m], or of the global model [R, d]
    for those that have none (−1)."""
    has_chosen, k = (choice >= 0)[:, None], cluster_models.shape[1]
    membership = torch.where(has_chosen, one_hot(choice.clamp(min=0), k), 0).to(model.dtype)
    share = federation.sum_over_clients(membership, federation.weights("uniform"))  # [R, k]
    clustered_sum = (share[:, :, None] * cluster_models).sum(1)
    return clustered_sum + (1 - share.sum(1, keepdim=True)) * model


def largest_cluster_model(clusters: Tensor, members: Tensor) -> Tensor:
    """[R, d] the model of the cluster with most members, the first of several."""
    return clusters[torch.arange(len(clusters), device=clusters.device), members.argmax(1)]


def cluster_sizes(choice: Tensor, k: int, federation: Federation) -> Tensor:
    """[R, k] how many clients each of the k clusters has, of the clusters of clients [R·m], −1 for none."""
    membership = one_hot(choice.clamp(min=0), k) * (choice >= 0)[:, None]
    ones = torch.ones(len(choice), dtype=federation.dtype, device=choice.device)
    return federation.sum_over_clients(membership, ones).round().to(torch.int64)
