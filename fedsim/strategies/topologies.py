"""Networks of m clients, and mixing matrices over the available clients."""

from __future__ import annotations

import math

import numpy as np
import torch

from fedsim.core import rng
from fedsim.core.errors import ConfigError

TOPOLOGIES = ("ring", "torus", "erdos_renyi", "star", "complete")


class CommunicationGraph:
    """An undirected graph of clients. It is not stored, so that the cost of a round depends only on the available
    clients.

    Args:
        topology: 'ring': i and i ± 1; 'torus': a periodic grid a × b with a·b = m, as square as possible;
            'erdos_renyi': each pair with `probability`; 'star': all clients and client 0; 'complete': all pairs.
        clients: m.
        probability: probability of a link, for 'erdos_renyi'.
        seed: seed of the links of 'erdos_renyi'.

    Raises:
        ConfigError: m clients do not form a torus.
    """

    def __init__(self, topology: str, clients: int, probability: float = 0.5, seed: int = 0) -> None:
        self.topology = topology
        self.clients, self.probability, self.seed = clients, probability, seed
        self.height = next(a for a in range(math.isqrt(clients), 0, -1) if clients % a == 0)
        if topology == "torus" and self.height == 1 and clients > 1:
            raise ConfigError(
                f"strategy.topology=torus needs a·b clients, both at least 2, and {clients} is no such number; "
                "set clients to another, or choose strategy.topology=ring"
            )

    def are_neighbours(self, receivers: np.ndarray, senders: np.ndarray) -> np.ndarray:
        """[k, l] bool: are these two clients [k], [l] neighbours? Nobody is its own."""
        i, j, m = receivers[:, None], senders[None], self.clients
        if self.topology == "ring":
            links = ((i - j) % m == 1) | ((j - i) % m == 1)
        elif self.topology == "torus":
            width = m // self.height
            row_distance, column_distance = i // width - j // width, i % width - j % width
            horizontal = ((column_distance % width == 1) | (-column_distance % width == 1)) & (row_distance == 0)
            links = horizontal | (
                ((row_distance % self.height == 1) | (-row_distance % self.height == 1)) & (column_distance == 0)
            )
        elif self.topology == "star":
            links = (i == 0) | (j == 0)
        elif self.topology == "erdos_renyi":
            pair = torch.as_tensor(np.minimum(i, j) * m + np.maximum(i, j))
            key = rng.row_keys(torch.tensor(self.seed), rng.Purpose.STRATEGY, pair)
            links = (rng.uniform(key, torch.zeros_like(key), torch.float64) < self.probability).numpy()
        else:
            links = np.ones((len(receivers), len(senders)), dtype=bool)
        return links & (i != j)

    def degrees(self, receivers: np.ndarray) -> np.ndarray:
        """[k] how many neighbours these clients have."""
        return self.are_neighbours(receivers, np.arange(self.clients)).sum(1)

    def is_connected(self) -> bool:
        """Is there a way from everybody to everybody?"""
        if self.topology != "erdos_renyi":
            return True
        reached_mask, edge = np.zeros(self.clients, dtype=bool), np.array([0])
        while len(edge):
            reached_mask[edge] = True
            unreached_clients = np.flatnonzero(~reached_mask)
            edge = unreached_clients[self.are_neighbours(unreached_clients, edge).any(1)]
        return bool(reached_mask.all())

    def mixing_matrix(self, present: np.ndarray, includes_absent: bool) -> np.ndarray:
        """[k, k] W on the clients that are there [k]: symmetric, rows and columns sum to 1.

        W_ij = 1 / (1 + max(degrees)) of neighbours (Metropolis weights), the rest on the diagonal. The rows of
        those who are away are the identity's.

        Args:
            present: numbers of clients, ascending.
            includes_absent: are degrees those of the whole network? Else those among who is there.
        """
        links = self.are_neighbours(present, present)
        degrees = self.degrees(present) if includes_absent else links.sum(1)
        weights = links / (1.0 + np.maximum(degrees[:, None], degrees[None]))
        return weights + np.diag(1.0 - weights.sum(1))
