"""Calls of a user's module, and selection of the output among what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.core import streams
from fedsim.core.errors import ConfigError

Inputs = Tensor | dict[str, Tensor]  # x, or x and further inputs by name


def without_fused_encoder_layers(module: Callable[..., Any], device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which PyTorch does not use its kernels for whole encoder layers in evaluation on a GPU.

    They read the attention's bias four numbers at a time wherever its address is divisible by 4 bytes
    (`transform_bias_rescale_qkv`), and in a row it need not be aligned to four numbers. On an H100 that ended in
    "misaligned address", after which the process could no longer use the GPU.
    """
    is_evaluation_on_gpu = device.type == "cuda" and not getattr(module, "training", False)
    return _encoder_kernels_off() if is_evaluation_on_gpu else contextlib.nullcontext()


@contextlib.contextmanager
def _encoder_kernels_off() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class ModuleCaller:
    """Calls modules on inputs, and brings their outputs into one form.

    Args:
        output: where the module returns a mapping or an object, the name of its output, such as 'logits'; where it
            returns a tuple, its number. None for a module that returns a tensor.
        extra_inputs: names of further inputs, which the module gets as keywords.

    Attributes:
        passes_objects: a loss of the user's takes whatever the module returns, where that is no tensor and `output` is
            not set.
        aliases: names of tensors that are another one's too (tied weights) → that one, see `tied_names`.
        classes_second: outputs for labels of positions are [B, C, …], as convolutions give them, and not [B, …, C].
        watches_streams: are passes refused that draw from a global random stream?
    """

    def __init__(self, output: str | int | None = None, extra_inputs: tuple[str, ...] = ()) -> None:
        self.output, self.extra_inputs, self.classes_second, self.passes_objects = output, extra_inputs, False, False
        self.aliases: dict[str, str] = {}
        self.watches_streams = False

    def inputs(self, batch: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs of the module: x, or a dictionary of x and further inputs by name."""
        return batch["x"] if not self.extra_inputs else {name: batch[name] for name in ("x", *self.extra_inputs)}

    def __call__(self, module: Callable[..., Any], inputs: Inputs) -> Any:
        """Return the output [B, …], or [B, …, C] for classes."""
        x, keywords = self._x_and_keywords(inputs)
        with self._refuse_input_writes(module, inputs), without_fused_encoder_layers(module, x.device):
            module_output = module(x, **keywords)
        return self._selected_output(module_output)

    def functional_call(self, module: nn.Module, tensors_by_name: dict[str, Tensor], inputs: Inputs) -> Any:
        """Return the output with these parameters and buffers in place of the module's own."""
        x, keywords = self._x_and_keywords(inputs)
        tied_tensors = {alias: tensors_by_name[name] for alias, name in self.aliases.items() if name in tensors_by_name}
        tensors = tensors_by_name | tied_tensors if tied_tensors else tensors_by_name
        with self._refuse_input_writes(module, inputs), without_fused_encoder_layers(module, x.device):
            module_output = functional_call(module, tensors, (x,), keywords, tie_weights=False)
        if tied_tensors:  # what the pass stored in place of a buffer
            tensors_by_name.update({name: tensors[name] for name in tensors_by_name})
        return self._selected_output(module_output)

    def _x_and_keywords(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the arguments of the module: x, and the further inputs by name."""
        if isinstance(inputs, Tensor):
            return inputs, {}
        return inputs["x"], {name: inputs[name] for name in self.extra_inputs}

    @contextlib.contextmanager
    def _refuse_input_writes(self, module: Callable[..., Any], inputs: Inputs) -> Iterator[None]:
        """Refuse a forward pass that writes to its inputs, which other passes or the stored data set share.

        PyTorch counts in-place operations, so that also a pass that wrote the values that were there already is
        refused: other samples may not stay as they are.

        Raises:
            ConfigError: naming the module.
        """
        tensors = [value for value in tree_leaves(inputs) if not value.is_inference()]
        versions = [value._version for value in tensors]
        stream_states = streams.global_rng_state() if self.watches_streams else None
        yield
        if [value._version for value in tensors] != versions:
            raise ConfigError(
                f"model: the forward pass of {type(module).__name__} writes into its input, which is the stored data "
                "set's; work on a copy"
            )
        if stream_states is not None and not streams.rng_states_equal(stream_states, streams.global_rng_state()):
            refuse_random_evaluation(module)

    @contextlib.contextmanager
    def refuse_global_randomness(self) -> Iterator[None]:
        """Within the block, passes in evaluation that draw from a global random stream are refused."""
        self.watches_streams = True
        try:
            yield
        finally:
            self.watches_streams = False

    def _selected_output(self, module_output: Any) -> Any:
        """Return the output among what a module returned: a tensor, unless the loss takes everything.

        Heads that exist in training only (GoogLeNet) leave a tensor in evaluation.
        """
        output = (
            module_output
            if self.output is None or isinstance(module_output, Tensor)
            else self._select_output(module_output)
        )
        if self.passes_objects and self.output is None and not isinstance(output, Tensor):
            return output
        if not isinstance(output, Tensor):
            names = ", ".join(map(repr, self._output_names(module_output)))
            raise ConfigError(
                f"model: the module returns a {type(module_output).__name__}, not a tensor; name its "
                "output by model.output" + (f", one of {names}" if names else "")
            )
        return output.movedim(1, -1) if self.classes_second else output

    def _select_output(self, module_output: Any) -> Any:
        """Return an output by name or number; None if there is none."""
        if isinstance(module_output, Mapping):
            return module_output.get(self.output)
        if isinstance(self.output, int):
            in_range = isinstance(module_output, (tuple, list)) and -len(module_output) <= self.output < len(
                module_output
            )
            return module_output[self.output] if in_range else None
        return getattr(module_output, str(self.output), None)

    @staticmethod
    def _output_names(module_output: Any) -> list[Any]:
        """Return the possible values of `output`."""
        if isinstance(module_output, Mapping):
            return [name for name, value in module_output.items() if isinstance(value, Tensor)]
        if hasattr(module_output, "_fields"):
            return list(module_output._fields)
        if isinstance(module_output, (tuple, list)):
            return [number for number, value in enumerate(module_output) if isinstance(value, Tensor)]
        return (
            [name for name, value in vars(module_output).items() if isinstance(value, Tensor)] if module_output else []
        )


def refuse_random_evaluation(module: Callable[..., Any]) -> NoReturn:
    """Refuse a module that draws random numbers in evaluation."""
    raise ConfigError(
        f"model: {type(module).__name__} draws random numbers in evaluation, so that its score would be another one "
        "each time; pass training=self.training to dropout"
    )


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the names of parameters and buffers that hold the tensor of another layer → the first name of that tensor.

    A layer that is used in two places is one layer: `functional_call` would exchange its tensors twice, and put back
    what it had put in itself.
    """
    first_name_by_id: dict[int, str] = {}
    visited_slots: set[tuple[int, str]] = set()
    aliases: dict[str, str] = {}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        for leaf, value in (*layer._parameters.items(), *layer._buffers.items()):
            slot, name = (id(layer), leaf), f"{prefix}.{leaf}" if prefix else leaf
            if value is None or slot in visited_slots:
                continue
            visited_slots.add(slot)
            if first_name_by_id.setdefault(id(value), name) != name:
                aliases[name] = first_name_by_id[id(value)]
    return aliases


def cast_output(output: Any, dtype: torch.dtype) -> Any:
    """Return a module's output in the run's dtype: a tensor, or a structure with its floating-point tensors
    converted."""
    if isinstance(output, Tensor):
        return output.to(dtype)
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, output)
