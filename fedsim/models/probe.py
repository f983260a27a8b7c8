"""Traits of a user's module, measured in forward passes on a few samples before anything is written.

A row is a client's: whatever else a forward pass reads or writes would pass between clients. So the probe looks for
buffers and frozen parameters that move (they become columns of the row), for state outside of them, for parameters that
are written, for random numbers from elsewhere, for inputs that are written to, for samples that see their neighbours in
the batch, and for what cannot be vmapped. What would make results depend on how clients are computed is refused in a
sentence, or runs in a way in which it does not.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.core import streams
from fedsim.core.errors import ConfigError, first_message_line
from fedsim.core.snapshot import SnapshotNode, differing_paths, snapshot
from fedsim.models.calling import ModuleCaller, refuse_random_evaluation
from fedsim.models.copying import copy_module, get_named_tensor, refuse_parameter_hooks, set_module_tensors, storage_key
from fedsim.models.randomness import KeyedRandomness
from fedsim.models.writes import DataAssignmentCounter, WriteRecorder

PROBE_KEY = 0x5EED
PROBE_TOLERANCE = 1e-4  # between two computations of the same number, relative to the largest
DIFFERENT_NUMBERS_REASON = "it gives other numbers"
NUM_PROBE_PASSES = 8  # number of forward passes within which state of a module must become visible
LARGER_BATCH_SIZE = 7  # samples of the larger of the two batches that are tried


@dataclass
class ForwardTraits:
    """Attributes:

    statistics: buffers, then frozen parameters, that a training forward moves, in the module's order.
    random: does it call for random numbers, which `KeyedRandomness` answers?
    mixes_samples: does a sample's output in training depend on the others of its batch?
    evaluation_mixes_samples: and in evaluation?
    min_batch: samples that a batch in training must have.
    evaluation_unvmapped: why several rows cannot go through one vmapped pass of evaluation; None where they can.
    assigns_data: does it assign to `tensor.data`, under which vmap crashes?
    isolation_reason: why each client needs a fresh copy of the module, trained alone; None where one serves them all.
    evaluation_isolated: the same for each evaluation.
    """

    statistics: list[str] = field(default_factory=list)
    random: bool = False
    mixes_samples: bool = False
    evaluation_mixes_samples: bool = False
    min_batch: int = 1
    evaluation_unvmapped: str | None = None
    assigns_data: bool = False
    isolation_reason: str | None = None
    evaluation_isolated: str | None = None


def probe_forward_traits(module: nn.Module, x: Any, call: ModuleCaller | None = None) -> ForwardTraits:
    """Probe the module in training and in evaluation.

    Args:
        module: as it begins; it is not changed.
        x: at least two inputs.
        call: how it is called.

    Raises:
        ConfigError: names the layer and what to do.
    """
    traits, call = ForwardTraits(), call or ModuleCaller()
    refuse_parameter_hooks(module)
    with torch.no_grad(), streams.preserve_rng_states(), name_forward_errors(module):
        _probe_training_forward(call, module, x, traits)
        _probe_evaluation_mode(call, module, x, traits)
    return traits


def _probe_training_forward(call: ModuleCaller, module: nn.Module, x: Any, traits: ForwardTraits) -> None:
    """Determine the traits of forward passes in training."""
    pair = _first_samples(x, 2)
    training = copy_module(module).train()
    layer_classes_before = snapshot(_layer_classes(training))
    first_output, random_calls = _output_and_random_calls(call, training, pair)
    traits.random = random_calls > 0
    traits.statistics = _changed_buffers(call, module, pair, training, first_output, layer_classes_before)
    larger_inputs = _probe_inputs(call, module, x)
    writes = _record_writes(call, module, larger_inputs)
    _refuse_state_outside(training, layer_classes_before)  # which inputs of other kinds may change alone
    traits.assigns_data = writes.assigns
    moving_names = {*traits.statistics, *writes.buffers}
    traits.statistics = [name for name, _ in module.named_buffers() if name in moving_names]
    traits.statistics += [name for name, _ in module.named_parameters() if name in writes.frozen_names]
    traits.isolation_reason = _fresh_copy_reason(call, module, larger_inputs, traits.statistics)
    traits.min_batch = _min_trainable_batch_size(call, module, pair)
    traits.mixes_samples = traits.min_batch > 1 or _mixes_samples(
        call, lambda: copy_module(module).train(), first_output, larger_inputs, pair
    )


def _changed_buffers(
    call: ModuleCaller,
    module: nn.Module,
    pair: Any,
    training: nn.Module,
    first_output: Any,
    layer_classes_before: SnapshotNode,
) -> list[str]:
    """Return the names of the buffers that a pass in training changes; `training` has done the pass with this first
    output.

    Raises:
        ConfigError: a second pass gives another output or other buffers, or changes what lies outside of the module.
    """
    buffers_before = {name: value.clone() for name, value in training.named_buffers()}
    second_copy = copy_module(module).train()
    streams.reseed_global_generators(1)
    repeated_output = module_output(call, second_copy, pair)
    _refuse_state_outside(training, layer_classes_before)  # a module of torch.fx has a class of its own
    if not same_output(first_output, repeated_output):
        _refuse_unkeyed(call, module, pair)
    second_buffers = {name: value.clone() for name, value in second_copy.named_buffers()}
    moved_module = _copy_with_other_parameters(module)  # a module that has converged on its inputs changes again
    module_output(call, moved_module, pair)
    buffers_after = dict(moved_module.named_buffers())
    changed_names = [
        n
        for n, b in module.named_buffers()
        if not (torch.equal(b, buffers_before[n]) and torch.equal(b, buffers_after[n]))
    ]
    for name in changed_names:
        if not torch.equal(buffers_before[name], second_buffers[name]):
            _refuse_unkeyed(call, module, pair)
    return changed_names


def _probe_evaluation_mode(call: ModuleCaller, module: nn.Module, x: Any, traits: ForwardTraits) -> None:
    """Determine the traits of forward passes in evaluation."""
    pair = _first_samples(x, 2)
    evaluation = copy_module(module).eval()
    first_output, _ = _output_and_random_calls(call, evaluation, pair, "evaluation")
    streams.reseed_global_generators(2)
    with KeyedRandomness(
        _probe_key(pair)
    ):  # as in the first pass: within it PyTorch's encoder layers use other kernels
        repeated_output = call(copy_module(module).eval(), pair)
    if not same_output(first_output, repeated_output):
        raise ConfigError(
            f"model: {type(module).__name__} gives another output in evaluation each time it is called; it must be "
            "a function of its input, its parameters and its buffers"
        )
    evaluation_output, larger_inputs = module_output(call, evaluation, pair), _probe_inputs(call, evaluation, x)
    traits.evaluation_isolated = _fresh_copy_reason(call, module, larger_inputs, [], training=False)
    traits.evaluation_mixes_samples = _mixes_samples(call, lambda: evaluation, evaluation_output, larger_inputs, pair)


def _mixes_samples(
    call: ModuleCaller, make_module: Callable[[], nn.Module], pair_output: Any, larger_inputs: list[Any], pair: Any
) -> bool:
    """Return whether a sample's output depends on the other samples of its batch, or on their number."""
    return (
        _depends_on_others(call, make_module(), pair_output, pair)
        or any(
            _depends_on_others(call, make_module(), module_output(call, make_module(), y), y) for y in larger_inputs[1:]
        )
        or _depends_on_batch_size(call, make_module, larger_inputs)
    )


@contextlib.contextmanager
def name_forward_errors(module: nn.Module) -> Iterator[None]:
    """Within the block errors of the user's forward pass are raised as one sentence."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"model: the forward pass of {type(module).__name__} raised {type(error).__name__}: "
            f"{first_message_line(error)[:300]}"
        ) from error


def _first_samples(x: Any, count: int) -> Any:
    return tree_map(lambda value: value[:count] if isinstance(value, Tensor) and value.dim() else value, x)


def _num_samples(x: Any) -> int:
    return len(tree_leaves(x)[0])


def _probe_inputs(call: ModuleCaller, module: nn.Module, x: Any) -> list[Any]:
    """Return the first two samples and, if the module takes them and there are enough, more of them."""
    pair, larger_batch = _first_samples(x, 2), _first_samples(x, LARGER_BATCH_SIZE)
    if _num_samples(larger_batch) == 2:
        return [pair]
    module_copy = copy_module(module)
    try:
        module_output(call, module_copy if not module.training else module_copy.train(), larger_batch)
    except Exception:  # whatever the reason, the pair passes; batches of the run are tried later
        return [pair]
    return [pair, larger_batch]


def _depends_on_batch_size(call: ModuleCaller, module: Callable[[], nn.Module], batches: list[Any]) -> bool:
    """Return whether a sample's output changes with the number of samples in the batch."""
    if len(batches) < 2:
        return False
    pair_output, larger_output = (module_output(call, module(), batch) for batch in batches)
    return not same_output(pair_output, _first_samples(larger_output, 2), PROBE_TOLERANCE)


@dataclass
class _RecordedWrites:
    """The tensors that passes in training wrote: whether `tensor.data` was assigned, the `frozen_names` of
    parameters, and `buffers`."""

    assigns: bool = False
    frozen_names: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)


def _record_writes(call: ModuleCaller, module: nn.Module, batches: list[Any]) -> _RecordedWrites:
    """Record what passes write, with several models and on inputs of several kinds.

    Raises:
        ConfigError: they write to a trained parameter, in training or in evaluation.
    """
    writes = _RecordedWrites()
    for training in (True, False):
        for module_copy in (copy_module(module), _copy_with_other_parameters(module)):
            module_copy.train(training)
            for number in range(NUM_PROBE_PASSES):
                x = batches[number % len(batches)]
                _watch_pass(
                    call,
                    module_copy,
                    x if number < len(batches) else _perturbed_inputs(x, number),
                    training,
                    writes,
                    number,
                )
    return writes


def _watch_pass(
    call: ModuleCaller, module: nn.Module, x: Any, training: bool, writes: _RecordedWrites, number: int
) -> None:
    """Add what one pass writes; the module may refuse inputs of another kind."""
    parameters = dict(module.named_parameters())
    storages = {name: storage_key(value) for name, value in parameters.items()}
    values = {name: value.detach().clone() for name, value in parameters.items()}
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    streams_before = streams.global_rng_state()
    with WriteRecorder(parameters) as recorder, DataAssignmentCounter() as data_assignments:
        try:
            module_output(call, module, x)
        except ConfigError:
            raise
        except Exception:
            if not number:
                raise
    if not streams.rng_states_equal(streams_before, streams.global_rng_state()):
        _refuse_unkeyed(call, module, x) if training else refuse_random_evaluation(module)
    parameters_after = dict(module.named_parameters())
    if training:
        writes.assigns = writes.assigns or data_assignments.count > 0
        buffers_after = dict(module.named_buffers())
        writes.buffers |= {
            n for n, value in buffers.items() if n in buffers_after and not _tensors_identical(value, buffers_after[n])
        }
    for name, value in parameters_after.items():
        if name not in storages:
            continue  # from a kind of input that the run may never use
        has_changed = storage_key(value) != storages[name] or not _tensors_identical(value.detach(), values[name])
        if name not in recorder.written_names and not has_changed:
            continue
        if value.requires_grad or not training:
            raise ConfigError(
                f"model: the forward pass of {type(module).__name__} writes into its parameter {name!r}"
                f"{'' if training else ' in evaluation'}; a client's step begins at the row that the server sent, so "
                "constrain it by torch.nn.utils.parametrize, or in the loss (an Embedding's max_norm writes too)"
            )
        writes.frozen_names.add(name)


def _refuse_new_parameters(module: nn.Module, new_parameters: Set[str]) -> None:
    if new_parameters:
        raise ConfigError(
            f"model: the forward pass of {type(module).__name__} adds or removes the parameter "
            f"{min(new_parameters)!r}; make all "
            "parameters in __init__, or use torch.nn's lazy layers"
        )


def _refuse_state_outside(module: nn.Module, snapshot_before: SnapshotNode) -> None:
    """Refuse changes of a pass outside of the module since the snapshot `snapshot_before`."""
    changed_paths = differing_paths(snapshot_before, snapshot(_layer_classes(module)))
    if changed_paths:
        raise ConfigError(
            f"model: the forward pass of {type(module).__name__} changes {changed_paths[0]}, which lies outside of the "
            "module, so that all clients share it; keep it in a buffer (self.register_buffer), and every client has "
            "its own"
        )


@contextlib.contextmanager
def refuse_outside_changes(module: nn.Module) -> Iterator[None]:
    """Within the block, passes that change anything outside of the module are refused.

    Raises:
        ConfigError: naming it.
    """
    snapshot_before = snapshot(_layer_classes(module))
    yield
    _refuse_state_outside(module, snapshot_before)


def _tensors_identical(first_output: Tensor, second_output: Tensor) -> bool:
    return (
        first_output.shape == second_output.shape
        and first_output.dtype == second_output.dtype
        and torch.equal(first_output.nan_to_num(), second_output.nan_to_num())
    )


def _perturbed_inputs(x: Any, number: int) -> Any:
    """Return inputs of another kind: larger, smaller, of the opposite sign, shifted. Integers are unchanged."""
    scale, shift = ((3.0, 1.0), (-1.0, 0.0), (0.1, 0.0), (1.0, -2.0))[number % 4]
    return tree_map(lambda value: scale * value + shift if value.is_floating_point() else value, x)


def _copy_with_other_parameters(module: nn.Module) -> nn.Module:
    """Return a copy in training mode with other parameters."""
    perturbed_module = copy_module(module).train()
    for parameter in perturbed_module.parameters():
        count = torch.arange(parameter.numel(), device=parameter.device)
        parameter.add_(0.1 * torch.sin(count + 1).view_as(parameter).to(parameter))
    return perturbed_module


def difference_reason(attempt: Callable[[], Any], expected: Callable[[], Any]) -> str | None:
    """Return why two ways of computing differ; None if they agree. The second one is the reference."""
    try:
        right = expected()
        with streams.suppress_trial_effects():
            attempted = attempt()
    except Exception as error:  # a user's module may cause any error of PyTorch
        return first_message_line(error, type(error).__name__)[:200]
    return None if same_output(right, attempted, PROBE_TOLERANCE) else DIFFERENT_NUMBERS_REASON


def second_row_vmap_result(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return the result of the vmapped function for its arguments as the second of two equal rows."""
    return vmap(function)(*tree_map(lambda value: torch.stack([value, value]), arguments))[1]


def module_output(call: ModuleCaller, module: nn.Module, x: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return the module's output, with keyed random calls in training; `tensors` replace parameters and buffers."""
    with KeyedRandomness(_probe_key(x)) if module.training else contextlib.nullcontext():
        return call(module, x) if tensors is None else call.functional_call(module, tensors, x)


def _probe_key(x: Any) -> Tensor:
    """Return the key of a client, on the device of x."""
    return torch.tensor(PROBE_KEY, device=tree_leaves(x)[0].device)


def _output_and_random_calls(call: ModuleCaller, module: nn.Module, x: Any, mode: str = "training") -> tuple[Any, int]:
    """Return the output of a pass that must leave inputs and random streams unchanged, and whether it made random
    calls."""
    input_copy = tree_map(lambda value: value.clone(), x)
    before_it = streams.global_rng_state()
    parameters = dict(module.named_parameters()).keys()
    with KeyedRandomness(_probe_key(x)) as keyed_randomness:
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        output = call(module, x)
    _refuse_new_parameters(module, parameters ^ dict(module.named_parameters()).keys())
    changed_buffers = [
        n for n, value in module.named_buffers() if n in buffers and not _tensors_identical(value, buffers[n])
    ]
    module_name = type(module).__name__
    if mode == "evaluation" and changed_buffers:
        raise ConfigError(
            f"model: {module_name} changes its buffer {changed_buffers[0]!r} in evaluation; ask for self.training first"
        )
    if mode == "evaluation" and keyed_randomness.num_calls:
        refuse_random_evaluation(module)
    if not same_output(input_copy, x):
        raise ConfigError(
            f"model: the forward pass of {module_name} writes into its input, which is the stored data set's; "
            "work on a copy"
        )
    if not streams.rng_states_equal(before_it, streams.global_rng_state()):
        _refuse_unkeyed(call, module, x)
    return output, keyed_randomness.num_calls


def _refuse_unkeyed(call: ModuleCaller, module: nn.Module, x: Any) -> None:
    """Name the innermost layer whose output, for the same input and key, depends on the global seed."""
    outputs: list[dict[str, Any]] = [{}, {}]
    order: list[str] = []
    for number, record in enumerate(outputs):
        module_copy = copy_module(module).train()
        for name, layer in module_copy.named_modules():
            layer.register_forward_hook(_make_recording_hook(record, name, order))
        streams.reseed_global_generators(number)
        with contextlib.suppress(ConfigError):
            module_output(call, module_copy, x)
    layers = dict(module.named_modules())
    unkeyed_layer = next(
        (n for n in order if n in outputs[1] and not same_output(outputs[0].get(n), outputs[1][n])), ""
    )
    raise ConfigError(
        f"model: {_layer_text(unkeyed_layer, layers)} draws random numbers that cannot be keyed by "
        "client and step, or keeps "
        "state "
        "where no copy of the module has its own (a closure, a file), so that its output for the same input would "
        "differ from call to call; draw them by torch.rand, torch.randn, torch.bernoulli or dropout in the forward "
        "pass, and keep state in a buffer"
    )


def _layer_text(name: str, layers: dict[str, nn.Module]) -> str:
    """Describe a layer by its name and class."""
    kind = type(layers[name]).__name__
    return f"layer {name!r} ({kind})" if name else kind


def _make_recording_hook(record: dict[str, Any], name: str, order: list[str]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        record[name] = output
        order.append(name)

    return hook


def _fresh_copy_reason(
    call: ModuleCaller, module: nn.Module, batches: list[Any], statistics: list[str], training: bool = True
) -> str | None:
    """Return why each client needs a new copy of the module: state in attributes that accumulates from pass to pass.

    Attributes that hold what the last pass computed are harmless, and counters that nothing reads are kept apart by
    fresh copies.

    Raises:
        ConfigError: what is kept changes results, or lies outside of the module, where copies share it.
    """
    reused_module = copy_module(module).train(training)
    initial_state, layer_classes_before = (
        snapshot(_layer_attributes(reused_module)),
        snapshot(_layer_classes(reused_module)),
    )
    for number in range(NUM_PROBE_PASSES):
        module_output(call, reused_module, batches[number % len(batches)])
    final_statistics = {name: get_named_tensor(reused_module, name).detach().clone() for name in statistics}
    module_output(call, reused_module, batches[(NUM_PROBE_PASSES - 1) % len(batches)])
    first_state = snapshot(_layer_attributes(reused_module))
    set_module_tensors(reused_module, {name: value.clone() for name, value in final_statistics.items()})
    module_output(call, reused_module, batches[(NUM_PROBE_PASSES - 1) % len(batches)])
    second_state = snapshot(_layer_attributes(reused_module))
    _refuse_state_outside(reused_module, layer_classes_before)
    changed_paths = differing_paths(initial_state, second_state)
    if not changed_paths:
        return None
    for number in range(NUM_PROBE_PASSES):
        batch = batches[number % len(batches)]
        fresh_module = copy_module(module).train(training)
        current_statistics = {name: get_named_tensor(reused_module, name).detach().clone() for name in statistics}
        set_module_tensors(fresh_module, current_statistics)
        if not same_output(module_output(call, reused_module, batch), module_output(call, fresh_module, batch)) or any(
            not same_output(get_named_tensor(reused_module, name), get_named_tensor(fresh_module, name))
            for name in statistics
        ):
            _refuse_state(module, changed_paths[0])
    if training:
        reused_module.eval()
        fresh_module = copy_module(module).eval()
        set_module_tensors(
            fresh_module, {name: get_named_tensor(reused_module, name).detach().clone() for name in statistics}
        )
        if not same_output(
            module_output(call, reused_module, batches[0]), module_output(call, fresh_module, batches[0])
        ):
            _refuse_state(module, changed_paths[0])
    accumulated = differing_paths(first_state, second_state)
    if not accumulated:
        return None
    name, attribute = _layer_and_attribute(accumulated[0])
    return f"{_layer_text(name, dict(module.named_modules()))} changes its attribute {attribute!r} in each forward pass"


def _refuse_state(module: nn.Module, attribute: str) -> None:
    name, attribute_name = _layer_and_attribute(attribute)
    layer = _layer_text(name, dict(module.named_modules()))
    raise ConfigError(
        f"model: {layer} keeps {attribute_name!r} from one forward pass to the next in a plain attribute, which all "
        "clients would share; keep it in a buffer (self.register_buffer), and every client has its own"
    )


def _layer_and_attribute(path: str) -> tuple[str, str]:
    """Return the name of a layer and of its attribute, from a path in a snapshot of `_layer_attributes`."""
    match = re.match(r"""\[(['"])(.*?)\|(.*?)\1\](.*)""", path, re.DOTALL)
    return (match[2], match[3] + match[4]) if match else ("", path)


def _layer_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all layers, private ones included."""
    return {
        f"{name}|{attribute}": value
        for name, layer in module.named_modules()
        for attribute, value in vars(layer).items()
        if attribute not in _MODULE_ATTRIBUTES
    }


_MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}


def _layer_classes(module: nn.Module) -> list[type]:
    """Return the classes of all layers: a snapshot of them holds class attributes, and globals that their methods
    refer to."""
    return sorted({type(layer) for layer in module.modules()}, key=repr)


def _min_trainable_batch_size(call: ModuleCaller, module: nn.Module, x: Any) -> int:
    """Return the size of the smallest batch that the module trains on: some normalisations refuse a single sample."""
    try:
        module_output(call, copy_module(module).train(), tree_map(lambda value: value[:1], x))
    except Exception:  # some normalisations raise an error for it
        return 2
    return 1


def _depends_on_others(call: ModuleCaller, module: nn.Module, output: Any, x: Any) -> bool:
    """Return whether the first sample's output changes with the other samples."""
    other_output = module_output(call, module, tree_map(_replace_all_but_first, x))
    return not same_output(_first_samples(output, 1), _first_samples(other_output, 1))


def _replace_all_but_first(x: Tensor) -> Tensor:
    """Return [n, …] with the first input, followed by other inputs of the same kind."""
    if x.dtype == torch.bool:  # inverted, a mask might hide everything, which some layers treat as no mask
        return x[:1].expand_as(x).clone()
    return torch.cat([x[:1], 2 * x[1:] + 1 if x.is_floating_point() else x[1:] * 0 + x.min()])


def same_output(first_output: Any, second_output: Any, tolerance: float = 1e-6) -> bool:
    """Return whether two outputs are equal up to rounding: tensors, numbers, or collections of them."""
    if isinstance(first_output, Tensor) and isinstance(second_output, Tensor):
        if first_output.shape != second_output.shape or first_output.dtype != second_output.dtype:
            return False
        if not first_output.is_floating_point():
            return torch.equal(first_output, second_output)
        scale = first_output.detach().abs().nan_to_num(0.0, 0.0).max().item() if first_output.numel() else 0.0
        return torch.allclose(first_output, second_output, rtol=0, atol=tolerance * scale, equal_nan=True)
    if isinstance(first_output, (list, tuple)) and isinstance(second_output, (list, tuple)):
        return len(first_output) == len(second_output) and all(
            same_output(a, b, tolerance) for a, b in zip(first_output, second_output, strict=True)
        )
    if isinstance(first_output, dict) and isinstance(second_output, dict):
        return first_output.keys() == second_output.keys() and all(
            same_output(first_output[k], second_output[k], tolerance) for k in first_output
        )
    return type(first_output) is type(second_output) and (
        not isinstance(first_output, (int, float, str, set)) or first_output == second_output
    )
