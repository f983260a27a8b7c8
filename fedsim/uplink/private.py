"""Clipping and Gaussian noise for client-level differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.core.constraints import Fraction, NonNegative, OneOf, Positive, PositiveFraction
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.uplink.stage import Encoding, Stage, StageContext

NOISE_LOCATIONS = ("round", "client")


class Clip(Stage):
    """G_i ← G_i · min(1, C / ‖G_i‖), client by client.

    With a `quantile` C adapts to the norms (Andrew et al. 2021): C ← C · exp(−rate · (b̃ − quantile)), b̃ the number of
    rows with norm at most C divided by the expected number of clients in round 0, not by the number of participating
    clients. An empty round does not change C. Each replicate has its own C.

    Args:
        norm: C; with a quantile its initial value (0.1 in the paper).
        quantile: quantile of the norms to which C adapts, such as 0.5; None: C is constant.
        rate: η_C, learning rate of C.
        count_noise: σ_b, standard deviation of the noise in the count of those rows.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf("rate", lambda component, run: component.quantile is not None, "{at}.quantile"),
        EffectiveIf("count_noise", lambda component, run: component.quantile is not None, "{at}.quantile"),
    )

    def __init__(
        self,
        norm: Positive = 1.0,
        quantile: Fraction | None = None,
        rate: Positive = 0.2,
        count_noise: NonNegative = 0.0,
    ) -> None:
        self.norm = norm
        self.quantile = quantile
        self.rate = rate
        self.count_noise = count_noise

    def setup(self, federation: Federation, availability: Availability, earlier_stages: Sequence[Stage]) -> None:
        if self.quantile is not None:
            expected = availability.probabilities(0).sum(1).clip(min=1.0)
            self.expected = torch.as_tensor(expected, dtype=federation.dtype).to(federation.device)

    def initial_server_memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        if self.quantile is None:
            return {}
        return {
            "norm": torch.full((federation.num_replicates,), self.norm, dtype=federation.dtype).to(federation.device)
        }

    def bound(self, link: StageContext) -> Tensor:
        """The clipping norm C, [R]."""
        if self.quantile is not None:
            return link.server("norm").clone()
        federation = link.cohort.federation
        return torch.full((federation.num_replicates,), self.norm, dtype=federation.dtype, device=federation.device)

    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        return self.clip_rows(rows, link, self.bound(link))

    def clip_rows(self, rows: Tensor, link: StageContext, bound: Tensor) -> Tensor:
        """Return the rows clipped to C [R], and update C."""
        cohort, norm = link.cohort, rows.norm(dim=1)
        row_bounds = cohort.broadcast(bound)
        if self.quantile is not None:
            noise = self.count_noise * rng.normal(link.server_keys, torch.zeros_like(link.server_keys), bound.dtype)
            share = (cohort.sum((norm <= row_bounds).to(rows.dtype)) + noise) / self.expected
            next_bound = bound * torch.exp(-self.rate * (share - self.quantile))
            link.server("norm").copy_(cohort.where_nonempty(next_bound, bound))
        return rows * (row_bounds / norm).clamp(max=1.0)[:, None]


class GaussianNoise(Clip):
    """Clips, and adds noise of standard deviation z C: user-level differential privacy (McMahan et al. 2018).

    per 'round': the sum of a round's rows has the noise N(0, (z C)² I), independent of the number of clients, as if
    added by a trusted server; it is divided among the rows. per 'client': each row has that noise, as in local
    differential privacy. Noise on the model is η_g z C / n in every column, n what the strategy divides by, and √n
    times that per client. ε is reported if the sampling satisfies the accountant's assumptions, see
    `fedsim.uplink.accounting`.

    With a `quantile` and `count_noise` σ_b above 0, rows get the multiplier z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2) (Andrew et
    al. 2021). In that paper bits are centred, −1/2 or 1/2, and z is the multiplier of both releases together. Here the
    bits are 0 or 1, and adding or removing one client changes the count by 1: together the releases have the multiplier
    (z_Δ⁻² + σ_b⁻²)^(−1/2), below z, and that is what ε is computed from.

    Args:
        norm, quantile, rate, count_noise: see `fedsim.uplink.Clip`.
        multiplier: z.
        per: 'round' or 'client'.
        delta: δ at which ε is said; below 1/m.
    """

    def __init__(
        self,
        norm: Positive = 1.0,
        quantile: Fraction | None = None,
        rate: Positive = 0.2,
        count_noise: NonNegative = 0.0,
        multiplier: Positive = 1.0,
        per: Annotated[str, OneOf(*NOISE_LOCATIONS)] = "round",
        delta: PositiveFraction = 1e-5,
    ) -> None:
        super().__init__(norm, quantile, rate, count_noise)
        self.multiplier = multiplier
        self.per = per
        self.delta = delta
        self.of_rows = self.multiplier
        if quantile is not None and count_noise > 0:
            remaining_precision = self.multiplier**-2 - (2 * self.count_noise) ** -2
            if remaining_precision <= 0:
                raise ConfigError(
                    f"{{count_noise}}={count_noise} leaves nothing of {{multiplier}}={multiplier}; it must be "
                    f"above {multiplier / 2:g}",
                    mentions=("count_noise", "multiplier"),
                )
            self.of_rows = remaining_precision**-0.5

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        return plain_encoding if self.per == "client" else code

    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        cohort, bound = link.cohort, self.bound(link)
        rows = self.clip_rows(rows, link, bound)
        deviation = self.of_rows * bound
        if self.per == "round":
            squares = cohort.sum(cohort.multiplicity)  # a client drawn c times adds its noise c times
            deviation = deviation / squares.clamp(min=1.0).sqrt()
        columns = torch.arange(rows.shape[1], device=rows.device)
        return rows + cohort.broadcast(deviation)[:, None] * rng.normal(link.keys[:, None], columns, rows.dtype)


class TreeNoise(Clip):
    """Clips, and adds the noise of a binary tree: DP-FTRL (Kairouz et al. 2021), for arbitrary participation.

    After k rounds that were not empty the sum of all that arrived has the noise N_k = Σ over the one-bits l of k of
    node(l, (k >> l) − 1), nodes being independent N(0, (z C)² I), so that its variance is that of at most ⌈log₂(k + 1)⌉
    nodes, compared with k for independent noise per round. A round's rows share N_k − N_{k−1}. Nodes are functions of
    seed, level and position, and are not stored. With strategy=fedavg_all the model is x⁰ − (η_g/m) (Σ G_i + N_k), the
    paper's without momentum. ε is reported if each client participates once, as under `cyclic` for one cycle of rounds.

    Args:
        norm: C.
        multiplier: z.
        delta: δ at which ε is said; below 1/m.
    """

    def __init__(self, norm: Positive = 1.0, multiplier: Positive = 1.0, delta: PositiveFraction = 1e-5) -> None:
        super().__init__(norm)
        self.multiplier = multiplier
        self.delta = delta

    def initial_server_memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(federation.num_replicates, dtype=torch.int64, device=federation.device)}

    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        cohort, rounds = link.cohort, link.server("rounds")
        clipped = super().__call__(rows, link)
        rounds_after = rounds + cohort.is_nonempty
        levels = (cohort.round + 1).bit_length()
        new_noise, old_noise = (
            self.noise(link.round_independent_keys, k, levels, rows) for k in (rounds_after, rounds)
        )
        rounds.copy_(rounds_after)
        count = cohort.sum(torch.ones_like(cohort.multiplicity)).clamp(min=1.0)
        return clipped + cohort.broadcast(self.norm * self.multiplier * (new_noise - old_noise) / count[:, None])

    @staticmethod
    def noise(keys: Tensor, rounds: Tensor, levels: int, row_template: Tensor) -> Tensor:
        """[R, d] N_k at z C = 1 of k = rounds [R] < 2^levels; d and dtype are those of rows `row_template` [n, d]."""
        columns = torch.arange(row_template.shape[1], device=keys.device)
        noise = row_template.new_zeros(len(keys), row_template.shape[1])
        for level in range(levels):
            node = rounds >> level
            node_keys = rng.fold_in(rng.fold_in(keys, level), node)[:, None]
            noise += torch.where((node % 2 == 1)[:, None], rng.normal(node_keys, columns, row_template.dtype), 0.0)
        return noise
