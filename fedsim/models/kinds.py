"""The classes and functions that a configuration may name as a model or a loss."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedsim.core.targets import ComponentKind
from fedsim.core.torchvision_import import import_torchvision
from fedsim.models.images import from_torchvision

# Losses of torch.nn.functional and torchvision.ops, and those of fedsim's.
FUNCTIONAL_LOSSES = frozenset((
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy",
    "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "sigmoid_focal_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
))  # fmt: skip


def _builds_model(candidate: Any) -> bool:
    """Return whether a function builds a model: `from_torchvision`, or a function registered by torchvision."""
    if candidate is from_torchvision:
        return True
    models = import_torchvision().models
    return any(models.get_model_builder(name) is candidate for name in models.list_models())


def _is_known_loss(candidate: Any) -> bool:
    return candidate.__name__ in FUNCTIONAL_LOSSES or candidate.__module__ == "fedsim.models.losses"


MODEL_KIND = ComponentKind(
    "an nn.Module",
    (nn.Module,),
    modules=("torch.nn", "torchvision.models", "torchvision.ops", "timm.models", "timm.layers", "fedsim.models"),
    is_builder_function=_builds_model,
)
LOSS_KIND = ComponentKind(
    "a loss",
    required_methods=("__call__",),
    modules=("torch.nn.functional", "torch.nn.modules.loss", "torchvision.ops.focal_loss", "fedsim.models.losses"),
    reexporting_modules=("torch.nn", "torchvision.ops"),
    is_builder_function=_is_known_loss,
    built_in_bases=(nn.modules.loss._Loss,),
    allows_instances=True,
)
