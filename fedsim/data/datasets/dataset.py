"""The interface of a data set: raw tensors, and how a batch becomes the model's input."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.constraints import Validated
from fedsim.core.errors import ConfigError
from fedsim.core.placement import on_device
from fedsim.data.datasets.augment import CropFlip
from fedsim.data.datasets.data_files import Files

NO_LABEL = -100  # the target of a position without a label, as in `torch.nn.functional.cross_entropy`


@dataclass
class Dataset(Validated):
    """Samples of one learning problem.

    Attributes:
        name: its name in reports.
        train_x: [N, …] raw inputs. Bytes are pixels, and are stored as bytes; other integers are tokens, which models
            receive as int64. Empty for a stream.
        train_y: [N] int64 labels, [N, …] int64 labels of positions (−100: no label), or [N, …] float targets;
            None if the loss needs only x.
        test_x, test_y: the held-out samples, or None.
        more, test_more: further inputs by name, [N, …] each, such as a mask; models get them as keywords.
        classes: number of labels, None for regression and mean estimation.
        loss: default per-sample loss, a name in `fedsim.models.losses.LOSSES`.
        mean, std: per-channel normalisation of images, in units of the [0, 1] range.
        owners: [N] client that owns each training sample, for data with a natural partition.
        test_owners: [N_test] client that each test sample was held out of, for data with a natural partition, or None.
        optimum: [d] minimiser of the plain mean of the natural clients' objectives, if it is known in closed form. A
            run measures the distance to the optimum for its own weights, partition and ridge
            (`fedsim.evaluation.optimum`).
        weights: [m] w_i of a stream's clients (host); None: equal weights.
        augment: random crop and flip of training images, or None.
        files: the files from which the class is read; None if nothing needs to be downloaded.
        client_names: names of the m natural clients in the data, or None.
        label_names: names of the labels 0 … C − 1 in the data, or None.
        feature_names: names of the features of the flattened input, or None.
        assignable_samples: [N'] numbers of the samples that may be assigned to clients, or None for all N: excluding
            samples needs no copy of the others.
        memory_mapped: whether inputs are a memory-mapped file: they stay on disk, and batches are moved to the device.
        strategic: numbers of the features (of the flattened input) that people change strategically in response to a
            model, or None.
    """

    files: ClassVar[Files | None] = None

    name: str
    train_x: Tensor
    train_y: Tensor | None = None
    test_x: Tensor | None = None
    test_y: Tensor | None = None
    classes: int | None = None
    loss: str = "cross_entropy"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    owners: Tensor | None = None
    test_owners: Tensor | None = None
    optimum: Tensor | None = None
    augment: CropFlip | None = None
    weights: np.ndarray | None = None
    more: dict[str, Tensor] = field(default_factory=dict)
    test_more: dict[str, Tensor] = field(default_factory=dict)
    client_names: tuple[str, ...] | None = None
    label_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    assignable_samples: Tensor | None = None
    memory_mapped: bool = False
    strategic: tuple[int, ...] | None = None
    _cache: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def stream(self) -> bool:
        """True if samples are drawn afresh for every batch and none is stored."""
        return False

    @property
    def tokens(self) -> bool:
        """Whether inputs are tokens: integers that encode something else."""
        return self.train_x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens, 1 + the largest one in training and test samples; None if inputs are no tokens."""
        if not self.tokens or not len(self.train_x):
            return None
        splits = (self.train_x, self.test_x)
        return 1 + max(int(x.max()) for x in splits if x is not None and len(x))

    @property
    def labels(self) -> Tensor | None:
        """[N] the class of every training sample, or None if a sample does not have exactly one."""
        has_class_labels = self.classes is not None and self.train_y is not None and self.train_y.dim() == 1
        return self.train_y if has_class_labels else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train_x.shape[1:])

    @property
    def natural_clients(self) -> int | None:
        """The number of clients defined by the data; None if the partition defines them."""
        return None if self.owners is None else int(self.owners.max()) + 1

    def feature_indices(
        self, features: Sequence[int | str], config_key: str, mentions: tuple[str, ...] = ()
    ) -> tuple[int, ...]:
        """Positions in the flattened input of features that are given by position or by name.

        Args:
            features: positions, or entries of `feature_names`.
            config_key, mentions: what the command line calls the setting, for messages; see `ConfigError`.

        Raises:
            ConfigError: the data have no such feature.
        """
        size, known_names = math.prod(self.shape), self.feature_names or ()
        indices: list[int] = []
        for feature in features:
            if not isinstance(feature, str):
                if feature >= size:
                    raise ConfigError(
                        f"{config_key} names feature {feature}, but dataset={self.name} has {size}, from 0 to "
                        f"{size - 1}",
                        mentions=mentions,
                    )
                indices.append(feature)
            elif not known_names:
                raise ConfigError(
                    f"{config_key} names {feature!r}, but the features of dataset={self.name} have no names; give "
                    f"numbers from 0 to {size - 1}",
                    mentions=mentions,
                )
            elif feature in known_names:
                indices.append(known_names.index(feature))
            else:
                suggestion_text = checks.nearest_name_hint(feature, known_names)
                raise ConfigError(
                    f"{config_key} names {feature!r}, which is not a feature{suggestion_text}", mentions=mentions
                )
        return tuple(dict.fromkeys(indices))

    def to(self, device: torch.device) -> Dataset:
        """The same data with every tensor on the device; inputs that are mapped from a file stay where they are. Data
        sets that share a tensor also share its copy."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and not (self.memory_mapped and name in ("train_x", "test_x")):
                setattr(moved, name, on_device(value, device))
        if moved.test_x is not None and moved.test_x.data_ptr() % 64 and not self.memory_mapped:
            moved.test_x = moved.test_x.clone()  # NumPy's alignment may change the last bits of products
        moved.more, moved.test_more = (
            {k: on_device(v, device) for k, v in extra_inputs.items()} for extra_inputs in (self.more, self.test_more)
        )
        return moved

    def of_clients(self, client_numbers: np.ndarray) -> Dataset:
        """The same data restricted to some natural clients and their held-out samples; numbers ascend."""
        assert self.owners is not None
        device = self.owners.device
        renumbered = torch.full((self.natural_clients or 0,), -1, dtype=torch.int64, device=device)
        renumbered[torch.as_tensor(client_numbers, device=device)] = torch.arange(len(client_numbers), device=device)
        subset = copy.copy(self)
        subset.owners = torch.where(self.owners < 0, -1, renumbered[self.owners])
        kept_mask = subset.owners >= 0
        if self.assignable_samples is not None:
            kept_mask &= torch.zeros_like(kept_mask).index_fill_(0, self.assignable_samples, True)
        subset.assignable_samples = kept_mask.nonzero()[:, 0]
        if self.client_names is not None:
            subset.client_names = tuple(self.client_names[client] for client in client_numbers)
        if self.test_owners is not None and self.test_x is not None and self.test_y is not None:
            test_owners = renumbered[self.test_owners]
            test_indices = (test_owners >= 0).nonzero()[:, 0]
            subset.test_owners = test_owners[test_indices]
            subset.test_x, subset.test_y = self.test_x[test_indices.to(self.test_x.device)], self.test_y[test_indices]
            subset.test_more = {name: value[test_indices] for name, value in self.test_more.items()}
        return subset

    def inputs(self, numbers: Tensor) -> Tensor:
        """[n, *shape] raw inputs of training samples [n], on the device of their numbers."""
        return self.train_x.index_select(0, numbers.to(self.train_x.device)).to(numbers.device)

    def extra_inputs(
        self, extra_tensors: dict[str, Tensor], numbers: Tensor | slice, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Further inputs of some samples, [...] numbers → [..., *shape]; floating-point ones as `dtype`."""
        extra_inputs = {name: value[numbers] for name, value in extra_tensors.items()}
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in extra_inputs.items()}

    def client_means(self) -> Tensor | None:
        """[m, d] float64 E[x] of every client of a stream, or None if unknown."""
        return None

    def draw(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh samples of a stream: clients [c], keys [c] → 'x' [c, size, …] and more. For streams only."""
        raise NotImplementedError(f"{self.name} stores its samples; only a stream draws them")

    def num_exact_samples(self, size: int) -> int:
        """The number of samples that `exact` returns for a requested `size`."""
        return size

    def exact(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Samples that represent a stream's law exactly up to second moments, for reference points (see
        `StreamDataset.exact`).
        """
        raise NotImplementedError(f"{self.name} stores its samples; only a stream draws them")

    def prepare(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Raw inputs [..., *shape] to what the model sees: tokens as int64; others in floating point, pixels scaled to
        [0, 1] and normalised."""
        if x.dtype != torch.uint8:
            return x.to(torch.int64 if self.tokens else dtype)
        x = x.to(dtype)
        if self.mean is None or self.std is None:
            return x.mul_(1 / 255)
        offset, scale = self._pixel_offset_and_factor(dtype, x.device)
        return x.sub_(offset).mul_(scale)

    def train_inputs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, *shape] all training inputs as the model receives them (without augmentation); `train_x` is as stored,
        bytes for images."""
        return self.prepare(self.train_x, dtype)

    def test_inputs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N_test, *shape] all test inputs as the model receives them; `test_x` is as stored, bytes for images.

        Raises:
            ConfigError: there are no test samples.

        Example:
            >>> white = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
            >>> Dataset("images", white, test_x=white).test_inputs().max()
            tensor(1.)
        """
        if self.test_x is None:
            raise ConfigError(f"dataset={self.name} has no test samples")
        return self.prepare(self.test_x, dtype)

    def _pixel_offset_and_factor(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Offset and factor of raw pixels per channel; computed once per dtype and device."""
        if (dtype, device) not in self._cache:
            per_channel = (-1, *[1] * (len(self.shape) - 1))
            mean, std = (
                torch.tensor(v, dtype=dtype, device=device).reshape(per_channel) for v in (self.mean, self.std)
            )
            self._cache[dtype, device] = (mean * 255, 1 / (std * 255))
        return self._cache[dtype, device]
