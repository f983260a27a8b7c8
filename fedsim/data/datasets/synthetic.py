"""Synthetic(α, β): models and inputs that differ between clients (Li et al. 2020; fedpbc §VI, apfl §5)."""

from __future__ import annotations

import numpy as np
import torch

from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.dataset import Dataset


class Synthetic(Dataset):
    """y = argmax softmax(W_i x + b_i), with x ~ N(v_i, diag(j^−1.2)).

    Client i draws u_i ~ N(0, α), W_i and b_i entrywise ~ N(u_i, 1), B_i ~ N(0, β), v_i entrywise ~ N(B_i, 1).
    α spreads the models, β the inputs. Both are variances, as the papers write N(0, α); Li et al.'s program uses them
    as standard deviations, which makes no difference for 0 and 1. The partition is natural. (u_i shifts the scores of
    all classes equally, so in this construction α does not change the labels; β does.)

    Args:
        clients: m.
        alpha, beta: heterogeneity of models and inputs.
        features, classes: dimensions.
        samples: samples of every client; None: lognormal(4, 2) + 50, as in Li et al.
        max_samples: cap on a lognormal draw, whose tail reaches tens of thousands; None: no cap, as in Li et al.'s
            program (the cap does not change later draws).
        test_fraction: share of each client's samples held out into the common test set, ⌊test_fraction · n_i⌋ of them;
            Li et al. hold out a tenth.
        seed: of the draw; all replicates have the same data.
    """

    effective_if = (
        EffectiveIf(
            "max_samples",
            lambda component, run: (
                component.settings["samples"] is None
                and (
                    component.settings["max_samples"] is None
                    or component.settings["max_samples"] <= component.settings["largest"]
                )
            ),
            "clients with more samples",
            attribute="settings.max_samples",
        ),
        EffectiveIf(
            "alpha",
            lambda component, run: False,
            "an effect on labels: alpha shifts the scores of all classes equally; use {at}.beta to make clients differ",
        ),
    )

    def __init__(
        self,
        clients: Count = 30,
        alpha: NonNegative = 1.0,
        beta: NonNegative = 1.0,
        features: Count = 60,
        classes: Count = 10,
        samples: Count | None = None,
        max_samples: Count | None = 5000,
        test_fraction: Fraction = 0.2,
        seed: int = 0,
    ) -> None:
        self.alpha = alpha
        self.settings = {"samples": samples, "max_samples": max_samples}
        if test_fraction == 1:
            raise ConfigError(key="test_fraction", value=1, needs="leaves no training samples; lower it")
        draw = rng.generator(seed, rng.Purpose.DATA)
        if samples is None:
            sizes = draw.lognormal(4.0, 2.0, clients).astype(np.int64) + 50
            self.settings["largest"] = int(sizes.max())
            sizes = sizes if max_samples is None else np.minimum(sizes, max_samples)
        else:
            sizes = np.full(clients, samples, dtype=np.int64)
        scale = np.arange(1, features + 1) ** -0.6  # √(j^−1.2)
        train: list[tuple[np.ndarray, np.ndarray]] = []
        test: list[tuple[np.ndarray, np.ndarray]] = []
        for size in sizes:
            centre = draw.normal(0.0, alpha**0.5)
            weight = draw.normal(centre, 1.0, (classes, features))
            bias = draw.normal(centre, 1.0, classes)
            location = draw.normal(draw.normal(0.0, beta**0.5), 1.0, features)
            x = (location + scale * draw.standard_normal((size, features))).astype(np.float32)
            y = np.argmax(x @ weight.T + bias, axis=1)
            test_size = int(size * test_fraction)
            test.append((x[:test_size], y[:test_size]))
            train.append((x[test_size:], y[test_size:]))
        train_x, train_y = (torch.as_tensor(np.concatenate(arrays)) for arrays in zip(*train, strict=True))
        test_x, test_y = (torch.as_tensor(np.concatenate(arrays)) for arrays in zip(*test, strict=True))
        super().__init__(
            f"synthetic({alpha:g},{beta:g})",
            train_x,
            train_y,
            test_x if len(test_x) else None,
            test_y if len(test_x) else None,
            classes=classes,
            owners=torch.as_tensor(np.repeat(np.arange(clients), [len(y) for _, y in train])),
            test_owners=torch.as_tensor(np.repeat(np.arange(clients), [len(y) for _, y in test]))
            if len(test_x)
            else None,
        )
