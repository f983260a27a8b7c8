"""The frozen prefix of a module: the layers that come first and have no trained parameters.

What they compute depends on the sample alone, so it can be computed once for a data set and stored in the place of its
inputs. The module then skips those layers: they return their input. Names, parameters and rows stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedsim.core import streams
from fedsim.models.copying import copy_module
from fedsim.models.probe import PROBE_TOLERANCE, same_output

DOUBLE_TOLERANCE = 1e-9  # of outputs in float64, relative to the largest
METADATA = (  # what may be read of the input of a stage that returns a tensor of the same shape and type
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "ndim", "device", "dtype")),
    Tensor.size, Tensor.dim, Tensor.__len__, Tensor.is_floating_point, Tensor.numel,
)  # fmt: skip


def return_input(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    """Return the input, in place of a skipped layer."""
    return x


@dataclass(frozen=True)
class FrozenPrefix:
    """The first stages of a module, which have no trained parameters and depend only on the input.

    Attributes:
        stages: in the order in which they are computed: names of layers, or of methods that the module lists in its
            attribute `first_stages`, a dictionary: method → names of the layers and parameters that it uses.
    """

    stages: tuple[str, ...] = ()

    @classmethod
    def find_longest(
        cls, training: nn.Module, evaluation: nn.Module, x: Tensor, excluded: Callable[[str], bool]
    ) -> FrozenPrefix:
        """Find the longest prefix; it has no stages if no frozen parameter comes before the first trained one.

        A stage is the only one that computes with the input, has no trained parameters and gives each sample the same
        output in training and in evaluation, whatever the random numbers and the other samples are.

        Args:
            training, evaluation: the module in both modes; neither is changed.
            x: [B, …] a few inputs, B ≥ 2.
            excluded: names of parameters and buffers for which it is true belong to no stage, such as statistics.
        """
        modules = (copy_module(training), _perturbed_copy(training), copy_module(evaluation))
        stages: list[str] = []
        num_stages, value = 0, x
        while (stage := _next_frozen_stage(modules, stages, value, excluded)) is not None:
            name, value = stage
            stages.append(name)
            for module in modules:
                setattr(*_stage_owner_and_attribute(module, name), return_input)
            if any(True for _ in _tensor_names(training, name, parameters_only=True)):
                num_stages = len(stages)
        return cls(tuple(stages[:num_stages]))

    def skipped(self, module: nn.Module) -> nn.Module:
        """Return the module without these stages, changed in place."""
        for name in self.stages:
            setattr(*_stage_owner_and_attribute(module, name), return_input)
        return module

    def contains_layer(self, module: nn.Module, layer: str) -> bool:
        """Return whether a layer, given by name, is one of the stages or part of one."""
        methods = getattr(module, "first_stages", {})
        owners = [owner for stage in self.stages for owner in methods.get(stage, (stage,))]
        return any(layer == owner or layer.startswith(f"{owner}.") for owner in owners)

    def outputs(self, module: nn.Module, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Return the output of the last stage for inputs [B, …], batch by batch."""
        module_copy = copy_module(module)
        for x in batches:
            yield _record_stage_call(module_copy, self.stages[-1], x, ends=True).output


Modules = tuple[nn.Module, nn.Module, nn.Module]  # in training, with other trained parameters, in evaluation


def _next_frozen_stage(
    modules: Modules, stages: list[str], x: Tensor, excluded: Callable[[str], bool]
) -> tuple[str, Tensor] | None:
    """Return name and output of the stage that follows these, which the modules skip already."""
    training = modules[0]
    for name in _candidate_stage_names(training, x):
        names = set(_tensor_names(training, name))
        frozen = not any(p.requires_grad for n, p in training.named_parameters(remove_duplicate=False) if n in names)
        if name in stages or not frozen or any(map(excluded, names)):
            continue
        try:
            output = _stage_output(modules, name, x)
        except Exception:  # a layer that does not take a single sample, or returns no tensor
            continue
        if output is not None:
            return name, output
    return None


def _candidate_stage_names(module: nn.Module, x: Tensor) -> list[str]:
    """Return the names of methods that may be stages, and of layers that are called with the input itself."""
    names: list[str] = list(getattr(module, "first_stages", {}))

    def record_layer_name(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and inputs[0] is x:
            names.append(name)

    handles = [
        layer.register_forward_pre_hook(functools.partial(record_layer_name, name))
        for name, layer in module.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), streams.preserve_rng_states():
            module(x)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(names))


def _stage_owner_and_attribute(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the object and its attribute that computes a stage."""
    is_method = name in getattr(module, "first_stages", {})
    return (module, name) if is_method else (module.get_submodule(name), "forward")


def _tensor_names(module: nn.Module, stage: str, parameters_only: bool = False) -> Iterator[str]:
    """Return the names of the parameters and buffers of a stage."""
    owners = getattr(module, "first_stages", {}).get(stage, (stage,))
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [] if parameters_only else [name for name, _ in module.named_buffers(remove_duplicate=False)]
    for name in names:
        if any(name == owner or name.startswith(f"{owner}.") for owner in owners):
            yield name


class _StopForwardError(Exception):
    """Ends a forward pass whose remaining layers are not needed."""


class _StageCall(TorchFunctionMode):
    """Watches a stage during a forward pass within the block.

    Args:
        module: whose stage is replaced by a watched one within the block.
        stage: its name.
        x: the input of the module.
        ends: whether the pass ends after the stage.

    Attributes:
        output: of the stage.
        calls: how often it was called.
        only_user: whether nothing else computed with the input, and it with nothing that is trained.
        reads_metadata: whether something else asked for the input's shape or type.
    """

    def __init__(self, module: nn.Module, stage: str, x: Tensor, ends: bool) -> None:
        super().__init__()
        self.x, self.ends, self.calls, self.only_user, self.reads_metadata = x, ends, 0, True, False
        self.output = x
        self._inside = False
        self._owner, self._attribute = _stage_owner_and_attribute(module, stage)
        self._compute = getattr(self._owner, self._attribute)

    @contextlib.contextmanager
    def record_calls(self) -> Iterator[None]:
        """Within the block, calls of the stage and uses of the input are recorded."""
        own_value = vars(self._owner).get(self._attribute)
        setattr(self._owner, self._attribute, self._watched_call)
        try:
            with self, contextlib.suppress(_StopForwardError):
                yield
        finally:
            delattr(self._owner, self._attribute)
            if own_value is not None:
                setattr(self._owner, self._attribute, own_value)

    def _watched_call(self, *arguments: Any, **keywords: Any) -> Tensor:
        further_arguments = tree_leaves((arguments[1:], keywords))
        if not arguments or arguments[0] is not self.x or any(map(_is_trained, further_arguments)):
            self.only_user = False
        self.calls, self._inside = self.calls + 1, True
        self.output = self._compute(*arguments, **keywords)
        self._inside = False
        if self.ends:
            raise _StopForwardError
        return self.output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and any(value is self.x for value in tree_leaves((args, kwargs or {}))):
            self.reads_metadata = True
            self.only_user = self.only_user and func in METADATA
        return func(*args, **(kwargs or {}))


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _record_stage_call(module: nn.Module, stage: str, x: Tensor, ends: bool = False) -> _StageCall:
    call = _StageCall(module, stage, x, ends)
    with torch.set_grad_enabled(not ends), call.record_calls():
        module(x)
    return call


def _stage_output(modules: Modules, name: str, x: Tensor) -> Tensor | None:
    """Return the output of a stage for the inputs; None if it depends on more than each sample."""
    owner = _stage_owner_and_attribute(modules[0], name)[0]
    if owner._forward_hooks or owner._forward_pre_hooks or isinstance(owner, torch.jit.ScriptModule):
        return None
    outputs: list[Tensor] = []
    with streams.preserve_rng_states():
        for seed, module in enumerate(modules):
            streams.reseed_global_generators(seed)
            call = _record_stage_call(module, name, x)
            output = call.output
            if call.calls != 1 or not call.only_user or not isinstance(output, Tensor) or output.requires_grad:
                return None
            if len(output) != len(x) or not output.is_floating_point():
                return None
            if call.reads_metadata and (output.shape, output.dtype) != (x.shape, x.dtype):
                return None
            outputs.append(output.detach())
        of_first_sample = _record_stage_call(modules[0], name, x[:1], ends=True).output
    first_output, moved_output, evaluated_output = outputs
    tolerance = DOUBLE_TOLERANCE if first_output.dtype == torch.float64 else PROBE_TOLERANCE
    depends_on_sample_alone = (
        torch.equal(first_output, moved_output)
        and same_output(first_output, evaluated_output, tolerance)
        and same_output(first_output[:1], of_first_sample, tolerance)
    )
    return first_output if depends_on_sample_alone else None


def _perturbed_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the module with other trained parameters."""
    module_copy = copy_module(module)
    for parameter in module_copy.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    return module_copy
