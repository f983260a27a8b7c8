"""FedPAC: clients share their features' layers, and each receives its own combination of the last layers."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from fedsim.core.column_names import ColumnsByName
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.local import FedPAC as FedPACSteps
from fedsim.local import LocalRule
from fedsim.local.fedpac import SQUARED_NORMS
from fedsim.local.fedproto import CLASS_COUNTS, CLASS_SUMS
from fedsim.strategies.strategy import ClientModels, KeepsClientModels

SMALLEST_VARIANCE = 1e-9  # relative to the mean of V


class FedPAC(KeepsClientModels[ClientModels]):
    """All layers but the last are averaged, x ← mean_{i∈A} x_i; the last layer of client i ∈ A becomes Σ_{j∈A} α_ij
    times client j's, with α_i = argmin over the simplex of ‖h_i − Σ_j α_j h_j‖² + Σ_j α_j² V_j (Xu, Tong and Huang,
    ICLR 2023). Requires local=fedpac.

    h_j [C, k] is the mean of the client's features of each class, times the class's fraction, and V_j = (mean ‖z‖² −
    ‖h_j‖²) / n_j, of n_j samples; both of the features that the client computed in its local steps, where the authors'
    program computes them before. The quadratic programme is solved exactly, as a non-negative least squares problem.
    Absent clients keep their last layers. The global model has the mean of the last layers. Memory: one model per
    client, which the server knows. The host waits in each round.

    Args:
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    def __init__(self, weighting: Weighting = "uniform") -> None:
        self.weighting = weighting

    def check_local(self, local_rule: LocalRule) -> None:
        if not isinstance(local_rule, FedPACSteps):
            raise ConfigError(
                "strategy=fedpac combines last layers by statistics of features that clients compute; use local=fedpac"
            )

    def check_columns(self, columns: ColumnsByName) -> None:
        if any(entry.columns is None for entry in columns.values()):
            raise ConfigError(
                "strategy=fedpac combines last layers on the server, which must receive them; use columns=all"
            )

    def initial(self, model: Tensor, federation: Federation) -> ClientModels:
        return ClientModels.broadcast(model, federation)

    def aggregate(self, state: ClientModels, report: Report, t: int) -> ClientModels:
        cohort, end_rows = report.cohort, report.start - report.innovation
        model = cohort.where_nonempty(self.mean(cohort, end_rows), state.model)
        head = head_columns(report.columns)
        client_models = state.models.unflatten(0, (len(model), -1))
        client_models[..., : head.start] = model[:, None, : head.start].to(client_models.device)
        combined = model[cohort.replicate_index]
        combined[:, head] = self.combine_client_heads(cohort, report, end_rows[:, head])
        cohort.scatter(state.models, combined)
        return ClientModels(model, state.models)

    def combine_client_heads(self, cohort: Cohort, report: Report, heads: Tensor) -> Tensor:
        """[n, d_h] each client's combination of the last layers [n, d_h]."""
        counts = report.client_memory(CLASS_COUNTS).sum(1).clamp(min=1)
        means = report.client_memory(CLASS_SUMS).flatten(1) / counts[:, None]
        sizes = torch.as_tensor(cohort.federation.num_samples[cohort.host_index.virtual_clients]).to(counts)
        spread = report.client_memory(SQUARED_NORMS) / counts - means.square().sum(1)
        variance = spread.clamp(min=0) / torch.where(sizes > 0, sizes, counts)
        combined_rows = torch.empty_like(heads)
        of_all = zip(
            *(cohort.split_by_replicate(rows) for rows in (means, variance, heads, cohort.client_index)), strict=True
        )
        for (all_means, all_variances, all_heads, present), (first, last) in zip(
            of_all, itertools.pairwise(cohort.replicate_bounds), strict=True
        ):
            if first < last:
                weights = head_combination_weights(
                    all_means.double().cpu().numpy(), all_variances.double().cpu().numpy()
                )
                own_rows = torch.searchsorted(present, cohort.client_index[first:last])
                combined_rows[first:last] = torch.as_tensor(weights).to(all_heads)[own_rows] @ all_heads
        return combined_rows


def head_columns(columns: ColumnsByName) -> slice:
    """Those of the parameters of the model's last layer, which are the last ones of a row."""
    last = [name for name, entry in columns.items() if entry.columns][-1].rpartition(".")[0]
    first = next(entry.columns for name, entry in columns.items() if name.rpartition(".")[0] == last)
    assert first is not None
    return slice(first.start, None)


def head_combination_weights(class_means: np.ndarray, class_variances: np.ndarray) -> np.ndarray:
    """[k, k] α_ij from h [k, C·k] and V [k], each row on the simplex.

    min αᵀPα on the simplex, P = diag(V) + (h_i − h_j)ᵀ(h_i − h_l), has the solution β / Σβ, where β ≥ 0 minimises βᵀPβ
    − 2 Σβ: its conditions are (Pβ)_j = 1 where β_j > 0, and ≥ 1 elsewhere. With P = LLᵀ this is a non-negative least
    squares problem.
    """
    from scipy.optimize import nnls

    weights = np.empty((len(class_means), len(class_means)))
    # for features without variance the weights would not be unique
    class_variances = np.maximum(class_variances, SMALLEST_VARIANCE * class_variances.mean() + np.finfo(float).tiny)
    for i, client_means in enumerate(class_means):
        differences = client_means - class_means
        programme = np.diag(class_variances) + differences @ differences.T
        factor = np.linalg.cholesky(programme / programme.diagonal().mean())
        solution, _ = nnls(factor.T, np.linalg.solve(factor, np.ones(len(class_means))))
        weights[i] = solution / solution.sum()
    return weights
