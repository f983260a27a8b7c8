"""Label skew drawn from a Dirichlet distribution, in the published forms."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedsim.core.constraints import Count, CountOrZero, Fraction, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples

DIRICHLET_FORMS = ("equal", "proportional", "per_class")


def log_dirichlet(alpha: float, rows: int, columns: int, draw: np.random.Generator) -> np.ndarray:
    """[rows, columns] logarithms of draws from Dir(α·1): a tiny α underflows to 0 otherwise.

    log Γ(α) = log Γ(α + 1) + log(U) / α in distribution (Marsaglia and Tsang 2000).
    """
    shape = (rows, columns)
    log_gamma = np.log(draw.standard_gamma(alpha + 1, shape)) + np.log(1.0 - draw.random(shape)) / alpha
    return log_gamma - np.logaddexp.reduce(log_gamma, axis=1, keepdims=True)


class Dirichlet(Partition):
    """Smaller α: fewer classes per client.

    Forms:
        'equal': every client draws ν_i ~ Dir(α·1_C) and gets ⌊N/m⌋ samples of the classes in these proportions (Hsu et
        al. 2019, fedawe §7); if a class is exhausted, its share goes to the client's other classes. No sample is used
        twice, so the last clients, in random order, get the remaining samples, which are more concentrated than Dir(α):
        with 100 clients, ten classes and α = 0.1, one class makes up more than 90 % in about 38 % of the last tenth of
        the clients, compared with 14 % in the first half and under Dir(α).
        'proportional': ν_i as above, but each class is divided among the clients in proportion to ν_{i,c}, so sizes
        differ and every sample is used (as in FedAWE's released program). 'per_class': each class is divided in
        proportions ~ Dir(α·1_m) (Yurochkin et al. 2019).

    Args:
        alpha: concentration, > 0.
        form: see above.
        min_size: fewest samples a client may hold; a split below it is redrawn.
        min_of_class: 'proportional': a client whose ν_i corresponds to fewer than this many of N/m samples of a class
            gets none of it (10 in the program of apfl's authors); a class without such a client is not used. 0: no
            threshold.
        attempts: redraws before an error is raised.
        validation: of every partition.
    """

    effective_if = (
        EffectiveIf(
            "min_size", lambda component, run: component.form != "equal", "{at}.form=proportional or per_class"
        ),
        EffectiveIf(
            "attempts", lambda component, run: component.form != "equal", "{at}.form=proportional or per_class"
        ),
    )

    name = "dirichlet"
    remedy = "lower clients, raise partition.alpha, or use more data"

    def __init__(
        self,
        alpha: Positive = 0.3,
        form: Annotated[str, OneOf(*DIRICHLET_FORMS)] = "equal",
        min_size: Count = 1,
        attempts: Count = 100,
        min_of_class: CountOrZero = 0,
        validation: Fraction = 0.0,
    ) -> None:
        super().__init__(validation)
        self.alpha = alpha
        self.form = form
        self.min_size = min_size
        self.attempts = attempts
        self.min_of_class = min_of_class
        if min_of_class and form != "proportional":
            raise ConfigError(
                f"{{min_of_class}}={min_of_class} applies to form=proportional only, but form={form}; set it to 0",
                mentions=("min_of_class",),
            )

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        labels = samples.need_labels(self.name)
        total = samples.count
        if total < clients * self.min_size:
            raise ConfigError(f"clients={clients} × partition.min_size={self.min_size} exceeds the {total} samples")
        pools = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        if self.form == "equal":
            return self._split_equal_sizes([draw.permutation(p) for p in pools], total // clients, clients, draw)
        for _ in range(self.attempts):
            if self.form == "per_class":
                shares = np.exp(log_dirichlet(self.alpha, len(pools), clients, draw))
            else:
                shares = self._proportional_shares(
                    log_dirichlet(self.alpha, clients, len(pools), draw).T, total / clients
                )
            client_samples = self._split_by_shares([draw.permutation(p) for p in pools], shares, clients)
            if min(len(p) for p in client_samples) >= self.min_size:
                return client_samples
        raise ConfigError(
            f"partition=dirichlet found no split with partition.min_size={self.min_size} in {self.attempts} draws "
            f"(alpha={self.alpha}, form={self.form}, clients={clients}); raise partition.alpha, lower clients, "
            "or use partition.form=equal"
        )

    def _proportional_shares(self, log_shares: np.ndarray, size: float) -> np.ndarray:
        """[C, m] every client's share of each class, from log ν [C, m] and the mean number of samples of a client."""
        if self.min_of_class:
            log_shares = np.where(log_shares < np.log(self.min_of_class / size), -np.inf, log_shares)
        finite_mask = np.isfinite(log_shares).any(1, keepdims=True)
        normaliser = np.logaddexp.reduce(log_shares, axis=1, keepdims=True)
        return np.where(finite_mask, np.exp(log_shares - np.where(finite_mask, normaliser, 0.0)), 0.0)

    @staticmethod
    def _split_by_shares(pools: list[np.ndarray], shares: np.ndarray, clients: int) -> list[np.ndarray]:
        """Split each class's samples at the cumulative shares."""
        client_pieces: list[list[np.ndarray]] = [[pools[0][:0]] for _ in range(clients)]
        for class_samples, share in zip(pools, shares, strict=True):
            if not share.any():
                continue
            split_points = np.round(np.cumsum(share)[:-1] * len(class_samples)).astype(np.int64)
            for client, client_samples in enumerate(np.split(class_samples, split_points)):
                client_pieces[client].append(client_samples)
        return [np.concatenate(p) for p in client_pieces]

    def _split_equal_sizes(
        self, pools: list[np.ndarray], size: int, clients: int, draw: np.random.Generator
    ) -> list[np.ndarray]:
        """Assign samples to clients class by class; the share of an exhausted class goes to the others."""
        used_counts = np.zeros(len(pools), dtype=np.int64)
        capacity = np.array([len(p) for p in pools])
        client_samples: list[np.ndarray | None] = [None] * clients
        for client in draw.permutation(clients):
            class_shares = np.exp(log_dirichlet(self.alpha, 1, len(pools), draw)[0])
            taken_counts = np.zeros(len(pools), dtype=np.int64)
            while (num_missing := size - taken_counts.sum()) > 0:
                free_capacity = capacity - used_counts - taken_counts
                open_mix = np.where(free_capacity > 0, class_shares + 1e-12, 0.0)
                drawn_counts = draw.multinomial(num_missing, open_mix / open_mix.sum())
                taken_counts += np.minimum(drawn_counts, free_capacity)
            client_samples[client] = np.concatenate(
                [pools[c][used_counts[c] : used_counts[c] + taken_counts[c]] for c in range(len(pools))]
            )
            used_counts += taken_counts
        return [p for p in client_samples if p is not None]
