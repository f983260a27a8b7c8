"""Clients that hold only a few classes (McMahan et al. 2017; apfl §5)."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedsim.core.constraints import Count, Fraction, OneOf
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples

CLASS_SPLIT_FORMS = ("classes", "shards", "blocks")


class ClassSplit(Partition):
    """Every client holds k classes.

    Args:
        classes_per_client: k.
        form: 'classes' deals exactly k distinct classes to every client and shares each class's samples evenly among
            its holders; 'shards' sorts by label, cuts m·k shards and deals k to each client (as in McMahan et al.; a
            client may then have fewer or more than k classes); 'blocks' also cuts shards and gives client i the shards
            i, m + i, 2m + i, …, like the program of apfl's authors: with ten equal classes and k = 2, adjacent clients
            share a pair of classes (c, c + 5). All shards have ⌊N / (m·k)⌋ samples, the remaining samples are not used,
            and the samples of a class are shuffled (the program keeps the file's order).
        validation: of every partition.
    """

    name = "class_split"
    remedy = "lower clients, or raise partition.classes_per_client"

    def __init__(
        self,
        classes_per_client: Count = 2,
        form: Annotated[str, OneOf(*CLASS_SPLIT_FORMS)] = "classes",
        validation: Fraction = 0.0,
    ) -> None:
        super().__init__(validation)
        self.per_client = classes_per_client
        self.form = form

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        labels = samples.need_labels(self.name)
        if self.form != "classes":
            shuffled = draw.permutation(samples.count)
            by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
            if self.form == "blocks":
                size = samples.count // (clients * self.per_client)
                blocks = by_label[: size * clients * self.per_client].reshape(self.per_client, clients, size)
                return [blocks[:, client].reshape(-1) for client in range(clients)]
            shards = np.array_split(by_label, clients * self.per_client)
            shards_by_client = draw.permutation(len(shards)).reshape(clients, self.per_client)
            return [np.concatenate([shards[s] for s in client_shards]) for client_shards in shards_by_client]
        clients_by_class = self._assign_classes(np.unique(labels), clients, draw)
        client_shares: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label, members in clients_by_class.items():
            class_samples = draw.permutation(np.flatnonzero(labels == label))
            if len(class_samples) < len(members):
                raise ConfigError(
                    f"class {label} has {len(class_samples)} samples for {len(members)} of "
                    f"clients={clients} that hold it "
                    f"(partition.classes_per_client={self.per_client}); lower either"
                )
            for client, share in zip(members, np.array_split(class_samples, len(members)), strict=True):
                client_shares[client].append(share)
        return [np.concatenate(p) for p in client_shares]

    def _assign_classes(
        self, class_counts: np.ndarray, clients: int, draw: np.random.Generator
    ) -> dict[int, list[int]]:
        """The clients that hold each class: k distinct classes per client, all classes held about equally often."""
        if self.per_client > len(class_counts):
            raise ConfigError(
                f"partition.classes_per_client={self.per_client} exceeds the data set's {len(class_counts)} classes"
            )
        if clients * self.per_client < len(class_counts):
            raise ConfigError(
                f"clients={clients} × partition.classes_per_client={self.per_client} cannot hold all "
                f"{len(class_counts)} classes; raise either"
            )
        clients_by_class: dict[int, list[int]] = {int(label): [] for label in class_counts}
        for client in draw.permutation(clients):
            tie_breakers = draw.random(len(class_counts))
            rank = sorted(
                range(len(class_counts)), key=lambda c: (len(clients_by_class[int(class_counts[c])]), tie_breakers[c])
            )
            for c in rank[: self.per_client]:
                clients_by_class[int(class_counts[c])].append(int(client))
        return clients_by_class
