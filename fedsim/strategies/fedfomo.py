"""FedFomo: each client moves towards the models that lower the loss on its validation samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.strategies.strategy import ClientModels, KeepsClientModels


@dataclass
class FedFomoState(ClientModels):
    """Adds affinity [R·m, m], the sum of the weights w_ij that client i gave to client j's models."""

    affinity: Tensor


class FedFomo(KeepsClientModels[FedFomoState]):
    """x_i ← x_i + Σ_j w̄_ij (y_j − x_i), where y_j are models after the local steps of the round, client i's own and up
    to M others, w_ij = (L_i(x_i) − L_i(y_j)) / ‖y_j − x_i‖ with the loss L_i on the client's validation samples, and
    w̄_ij = max(w_ij, 0) / Σ_k max(w_ik, 0) (Zhang et al., ICLR 2021). If no model lowers the loss, x_i does
    not change.

    The M others are those of the round with the largest sum of w_ij so far (ties at random), or random ones with
    probability max(ε − κ t, 0). As in the authors' program (federation.py, baseline first_model), x_i is the model
    before the local steps. A client without validation samples keeps y_i. Requires partition.validation. The state's
    model is the plain mean of all clients' models. A client evaluates M + 2 models in a round. Memory: one model and m
    numbers per client, which the server knows.

    Args:
        downloads: M.
        exploration: ε.
        exploration_decay: κ, per round.
    """

    effective_if = (
        *(
            EffectiveIf(
                name,
                lambda component, run: component.downloads < run.federation.clients - 1,
                "{at}.downloads below the number of other clients",
            )
            for name in ("exploration", "exploration_decay")
        ),
        EffectiveIf("exploration_decay", lambda component, run: component.exploration > 0, "{at}.exploration above 0"),
    )

    needs_validation_losses = True
    side_information = "the sums of a client's weights of others' models go up as they are"

    def __init__(
        self, downloads: Count = 5, exploration: Fraction = 0.3, exploration_decay: NonNegative = 0.05
    ) -> None:
        self.downloads = downloads
        self.exploration, self.exploration_decay = exploration, exploration_decay
        self.vectors_down = downloads

    def initial(self, model: Tensor, federation: Federation) -> FedFomoState:
        return FedFomoState.broadcast(model, federation, affinity=federation.zeros(federation.clients))

    def aggregate(self, state: FedFomoState, report: Report, t: int) -> FedFomoState:
        cohort, start_rows = report.cohort, report.start
        assert cohort.federation.validation_oracle is not None
        losses_of = cohort.federation.validation_oracle
        sent, senders = (
            cohort.split_by_replicate(start_rows - report.innovation),
            cohort.split_by_replicate(cohort.client_index),
        )
        affinity_rows, initial_loss = cohort.gather(state.affinity), losses_of(cohort, start_rows)
        chosen_senders = self.select_model_senders(cohort, affinity_rows, senders, t)  # [n, M'], −1 for none
        weighted_moves, total_weight = torch.zeros_like(start_rows), torch.zeros_like(initial_loss)
        for j in [None, *range(chosen_senders.shape[1])]:
            model = report.end if j is None else _chosen_models(cohort, sent, senders, chosen_senders[:, j], start_rows)
            distance = (model - start_rows).norm(dim=1).clamp(min=torch.finfo(start_rows.dtype).tiny)
            weight = ((initial_loss - losses_of(cohort, model)) / distance).nan_to_num(0.0, 0.0, 0.0)
            if j is not None:
                affinity_rows.scatter_add_(1, chosen_senders[:, j : j + 1].clamp(min=0), weight[:, None])
            weighted_moves += weight.clamp(min=0)[:, None] * (model - start_rows)
            total_weight += weight.clamp(min=0)
        mixed = start_rows + weighted_moves / torch.where(total_weight > 0, total_weight, 1.0)[:, None]
        cohort.scatter(state.models, torch.where(initial_loss.isnan()[:, None], report.end, mixed))
        cohort.scatter(state.affinity, affinity_rows)
        return FedFomoState(cohort.federation.mean_over_clients(state.models), state.models, state.affinity)

    def select_model_senders(
        self, cohort: Cohort, affinity_rows: Tensor, senders_by_replicate: list[Tensor], t: int
    ) -> Tensor:
        """[n, M'] the clients whose models each client of the cohort receives, −1 where there are no more."""
        m = cohort.federation.clients
        random_keys = rng.row_keys(cohort.seed, rng.Purpose.STRATEGY, cohort.client_index, t)
        random = rng.uniform(random_keys[:, None], torch.arange(m + 1, device=random_keys.device), affinity_rows.dtype)
        explores_mask = random[:, m:] < max(self.exploration - self.exploration_decay * t, 0.0)
        available_mask = torch.zeros_like(affinity_rows, dtype=torch.bool)
        for present_senders, (first, last) in zip(
            senders_by_replicate, itertools.pairwise(cohort.replicate_bounds), strict=True
        ):
            available_mask[first:last, present_senders] = True
        available_mask[torch.arange(len(cohort), device=random_keys.device), cohort.client_index] = False
        shuffled = random[:, :m].argsort(1)
        score = torch.where(available_mask, torch.where(explores_mask, 0.0, affinity_rows), -torch.inf).gather(
            1, shuffled
        )
        ranked = shuffled.gather(1, score.argsort(dim=1, descending=True, stable=True))
        num_received = min(
            self.downloads, max(0, *(len(present_senders) - 1 for present_senders in senders_by_replicate))
        )
        return torch.where(available_mask.gather(1, ranked), ranked, -1)[:, :num_received]


def _chosen_models(cohort: Cohort, sent: list[Tensor], senders: list[Tensor], chosen: Tensor, start: Tensor) -> Tensor:
    """[n, d] the model that the chosen client [n] of each row's replicate sent; for −1 the row's own start."""
    models = start.clone()
    for rows, present, (first, last) in zip(sent, senders, itertools.pairwise(cohort.replicate_bounds), strict=True):
        picked = chosen[first:last]
        if len(present):
            position = torch.searchsorted(present, picked.clamp(min=0))
            models[first:last] = torch.where((picked >= 0)[:, None], rows[position], models[first:last])
    return models
