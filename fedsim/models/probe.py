"""What a user's module does in a forward pass, found out on two samples before anything is written.

A row is a client's: whatever else a forward pass reads or writes would pass between clients. So the probe looks for
buffers that move (they become columns of the row), for state outside of buffers, for random numbers from elsewhere, for
inputs that are written to, for samples that see their neighbours in the batch, and for what cannot be vmapped. What
would make results depend on how clients are computed is refused in a sentence.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.core import streams
from fedsim.core.errors import ConfigError
from fedsim.models.calling import Calling
from fedsim.models.randomness import KeyedRandomness

KEY = 0x5EED
ALIKE = 1e-4  # of two ways to compute one number, relative to the largest
OTHER = "it gives other numbers"


@dataclass
class Findings:
    """Attributes:

    statistics: buffers that a training forward moves, in the module's order.
    random: does it call for random numbers, which `KeyedRandomness` answers?
    mixes: does a sample's output in training depend on the others of its batch?
    evaluation_mixes: and in evaluation?
    least: samples that a batch in training must have.
    evaluation_unvmapped: why several rows cannot go through one vmapped pass of evaluation; None where they can.
    """

    statistics: list[str] = field(default_factory=list)
    random: bool = False
    mixes: bool = False
    evaluation_mixes: bool = False
    least: int = 1
    evaluation_unvmapped: str | None = None


def probe(module: nn.Module, x: Any, call: Calling | None = None) -> Findings:
    """Look at the module in training and in evaluation.

    Args:
        module: as it begins; it is not changed.
        x: two inputs.
        call: how it is called.

    Raises:
        ConfigError: names the layer and what to do.
    """
    found, call = Findings(), call or Calling()
    with torch.no_grad(), streams.restored():
        training = copy.deepcopy(module).train()
        first, calls = _watched(call, training, x)
        found.random = calls > 0
        before = {name: value.clone() for name, value in training.named_buffers()}
        again = copy.deepcopy(module).train()
        streams.reseed(1)
        if not _same(first, _output(call, again, x)):
            _refuse_unkeyed(call, module, x)
        second = {name: value.clone() for name, value in again.named_buffers()}
        elsewhere = _with_other_parameters(module)  # where what has converged at the first ones moves on
        _output(call, elsewhere, x)
        later = dict(elsewhere.named_buffers())
        found.statistics = [
            n for n, b in module.named_buffers() if not (torch.equal(b, before[n]) and torch.equal(b, later[n]))
        ]
        for name in found.statistics:
            if not torch.equal(before[name], second[name]):
                _refuse_unkeyed(call, module, x)
        _refuse_hidden_state(call, module, x, set(found.statistics))
        found.least = _least(call, module, x)
        found.mixes = found.least > 1 or _mixed(call, copy.deepcopy(module).train(), first, x)
        evaluation = copy.deepcopy(module).eval()
        told, _ = _watched(call, evaluation, x, "evaluation")
        found.evaluation_mixes = _mixed(call, evaluation, told, x)
    return found


def _with_other_parameters(module: nn.Module) -> nn.Module:
    """A copy in training mode, somewhere else."""
    moved = copy.deepcopy(module).train()
    for parameter in moved.parameters():
        count = torch.arange(parameter.numel(), device=parameter.device)
        parameter.add_(0.1 * torch.sin(count + 1).view_as(parameter).to(parameter))
    return moved


def why_not(attempt: Callable[[], Any], expected: Callable[[], Any]) -> str | None:
    """Why two ways do not lead to the same numbers; None where they do. The second is to be trusted."""
    right = expected()
    try:
        with warnings.catch_warnings(), streams.restored():
            warnings.simplefilter("ignore")
            got = attempt()
    except Exception as error:  # whatever torch says of somebody else's module
        return (str(error) or type(error).__name__).splitlines()[0][:200]
    return None if _same(right, got, ALIKE) else OTHER


def second_of_two(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """What the function gives, vmapped, of its arguments when they are the second of two alike."""
    return vmap(function)(*tree_map(lambda value: torch.stack([value, value]), arguments))[1]


def _output(call: Calling, module: nn.Module, x: Any) -> Tensor:
    """The module's output, random calls keyed where it trains."""
    with KeyedRandomness(_key(x)) if module.training else contextlib.nullcontext():
        return call(module, x)


def _key(x: Any) -> Tensor:
    """A client's, where x is."""
    return torch.tensor(KEY, device=tree_leaves(x)[0].device)


def _watched(call: Calling, module: nn.Module, x: Any, mode: str = "training") -> tuple[Tensor, int]:
    """The output of a pass that must leave inputs and random streams as they are; random calls it made."""
    given = tree_map(lambda value: value.clone(), x)
    before_it = streams.now()
    with KeyedRandomness(_key(x)) as keyed:
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        output = call(module, x)
    changed = [name for name, value in module.named_buffers() if not torch.equal(value, buffers[name])]
    who = type(module).__name__
    if mode == "evaluation" and changed:
        raise ConfigError(f"model: {who} changes its buffer {changed[0]!r} in evaluation; ask for self.training first")
    if mode == "evaluation" and keyed.calls:
        raise ConfigError(
            f"model: {who} draws random numbers in evaluation, so that its score would be another one each time; "
            "pass training=self.training to dropout"
        )
    if not _same(given, x):
        raise ConfigError(
            f"model: the forward pass of {who} writes into its input, which is the stored data set's; work on a copy"
        )
    if not streams.equal(before_it, streams.now()):
        _refuse_unkeyed(call, module, x)
    return output, keyed.calls


def _refuse_unkeyed(call: Calling, module: nn.Module, x: Any) -> None:
    """Name the innermost layer that gives another output from the same input and key under another seed."""
    seen: list[dict[str, Any]] = [{}, {}]
    order: list[str] = []
    for number, record in enumerate(seen):
        copied = copy.deepcopy(module).train()
        for name, layer in copied.named_modules():
            layer.register_forward_hook(_keeping(record, name, order))
        streams.reseed(number)
        with contextlib.suppress(ConfigError):
            _output(call, copied, x)
    named = dict(module.named_modules())
    guilty = next((n for n in order if n in seen[1] and not _same(seen[0].get(n), seen[1][n])), "")
    raise ConfigError(
        f"model: {_where(guilty, named)} draws random numbers that cannot be keyed by client and step, so that results "
        "would differ from run to run; draw them by torch.rand, torch.randn, torch.bernoulli or dropout in the forward "
        "pass"
    )


def _where(name: str, layers: dict[str, nn.Module]) -> str:
    """A layer as a user knows it."""
    kind = type(layers[name]).__name__
    return f"layer {name!r} ({kind})" if name else kind


def _keeping(record: dict[str, Any], name: str, order: list[str]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        record[name] = output
        order.append(name)

    return hook


def _refuse_hidden_state(call: Calling, module: nn.Module, x: Any, statistics: set[str]) -> None:
    """State that is kept in plain attributes: what a pass changes there must make no difference to the next one."""
    used = copy.deepcopy(module).train()
    before = _attributes(used)
    _output(call, used, x)
    moved = [place for place, value in _attributes(used).items() if not _same(before.get(place), value)]
    if not moved:
        return
    fresh = copy.deepcopy(module).train()
    expected = _output(call, fresh, x)
    stained = copy.deepcopy(module).train()
    layers = dict(stained.named_modules())
    touched = dict(used.named_modules())
    for name, attribute in moved:
        setattr(layers[name], attribute, getattr(touched[name], attribute))
    same = _same(_output(call, stained, x), expected)
    states = zip(stained.named_buffers(), fresh.named_buffers(), strict=False)
    if not same or any(not torch.equal(a, b) for (_, a), (_, b) in states):
        name, attribute = moved[0]
        raise ConfigError(
            f"model: {_where(name, layers)} keeps {attribute!r} from one forward pass to the next in a plain "
            "attribute, which all clients would share; keep it in a buffer (self.register_buffer), and every client "
            "has its own"
        )


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Numbers and tensors among the plain attributes of all layers."""
    return {
        (name, key): value.clone() if isinstance(value, Tensor) else copy.copy(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if not key.startswith("_") and key != "training" and isinstance(value, (Tensor, int, float, list, dict, set))
    }


def _least(call: Calling, module: nn.Module, x: Any) -> int:
    """Samples of the smallest batch that it trains on: some normalisations refuse a single one."""
    try:
        _output(call, copy.deepcopy(module).train(), tree_map(lambda value: value[:1], x))
    except (ValueError, RuntimeError, IndexError):
        return 2
    return 1


def _mixed(call: Calling, module: nn.Module, output: Tensor, x: Any) -> bool:
    """Does the first sample's output change with the second?"""
    return not _same(output[:1], _output(call, module, tree_map(_another_second, x))[:1])


def _another_second(x: Tensor) -> Tensor:
    """[2, …] with another second input, of the same kind."""
    if x.dtype == torch.bool:  # a mask that hides everything is none
        return torch.cat([x[:1], x[:1]])
    return torch.cat([x[:1], 2 * x[1:] + 1 if x.is_floating_point() else x[1:] * 0 + x.min()])


def _same(one: Any, other: Any, tolerance: float = 1e-6) -> bool:
    """Equal tensors (but for rounding), numbers, or collections of them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        scale = one.detach().abs().nan_to_num(0.0, 0.0).max().item() if one.numel() else 0.0
        return torch.allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k], tolerance) for k in one)
    return type(one) is type(other) and (not isinstance(one, (int, float, str, set)) or one == other)
