"""Classifier calibration with virtual representations (CCVR): the last layer is trained again on Gaussian features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.data.samples import ClientData, ClientSamples
from fedsim.models import StatelessModel
from fedsim.models.features import FeatureLayer
from fedsim.models.losses import LOSSES

CALIBRATED = "calibrated"
SAMPLES_PER_PASS = 4000  # of all clients in one forward pass
VIRTUAL_FEATURES = 500  # of each class
ITERATIONS = 100  # of L-BFGS
RIDGE = 1e-4  # λ of the penalty λ/2 ‖W‖² on the last layer's weights, without which separable features have no minimum
OUTPUT_TOLERANCE = 1e-4  # relative, of the last layer's outputs to the model's


@dataclass
class ClassStatistics:
    """Sums over samples of each class, in double precision; those of several clients are added.

    Attributes:
        counts: [C] n_c.
        sums: [C, k] Σ z.
        products: [C, k, k] Σ z zᵀ.
    """

    counts: Tensor
    sums: Tensor
    products: Tensor

    @classmethod
    def zeros(cls, classes: int, features: int, device: torch.device) -> ClassStatistics:
        """Return the sums over no samples."""
        shapes = ((classes,), (classes, features), (classes, features, features))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add samples with features [B, k] and labels [B], in place."""
        features = features.double()
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        self.sums.index_add_(0, labels, features)
        for label in labels.unique().tolist():
            of_class = features[labels == label]
            self.products[label] += of_class.T @ of_class

    @property
    def means(self) -> Tensor:
        """[C, k] μ_c; zero for a class without samples."""
        return self.sums / self.counts.clamp(min=1)[:, None]

    @property
    def covariances(self) -> Tensor:
        """Return [C, k, k] (Σ z zᵀ − n_c μ_c μ_cᵀ) / (n_c − 1), the covariances over the samples of all clients;
        they equal the server's combination of the clients' means and covariances in the paper's equation 3. Zero
        for a class with one sample."""
        means = self.means
        scatter = self.products - self.counts[:, None, None] * means[:, :, None] * means[:, None, :]
        return scatter / (self.counts - 1).clamp(min=1)[:, None, None]


class ClassifierCalibration:
    """Makes the server's model with a calibrated last layer (Luo et al., "No Fear of Heterogeneity: Classifier
    Calibration for Federated Learning with Non-IID Data", NeurIPS 2021, Algorithm 1).

    Every client computes, under the server's model, the features of its training samples, which are the inputs of the
    last layer, and sends their number, mean and covariance for each class. The server draws `VIRTUAL_FEATURES` features
    of each class from a Gaussian with the mean and covariance of all clients' samples, and trains the last layer on
    them, beginning at that of the model: up to `ITERATIONS` iterations of L-BFGS on the mean cross-entropy and a small
    penalty on the weights, where the paper takes steps of SGD. The draws are the same in every evaluation. Training
    continues with the model as it was.

    Args:
        model, data: of the run.

    Raises:
        ConfigError: the model has no last linear layer that gives its outputs, or the data no class labels that stay
            with their samples.
    """

    def __init__(self, model: StatelessModel, data: ClientData) -> None:
        self.model, self.data, self.federation = model, data, data.federation
        classes = data.dataset.classes
        if classes is None or data.federation.class_fractions is None or model.loss is not LOSSES["cross_entropy"]:
            raise ConfigError(
                f"evaluate={CALIBRATED} trains a classifier, but dataset={data.dataset.name} has no class label for "
                "each sample, or model.loss is not cross_entropy; use evaluate=global"
            )
        if data.dataset.stream or data.drift.active:
            raise ConfigError(
                f"evaluate={CALIBRATED} computes features of stored samples that do not change; use evaluate=global, "
                "or drift=none and a data set that is not drawn for each batch"
            )
        self.classes = classes
        self.samples = ClientSamples(data, None, model.dtype)
        self.layer = self._last_layer()

    def _last_layer(self) -> FeatureLayer:
        module = self.model.evaluation_module
        name = type(module).__name__
        names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
        traits = self.model.traits
        if not names or f"{names[-1]}.weight" not in self.model.shapes:
            raise ConfigError(
                f"evaluate={CALIBRATED} needs features before a last linear layer that is trained, which {name} does "
                "not have; use evaluate=global, or another model"
            )
        layer = FeatureLayer(names[-1], of_input=True)
        is_evaluated_alone = traits.evaluation_mixes_samples or traits.evaluation_isolated is not None
        if is_evaluated_alone or not self.model.tensor_output or not self._gives_outputs(layer):
            raise ConfigError(
                f"evaluate={CALIBRATED} needs a model whose outputs are those of its last linear layer, "
                f"and {layer.name!r} of {name} is none; use evaluate=global, or another model"
            )
        return layer

    def _gives_outputs(self, layer: FeatureLayer) -> bool:
        """Whether the model's outputs are those of the layer, which is used once."""
        row, batch = self.model.initial([0])[0], self.data.two_samples(self.model.dtype)
        with torch.no_grad(), layer.record_features(self.model.evaluation_module) as recorded:
            output = self.model.evaluate(row, self.model.call.inputs(batch))
        if len(recorded) != 1 or recorded[0].dim() != 2 or output.shape != (len(recorded[0]), self.classes):
            return False
        expected = F.linear(recorded[0], *_head_parameters(self.model, row, layer))
        return torch.allclose(output, expected.to(output), rtol=OUTPUT_TOLERANCE, atol=OUTPUT_TOLERANCE)

    def __call__(self, models: Tensor) -> Tensor:
        """[R, d] models, each with its calibrated last layer; the others' columns are unchanged."""
        calibrated = models.clone()
        for replicate, (row, seed) in enumerate(zip(calibrated, self.federation.seeds, strict=True)):
            head = _head_parameters(self.model, row, self.layer)  # views of the row
            statistics = self.statistics(models[replicate], replicate)
            features, labels = virtual_features(statistics, int(seed))
            with torch.no_grad():
                for parameter, value in zip(head, train_head(head, features, labels), strict=True):
                    parameter.copy_(value)
        return calibrated

    @torch.no_grad()
    def statistics(self, row: Tensor, replicate: int) -> ClassStatistics:
        """The sums over the training samples of all clients of a replicate under a model [d]."""
        weight = _head_parameters(self.model, row, self.layer)[0]
        statistics = ClassStatistics.zeros(self.classes, weight.shape[1], row.device)
        clients = torch.arange(self.federation.clients, device=row.device)[self.federation.ranks.client_slice]
        for rows in (replicate * self.federation.clients + clients).split(
            max(1, SAMPLES_PER_PASS // self.samples.width)
        ):
            batch = self.samples.batch(rows)
            is_sample = batch["weight"] > 0
            samples = {name: value[is_sample] for name, value in batch.items() if value.shape[:2] == is_sample.shape}
            with self.layer.record_features(self.model.evaluation_module) as recorded:
                self.model.evaluate(row, self.model.call.inputs(samples))
            statistics.add(recorded[0], samples["y"])
        for sums in (statistics.counts, statistics.sums, statistics.products):
            self.federation.ranks.all_reduce_sum(sums)  # in place
        return statistics


def _head_parameters(model: StatelessModel, row: Tensor, layer: FeatureLayer) -> list[Tensor]:
    """Weight [C, k] and, if there is one, bias [C] of the layer, as views of the row [d]."""
    parameters = model.unflatten(row)
    names = (f"{layer.name}.weight", f"{layer.name}.bias")
    return [parameters[name] for name in names if name in parameters]


def virtual_features(statistics: ClassStatistics, seed: int, count: int = VIRTUAL_FEATURES) -> tuple[Tensor, Tensor]:
    """Features [M, k] and labels [M]: `count` draws from the Gaussian of each class that has samples."""
    present = (statistics.counts > 0).nonzero()[:, 0]
    means, device = statistics.means[present], present.device
    eigenvalues, vectors = torch.linalg.eigh(statistics.covariances[present])  # singular ones, too
    roots = vectors * eigenvalues.clamp(min=0).sqrt()[:, None, :]
    seeds = torch.full_like(present, seed)
    keys = rng.row_keys(seeds, rng.Purpose.CALIBRATION, present)  # the class in the place of the client
    numbers = torch.arange(count * means.shape[1], device=device)
    normal = rng.normal(keys[:, None], numbers, torch.float64).unflatten(1, (count, -1))
    return (means[:, None] + normal @ roots.mT).flatten(0, 1), present.repeat_interleave(count)


def train_head(head: list[Tensor], features: Tensor, labels: Tensor, iterations: int = ITERATIONS) -> list[Tensor]:
    """Weight and bias that minimise the mean cross-entropy of these features [M, k] plus `RIDGE` / 2 ‖weight‖²,
    beginning at `head`."""
    from scipy.optimize import minimize  # torch.optim's L-BFGS imports torch._dynamo, which takes seconds

    targets = F.one_hot(labels, len(head[0])).double()

    def unflatten(flat: np.ndarray) -> tuple[Tensor, ...]:
        flat_tensors = torch.as_tensor(flat).to(features).split([tensor.numel() for tensor in head])
        return tuple(flat_tensor.view_as(tensor) for flat_tensor, tensor in zip(flat_tensors, head, strict=True))

    def flatten(*tensors: Tensor) -> np.ndarray:
        flat: np.ndarray = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu().numpy()
        return flat

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = unflatten(flat)
        logits = F.linear(features, *parameters)
        loss = F.cross_entropy(logits, labels) + 0.5 * RIDGE * parameters[0].square().sum()
        of_logits = (logits.softmax(1) - targets) / len(features)
        return float(loss), flatten(
            of_logits.T @ features + RIDGE * parameters[0], *[of_logits.sum(0)][: len(head) - 1]
        )

    solution = minimize(loss_and_gradient, flatten(*head), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return list(unflatten(solution.x))
