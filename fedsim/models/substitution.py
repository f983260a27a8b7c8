"""Whether a module is a function of tensors that are substituted for its parameters.

A row is trained by substituting its numbers for the module's parameters (`torch.func.functional_call`). That is what
plain PyTorch does, which writes into the parameters, only if the module finds them nowhere else: in a closure or a
list, in a buffer that shares their memory, in a cache, or in what `train()` and `eval()` made of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.core import streams
from fedsim.core.errors import ConfigError
from fedsim.models.calling import ModuleCaller
from fedsim.models.copying import copy_module, get_named_tensor
from fedsim.models.probe import PROBE_TOLERANCE, ForwardTraits, module_output, same_output

PARAMETER_SHIFT = 0.1  # by which parameters are changed to obtain other ones


@dataclass(frozen=True)
class SharedTensorPair:
    """Two tensors of a module that share memory.

    Attributes:
        name: of a parameter or buffer.
        partner: of another parameter, buffer or attribute.
        registered: whether the other one is a parameter or buffer.
    """

    name: str
    partner: str
    registered: bool


def refuse_complex(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse complex parameters and statistics: a row holds real numbers.

    Raises:
        ConfigError: names one.
    """
    for name in names:
        if get_named_tensor(module, name).is_complex():
            raise ConfigError(
                f"model: {name!r} of {type(module).__name__} is complex, and a client's model is a row of real "
                "numbers; keep the real and the imaginary part in one of shape […, 2] and use torch.view_as_complex"
            )


def overlapping_tensors(module: nn.Module) -> list[SharedTensorPair]:
    """Return registered tensors that overlap in memory with another tensor in the module's attributes.

    A parameter that is used in two places is one tensor, and not listed.
    """
    entries: list[tuple[str, Tensor, bool]] = []
    for prefix, layer in module.named_modules():
        registered = {**layer._parameters, **layer._buffers}
        attributes = {key: value for key, value in vars(layer).items() if key not in _MODULE_ATTRIBUTES}
        for leaf, value in (*registered.items(), *attributes.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            entries += [(name, tensor, leaf in registered) for tensor in tree_leaves(value) if _has_storage(tensor)]
    overlapping_pairs: list[SharedTensorPair] = []
    memory_spans = sorted((_address_range(value), number) for number, (_, value, _) in enumerate(entries))
    reached_spans: list[tuple[int, int]] = []  # end, number
    for (start, end), number in memory_spans:
        reached_spans = [(other_end, number_before) for other_end, number_before in reached_spans if other_end > start]
        for _, number_before in reached_spans:
            (name, value, is_registered), (other_name, other_value, other_registered) = (
                entries[number],
                entries[number_before],
            )
            if value is other_value and (isinstance(value, nn.Parameter) or name == other_name):
                continue
            if is_registered:
                overlapping_pairs.append(SharedTensorPair(name, other_name, other_registered))
            if other_registered:
                overlapping_pairs.append(SharedTensorPair(other_name, name, is_registered))
        reached_spans.append((end, number))
    return overlapping_pairs


_MODULE_ATTRIBUTES = vars(nn.Module()).keys()


def _has_storage(value: Any) -> bool:
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    return value.layout == torch.strided and value.device.type != "meta" and value.numel() > 0


def _address_range(value: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte, and behind the last."""
    last_offset = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last_offset + 1) * value.element_size()


def refuse_shared_memory(
    module: nn.Module, overlapping_pairs: Sequence[SharedTensorPair], names: Sequence[str], x: Any, call: ModuleCaller
) -> None:
    """Refuse trained parameters and statistics (`names`) that share memory with another tensor that is used.

    Raises:
        ConfigError: names both.
    """
    for pair in overlapping_pairs:
        if pair.name in names and (pair.registered or _is_read_by_forward(module, pair.partner, x, call)):
            raise ConfigError(
                f"model: {pair.name!r} of {type(module).__name__} shares memory with {pair.partner!r}, which copies of "
                "the module do not keep; compute one from the other in the forward pass"
            )


def _is_read_by_forward(module: nn.Module, attribute: str, x: Any, call: ModuleCaller) -> bool:
    """Return whether a forward pass reads the content of this attribute; the old spectral_norm computes it anew."""
    prefix, _, leaf = attribute.rpartition(".")
    for training in (True, False):
        outputs = []
        for is_moved in (False, True):
            module_copy = copy_module(module).train(training)
            values = tree_leaves(vars(module_copy.get_submodule(prefix)).get(leaf))
            with torch.no_grad(), streams.preserve_rng_states(), contextlib.suppress(_UnfitParametersError):
                for value in values if is_moved else ():
                    if _has_storage(value) and value.is_floating_point():
                        value.data.add_(_cosine_offsets(value))
                outputs.append(_run_seeded_forward(call, module_copy, x))
        if len(outputs) == 2 and not same_output(outputs[0], outputs[1], PROBE_TOLERANCE):
            return True
    return False


def check_parameter_substitution(
    module: nn.Module,
    original_module: nn.Module | None,
    x: Any,
    call: ModuleCaller,
    traits: ForwardTraits,
    trained: Sequence[str],
) -> None:
    """Compare substitution of parameters with parameters that are written in place, as an optimiser does.

    Args:
        module: the copy of the user's module that the run trains.
        original_module: which it is a copy of; it is left as it was.
        x: two inputs.
        call: how it is called.
        traits: what the probe found.
        trained: names of the trained parameters.

    Raises:
        ConfigError: the module takes parameters from somewhere else.
    """
    kind = type(module).__name__
    with torch.no_grad(), streams.preserve_rng_states(), contextlib.suppress(_UnfitParametersError):
        for training in (True, False):
            if original_module is not None:
                own_tensors = _trained_parameters(module, trained)
                output_before = _run_seeded_forward(call, copy_module(module).train(training), x, dict(own_tensors))
                with _perturb_tensors(original_module):
                    output_after = _run_seeded_forward(call, copy_module(module).train(training), x, dict(own_tensors))
                if not same_output(output_before, output_after, PROBE_TOLERANCE):
                    raise ConfigError(
                        f"model: a copy of {kind} still uses parameters of the module that it is a copy of, by a "
                        "function or a reference that deepcopy does not copy (a lambda, a closure, a weak reference, a "
                        "replaced forward); reach layers through self, in methods or in hooks by their arguments"
                    )
            _compare_outputs(module, x, call, traits, trained, training)


def _compare_outputs(
    module: nn.Module, x: Any, call: ModuleCaller, traits: ForwardTraits, trained: Sequence[str], training: bool
) -> None:
    mode, kind = "training" if training else "evaluation", type(module).__name__
    changed_tensors = _trained_parameters(module, trained)
    for value in changed_tensors.values():
        value.add_(_cosine_offsets(value))
    copy_with_values = copy_module(module).eval().train()
    for name, parameter in copy_with_values.named_parameters():
        if name in changed_tensors:
            parameter.data.copy_(changed_tensors[name])
    expected = _run_seeded_forward(call, copy_with_values.train(training), x)

    def forward_with_values(module_copy: nn.Module, values: dict[str, Tensor]) -> Any:
        statistics = {name: get_named_tensor(module, name).detach().clone() for name in traits.statistics}
        return _run_seeded_forward(call, module_copy, x, values | statistics)

    if not same_output(
        expected, forward_with_values(copy_module(module).train(training), changed_tensors), PROBE_TOLERANCE
    ):
        raise ConfigError(
            f"model: in {mode} {kind} uses more of its parameters than what they hold when it is called: it prepares "
            "them in train() or eval(), counts those calls, or reaches them by a list or another attribute; read "
            "parameters in the forward pass, by the names under which they are registered"
        )
    reused_module = copy_module(module).train(training)
    forward_with_values(reused_module, _trained_parameters(module, trained))
    if not same_output(expected, forward_with_values(reused_module, changed_tensors), PROBE_TOLERANCE):
        raise ConfigError(
            f"model: in {mode} {kind} keeps what it computed from its parameters in an earlier pass, and uses it for "
            "other parameters; compute it in each forward pass"
        )


def _trained_parameters(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters() if name in names}


class _UnfitParametersError(Exception):
    """The module refuses these parameters; errors with the run's own are reported elsewhere."""


def _run_seeded_forward(call: ModuleCaller, module: nn.Module, x: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    streams.reseed_global_generators(0)
    try:
        return module_output(call, module, tree_map(lambda value: value.clone(), x), tensors)
    except Exception as error:
        raise _UnfitParametersError from error


@contextlib.contextmanager
def _perturb_tensors(module: nn.Module) -> Iterator[None]:
    """Within the block the module has other parameters and buffers, set in place without autograd."""
    with contextlib.ExitStack() as stack:
        for value in itertools.chain(module.parameters(), module.buffers()):
            if value.is_floating_point() and _has_storage(value) and not value.is_inference():
                stack.callback(value.data.copy_, value.detach().clone())
                value.data.add_(_cosine_offsets(value))
        yield


def _cosine_offsets(like: Tensor) -> Tensor:
    count = torch.arange(like.numel(), device=like.device)
    return PARAMETER_SHIFT * torch.cos(count + 1).reshape(like.shape).to(like)
