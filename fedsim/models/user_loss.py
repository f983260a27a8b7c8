"""A user-defined loss function: how it is called, and whether it is per sample or over the batch.

Two signatures are accepted, `(output, target)` as in PyTorch and `(output, batch)` with the batch as a dictionary. A
loss returns one number per sample, [B], or a single one for the batch, []. A loss over the batch (contrastive, ranking,
Cox) is right only on batches without padding, so the engine trains on unpadded batches wherever a loss mixes samples.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.core import rng, streams
from fedsim.core.errors import ConfigError, first_message_line
from fedsim.core.rewind import Rewind
from fedsim.core.snapshot import differing_paths, enlarged_counter, snapshot
from fedsim.models.randomness import KeyedRandomness

LOSS_STREAM = 0x10555  # separates the random numbers of a loss from those of the forward pass, which uses the same key
EVALUATION_KEY = 0x5EED  # in evaluation a loss draws the same numbers each time
BATCH_NAMES = ("batch", "data", "samples")
TARGET_NAMES = ("target", "targets", "label", "labels", "y", "y_true", "true", "truth")
LOSS_TOLERANCE = 1e-5  # between two computations of the same number, relative to the largest


@dataclass(frozen=True)
class UserLoss:
    """A user's loss with its signature resolved; called as (output, batch).

    Attributes:
        function: what the user gave, or a copy of it on the run's device.
        takes_batch: whether its second argument is the batch, rather than batch['y'].
        over_batch: whether it returns one number for the whole batch, [].
        mixes_samples: whether a sample's loss depends on the others of the batch.
        random: whether it draws random numbers.
    """

    function: Callable[..., Tensor]
    takes_batch: bool
    over_batch: bool = False
    mixes_samples: bool = False
    random: bool = False

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        second_argument = dict(batch) if self.takes_batch else batch["y"]  # its own dictionary, which it may modify
        tensors = [value for value in tree_leaves([output, second_argument]) if isinstance(value, Tensor)]
        versions = [0 if value.is_inference() else value._version for value in tensors]
        if not self.random:
            value = self.function(output, second_argument)
        else:
            key = batch["key"] if "key" in batch else torch.tensor(EVALUATION_KEY, device=batch["x"].device)
            with KeyedRandomness(rng.fold_in(key, LOSS_STREAM)):
                value = self.function(output, second_argument)
        if [0 if tensor.is_inference() else tensor._version for tensor in tensors] != versions:
            raise ConfigError(
                f"{loss_label(self.function)} writes into the model's output or the batch; let it work on a copy"
            )
        return value


def cast_loss(loss: UserLoss, device: torch.device, dtype: torch.dtype) -> UserLoss:
    """The same loss for another dtype."""
    return dataclasses.replace(loss, function=_prepared_loss(loss.function, loss_label(loss.function), device, dtype))


def unwrap_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The user's function, or the built-in loss."""
    return loss.function if isinstance(loss, UserLoss) else loss


def loss_label(loss: Callable[..., Any]) -> str:
    """Return the name of a loss for error messages."""
    name = getattr(loss, "__name__", None)
    return f"model.loss={name if isinstance(name, str) else type(loss).__name__}"


def resolve_user_loss(
    loss: Callable[..., Any],
    output: Any,
    batch: Mapping[str, Tensor],
    dataset: str,
    device: torch.device,
    dtype: torch.dtype,
    parameters: Sequence[Tensor] = (),
) -> UserLoss:
    """Determine how a user's loss is called and what it returns, on a few samples.

    Args:
        loss: a function, an `nn.Module` or a class that needs no arguments.
        output: what the model returns for the batch, [B, …] or a structure of such tensors.
        batch: at least two samples.
        dataset: its name, for messages.
        device, dtype: of the run.
        parameters: of the user's own module, whose copies are trained.

    Raises:
        ConfigError: in one sentence, where the loss cannot be used.
    """
    name = loss_label(loss)
    function = _prepared_loss(loss, name, device, dtype)
    output = tree_map(_perturbed_output, output)
    batch = {key: value.clone() for key, value in batch.items()}  # the stored data set's, until known to be safe
    rewind = Rewind(function)  # before the first call
    try:
        return _make_user_loss(function, name, output, batch, dataset, parameters, rewind)
    finally:
        rewind()


def _make_user_loss(
    function: Callable[..., Any],
    name: str,
    output: Any,
    batch: Mapping[str, Tensor],
    dataset: str,
    parameters: Sequence[Tensor],
    rewind: Rewind,
) -> UserLoss:
    device = batch["x"].device
    with torch.no_grad(), streams.preserve_rng_states():
        takes_batch = _takes_batch(function, name, output, batch, dataset)
        user_loss = UserLoss(function, takes_batch)
        states_before, input_snapshot = streams.global_rng_state(), snapshot([output, dict(batch)])
        with KeyedRandomness(torch.tensor(EVALUATION_KEY, device=device)) as keyed_randomness:
            value = _loss_value(user_loss, name, output, batch, dataset)
        if not streams.rng_states_equal(states_before, streams.global_rng_state()):
            raise ConfigError(
                f"{name} draws random numbers that cannot be keyed by client and step, so that results would differ "
                "from run to run; draw them by torch.rand, torch.randn or torch.bernoulli"
            )
        if differing_paths(input_snapshot, snapshot([output, dict(batch)])):
            raise ConfigError(f"{name} writes into the model's output or the batch; let it work on a copy")
        _check_loss_value(value, name, len(batch["x"]))
        user_loss = UserLoss(function, takes_batch, value.dim() == 0, random=keyed_randomness.num_calls > 0)
        _check_no_batch_memory(user_loss, name, output, batch, rewind)
        mixes_samples = user_loss.over_batch or _mixes_samples(user_loss, value, output, batch)
    _check_loss_gradient(user_loss, name, output, batch, parameters)
    return UserLoss(function, takes_batch, user_loss.over_batch, mixes_samples, user_loss.random)


def _prepared_loss(loss: Callable[..., Any], name: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Build an object of a class, and copy a module to the run's device and dtype."""
    if inspect.isclass(loss):
        try:
            instance: Any = loss()
            loss = instance
        except Exception as error:
            raise ConfigError(
                f"{name} is a class that cannot be built without arguments ({error}); give an instance"
            ) from error
    if not callable(loss):
        raise ConfigError(f"{name} cannot be called; give a function (output, target), an nn.Module or a known name")
    if not isinstance(loss, nn.Module):
        return loss
    if any(parameter.requires_grad for parameter in loss.parameters()):
        raise ConfigError(
            f"{name} has parameters of its own, which clients would not train; make them part of the model"
        )
    return copy.deepcopy(loss).to(device, dtype)


def _takes_batch(
    function: Callable[..., Any], name: str, output: Any, batch: Mapping[str, Tensor], dataset: str
) -> bool:
    """Return whether the second argument is the batch: by its name if that decides, otherwise by trying both."""
    callee = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = [p for p in inspect.signature(callee).parameters.values() if p.kind in _POSITIONAL_PARAMETER_KINDS]
    except (TypeError, ValueError):
        parameters = []
    if parameters and parameters[0].name.lower() in TARGET_NAMES:
        raise ConfigError(
            f"{name} takes {parameters[0].name!r} first; a loss takes the model's output first, then the target"
        )
    second_name = parameters[1].name.lower() if len(parameters) > 1 else ""
    if second_name in BATCH_NAMES:
        return True
    if second_name in TARGET_NAMES or "target" in second_name or "label" in second_name:
        if "y" not in batch:
            raise ConfigError(f"{name} takes a target, but dataset={dataset} has none; let it take (output, batch)")
        return False
    try:
        with KeyedRandomness(torch.tensor(EVALUATION_KEY, device=batch["x"].device)):
            function(output, batch)
    except Exception as of_batch:
        if "y" not in batch:
            raise ConfigError(f"{name} raised {_error_text(of_batch)} when called as (output, batch)") from of_batch
        return False
    return True


_POSITIONAL_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _loss_value(loss: UserLoss, name: str, output: Any, batch: Mapping[str, Tensor], dataset: str) -> Any:
    try:
        return loss(output, batch)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"model.loss needs {error}, which dataset={dataset} does not have") from error
    except Exception as error:
        signature = "(output, batch)" if loss.takes_batch else "(output, target)"
        raise ConfigError(
            f"model.loss does not fit the model's output on dataset={dataset}: {name} raised {_error_text(error)} when "
            f"called as {signature}"
        ) from error


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_message_line(error)[:200]}"


def _check_loss_value(value: Any, name: str, count: int) -> None:
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{name} returns {'None' if value is None else type(value).__name__}, not a tensor; it must return one "
            "number per sample, [B], or one for the batch, []"
        )
    if value.dim() and value.shape != (count,):
        raise ConfigError(
            f"{name} returns shape {list(value.shape)} for {count} samples; it must give one number per sample, [B], "
            "or one for the batch, []"
        )
    if not value.is_floating_point():
        raise ConfigError(f"{name} returns {value.dtype}; a loss must be a floating-point tensor")


def _check_loss_gradient(
    loss: UserLoss, name: str, output: Any, batch: Mapping[str, Tensor], parameters: Sequence[Tensor]
) -> None:
    """Refuse a loss without a gradient to the model's output, with which nothing would train, or with a gradient to
    other tensors."""
    leaf_tensors: list[Tensor] = []

    def make_leaf_tensor(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaf_tensors.append(value.detach().clone().requires_grad_())
        return leaf_tensors[-1]

    with torch.enable_grad(), streams.preserve_rng_states():
        value = loss(tree_map(make_leaf_tensor, output), batch)
        is_connected = (
            bool(leaf_tensors)
            and value.requires_grad
            and any(
                gradient is not None
                for gradient in torch.autograd.grad(value.sum(), leaf_tensors, retain_graph=True, allow_unused=True)
            )
        )
    if _gradient_reaches(value, parameters):
        raise ConfigError(
            f"{name} has a gradient with respect to parameters of the module that was given, which stay as they are "
            "while clients train copies; penalise parameters by model.ridge or in a local rule"
        )
    if leaf_tensors and not is_connected:
        raise ConfigError(
            f"{name} has no gradient with respect to the model's output, so that nothing would train; it must be "
            "computed from the output by differentiable operations (without .item(), .detach() or NumPy)"
        )


def _check_no_batch_memory(loss: UserLoss, name: str, output: Any, batch: Mapping[str, Tensor], rewind: Rewind) -> None:
    """Refuse a loss that computes something from its first batch and uses it for later ones."""
    rewind()
    snapshot_before = snapshot(loss.function)
    first_value = loss(output, batch)
    paths = differing_paths(snapshot_before, snapshot(loss.function))
    if not paths:
        return
    rewind()
    count = len(batch["x"])
    first_sample, reversed_order = torch.zeros(count, dtype=torch.int64), torch.arange(count - 1, -1, -1)
    for row_selection in (first_sample.to(batch["x"].device), reversed_order.to(batch["x"].device)):
        earlier_output, earlier_batch = (
            tree_map(lambda v, p=row_selection: _select_samples(v, p, count), nested_tensors)
            for nested_tensors in (output, dict(batch))
        )
        with contextlib.suppress(Exception):  # a loss may need samples of several classes
            loss(tree_map(_perturbed_output, earlier_output), earlier_batch)
    later_value = loss(output, batch)
    rewind()
    if not torch.equal(first_value, later_value) or _depends_on_counters(loss, output, batch, paths, first_value):
        rewind()
        raise ConfigError(
            f"{name} keeps in {paths[0]} what it computed from an earlier batch, so that its results depend on the "
            "order of clients; compute it from the batch that is given, or before the run"
        )


def _depends_on_counters(
    loss: UserLoss, output: Any, batch: Mapping[str, Tensor], paths: Sequence[str], first_value: Tensor
) -> bool:
    """Return whether the loss changes with its own counters, once they have moved a thousand times as far. A few
    calls are too few for a schedule that begins at the hundredth."""
    attributes = getattr(loss.function, "__dict__", {})
    for name in [path for path in paths if path in attributes]:
        original_value, enlarged_value = attributes[name], enlarged_counter(attributes[name])
        if enlarged_value is None:
            continue
        attributes[name] = enlarged_value
        try:
            with contextlib.suppress(Exception):  # the loss itself may refuse a count that no run reaches
                if not torch.equal(first_value, loss(output, batch)):
                    return True
        finally:
            attributes[name] = original_value
    return False


def _gradient_reaches(value: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return whether the gradient of a value reaches one of these tensors."""
    pending_nodes, visited_nodes = [value.grad_fn], set[Any]()
    while pending_nodes:
        node = pending_nodes.pop()
        if node is None or node in visited_nodes:
            continue
        visited_nodes.add(node)
        leaf = getattr(node, "variable", None)  # nodes of the graph at which gradients end
        if any(leaf is parameter for parameter in parameters):
            return True
        pending_nodes += [next_node for next_node, _ in node.next_functions]
    return False


def _mixes_samples(loss: UserLoss, value: Tensor, output: Any, batch: Mapping[str, Tensor]) -> bool:
    """Return whether a sample's loss changes if other samples leave the batch, or if their order changes."""
    if loss.random:
        return True  # its numbers belong to positions in the batch
    count = len(value)
    for sample_positions in ([0], [0, 1], list(range(count - 1, -1, -1))):
        row_selection = torch.tensor(sample_positions, device=value.device)
        output_subset, batch_subset = (
            tree_map(lambda v, p=row_selection: _select_samples(v, p, count), nested_tensors)
            for nested_tensors in (output, dict(batch))
        )
        try:
            subset_loss = loss(output_subset, batch_subset)
        except Exception:  # it needs more samples than these
            return True
        if subset_loss.shape != row_selection.shape or not torch.allclose(
            subset_loss,
            value[row_selection],
            rtol=LOSS_TOLERANCE,
            atol=LOSS_TOLERANCE * float(value.abs().nan_to_num(0, 0, 0).max()),
            equal_nan=True,
        ):
            return True
    return False


def _select_samples(value: Any, row_selection: Tensor, count: int) -> Any:
    """Return these samples of all entries with one value per sample."""
    return value[row_selection] if isinstance(value, Tensor) and value.dim() and len(value) == count else value


def _perturbed_output(value: Any) -> Any:
    """Return another output of the same kind: that of an untrained model may be all zeros, which hides what a loss
    does."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    sine_values = torch.sin(torch.arange(1.0, value.numel() + 1, device=value.device)).reshape(value.shape)
    return value.detach() + 0.3 * sine_values.to(value)
