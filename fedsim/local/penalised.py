"""What local rules share that add a penalty on outputs or features to the client's loss: MOON, FedNTD, FedProto."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch, ClientData
from fedsim.local.rule import Carry, GradientStep, Objective
from fedsim.local.sgd import SGD
from fedsim.models import StatelessModel
from fedsim.models.features import FeatureLayer, ForwardPass
from fedsim.models.losses import weighted_mean
from fedsim.shift import Shift

RECEIVED_MODEL_KEY = "received"


class PenalisedSGD(SGD):
    """Steps of SGD along the gradient of f(x) + weight · penalty(x), both means over the batch.

    Args:
        penalty_weight: of the penalty; 0 is SGD.
        features: layer whose output are the features; None: the input of the last linear layer.
        **options: of SGD; clip acts on the gradient of the sum.
    """

    effective_if = (
        EffectiveIf("features", lambda component, run: component.penalty_weight > 0, "a weight of the penalty above 0"),
    )

    uses_features: ClassVar[bool] = True
    num_features: int

    def __init__(self, penalty_weight: NonNegative, features: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.penalty_weight = penalty_weight
        self.features = features

    def descents(self) -> tuple[GradientStep, ...]:
        return ()

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        name, traits, samples = type(self).__name__.lower(), model.traits, data.two_samples(model.dtype)
        if traits.evaluation_unvmapped is not None or traits.evaluation_isolated is not None or not model.tensor_output:
            raise ConfigError(
                f"local={name} asks for the outputs of several models, but {type(model.training_module).__name__} "
                "cannot be evaluated for several clients at once; use local=sgd, or another model"
            )
        model.feature_layer = None
        if self.uses_features:
            model.feature_layer = FeatureLayer.from_layer_name(model.evaluation_module, self.features, "local.features")
            self.num_features = feature_layer_width(model, samples, name)

    @abstractmethod
    def penalty(self, forward: ForwardPass, context: Carry, batch: Batch) -> Tensor:
        """[B] the penalty of each sample, from the forward pass and what `context` returned."""

    @abstractmethod
    def penalty_context(self, carry: Carry, batch: Batch, objective: Objective) -> Carry:
        """What the penalty compares the pass with: constants of the step."""

    def penalised_gradient(self, carry: Carry, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient [d] of loss and penalty, the loss [] and the features [B, k] at 'params'."""
        context = self.penalty_context(carry, batch, objective)

        def penalty(forward: ForwardPass, batch: Batch) -> Tensor:
            return self.penalty_weight * weighted_mean(self.penalty(forward, context, batch), batch.get("weight"))

        return objective.penalised(carry["params"], batch, penalty)

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss, _ = self.penalised_gradient(carry, batch, objective)
        return self.updated(carry, gradient, lr), loss


def feature_layer_width(model: StatelessModel, samples: Batch, rule_name: str) -> int:
    """k, how many features the model's feature layer gives.

    Args:
        model: whose `feature_layer` was chosen.
        samples: a few, with which it is tried.
        rule_name: of the local rule, for messages.

    Raises:
        ConfigError: the layer gives no features that can be trained.
    """
    layer, module, row = model.feature_layer, type(model.training_module).__name__, model.initial([0])[0]
    assert layer is not None
    sine_values = torch.sin(torch.arange(1.0, len(row) + 1)).to(row)
    features = []
    for scale in (0.0, 0.1, 1.0, -1.0):  # units that are inactive at one point may be active at another
        with torch.no_grad(), layer.record_features(model.evaluation_module) as recorded_inputs:
            model.evaluate(row + scale * sine_values, model.call.inputs(samples))
        if len(recorded_inputs) != 1:
            raise ConfigError(
                f"local={rule_name} needs a layer that is used once in a forward pass, and {layer.describe()} "
                f"of {module} is used {len(recorded_inputs)} times; name another one by local.features"
            )
        (value,) = recorded_inputs
        if not isinstance(value, Tensor) or not value.is_floating_point() or len(value) != len(samples["x"]):
            raise ConfigError(
                f"local={rule_name} needs features [B, …] of a batch of B samples, and {layer.describe()} of "
                f"{module} is none; name another one by local.features"
            )
        features.append(value.flatten(1))
    if all(torch.equal(features[0], moved_feature) for moved_feature in features[1:]):
        raise ConfigError(
            f"local={rule_name} trains features, but {layer.describe()} of {module} does not depend on any trained "
            "parameter; use a model with a hidden layer, or name another one by local.features"
        )
    return features[0].shape[1]


def require_classes(rule_name: str, purpose_text: str, client_data: ClientData) -> int:
    """How many classes the samples have, one label each.

    Raises:
        ConfigError: they have none.
    """
    classes: int | None = client_data.dataset.classes
    if client_data.federation.class_fractions is None or classes is None or classes < 2:
        raise ConfigError(
            f"local={rule_name} {purpose_text}, but dataset={client_data.dataset.name} has no class label for "
            "each sample; use local=sgd"
        )
    return classes
