"""A vmapped step as a flat list of tensor operations, traced once and replayed.

What a small step costs on the host is `torch.func`'s bookkeeping, done again at every call: levels, wrappers, trees.
The operations underneath are the same ones every time, on tensors of the same shapes. They are recorded by `make_fx`
when a step has been taken so often that recording pays, and called one after another from then on: the same kernels on
the same numbers, the same bits. Whatever varies is a tensor among the arguments; what a step reads from a Python
attribute would be frozen, so only classes whose steps do not are replayed: fedsim's and PyTorch's own, and those that
say `replayable = True`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.models.user_loss import unwrap_loss
from fedsim.shift import Shift

log = logging.getLogger(__name__)
aten_operators = torch.ops.aten

RECORDING_COST_IN_CALLS = 40  # number of calls that take as long as recording
MAX_RECORDINGS = 64  # recordings, by shapes
MAX_COUNTED_SHAPES = 1024  # kinds of shapes
REPLAYABLE_PACKAGES = ("fedsim", "torch", "torchvision")
ALIASING_OPERATIONS = (aten_operators.detach.default, aten_operators.alias.default)
RESHAPING_OPERATIONS = (aten_operators.view.default, aten_operators.expand.default, aten_operators._unsafe_view.default)
CONSTANT_TENSOR_OPERATIONS = (
    aten_operators.ones_like.default,
    aten_operators.zeros_like.default,
    aten_operators.new_zeros.default,
    aten_operators.new_ones.default,
)


def has_fixed_operations(rule: LocalRule, model: StatelessModel, shift: Shift) -> bool:
    """Return whether a step of these objects is the same sequence of operations each time."""
    return not model.traits.random and all(
        map(_is_replayable_object, (rule, shift, unwrap_loss(model.loss), *model.training_module.modules()))
    )


def _is_replayable_object(component: Any) -> bool:
    """Return whether an object and its members are of classes (or functions) whose steps read no Python state that
    changes."""
    if isinstance(component, nn.Module):
        hooks = any(value for name, value in vars(component).items() if name.endswith("_hooks"))
        if hooks or "forward" in vars(component):
            return False
    elif isinstance(component, LocalRule | Shift):
        inner_callables = [attribute for attribute in vars(component).values() if callable(attribute)]
        if not all(map(_is_replayable_object, inner_callables)):
            return False
    kind = component if isinstance(component, FunctionType) else type(component)
    return bool(vars(kind).get("replayable", False)) or (kind.__module__ or "").partition(".")[0] in REPLAYABLE_PACKAGES


class Replay:
    """A function of tensors, dictionaries of them and None, which is recorded once it has been called often enough.

    Args:
        function: what it returns are such things too, or tuples of them.
        recording_cost: calls with arguments of the same shapes before they are recorded.
    """

    def __init__(self, function: Callable[..., Any], recording_cost: int | None = None) -> None:
        self.function, self.recording_cost = (
            function,
            RECORDING_COST_IN_CALLS if recording_cost is None else recording_cost,
        )
        self._calls_by_key: dict[Hashable, int] = {}
        self._recordings: OrderedDict[Hashable, Callable[[list[Tensor]], Any]] = OrderedDict()
        self._is_replay_refused = False

    def __call__(self, *arguments: Any) -> Any:
        if self._is_replay_refused:
            return self.function(*arguments)
        tensors: list[Tensor] = []
        argument_form = _argument_structure(arguments, tensors)
        recording_key = argument_form, tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        recording = self._recordings.get(recording_key)
        if recording is None:
            num_calls = self._calls_by_key[recording_key] = self._calls_by_key.get(recording_key, 0) + 1
            if num_calls <= self.recording_cost:
                if len(self._calls_by_key) > MAX_COUNTED_SHAPES:
                    self._calls_by_key.clear()
                return self.function(*arguments)
            recording = self._record_call(recording_key, argument_form, tensors)
            if recording is None:
                return self.function(*arguments)
        self._recordings.move_to_end(recording_key)
        return recording(tensors)

    def _record_call(
        self, key: Hashable, argument_form: Any, tensors: list[Tensor]
    ) -> Callable[[list[Tensor]], Any] | None:
        """Record a call with these arguments; return None, now and later, if tracing fails."""
        try:
            recording = self._recordings[key] = self._build_recording(argument_form, tensors)
        except Exception as error:  # an error of the step itself is raised when it runs without recording
            log.debug("steps are not replayed: %s", error)
            self._is_replay_refused = True
            return None
        self._evict_least_recent()
        return recording

    def _build_recording(self, argument_form: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        return OperationRecording(self.function, argument_form, tensors)

    def _evict_least_recent(self) -> None:
        """Drop the recordings that have not been used for longest, if too many are kept."""
        if len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)


class OperationRecording:
    """The operations of a function on arguments of one structure with these shapes."""

    def __init__(self, function: Callable[..., Any], argument_form: Any, tensors: list[Tensor]) -> None:
        result_forms: list[Any] = []

        def call_with_tensors(*arguments: Tensor) -> list[Tensor]:
            result_tensors: list[Tensor] = []
            result_forms.append(
                _argument_structure(function(*_rebuild_arguments(argument_form, iter(arguments))), result_tensors)
            )
            return result_tensors

        with torch.no_grad():
            traced = make_fx(call_with_tensors)(*tensors)
        self.operations, self._result_form = simplify_graph(traced, tensors).forward, result_forms[-1]

    def __call__(self, tensors: list[Tensor]) -> Any:
        return self.result_from_tensors(self.operations(*tensors))

    def result_from_tensors(self, results: list[Tensor]) -> Any:
        """Return the function's result, rebuilt from these tensors."""
        return _rebuild_arguments(self._result_form, iter(results))


def _argument_structure(argument: Any, tensors: list[Tensor]) -> Any:
    """Return the structure of an argument, hashable, and append its tensors in their order."""
    if isinstance(argument, Tensor):
        tensors.append(argument)
        return Tensor
    if isinstance(argument, dict):
        return dict, tuple(argument), tuple([_argument_structure(value, tensors) for value in argument.values()])
    return (
        argument
        if argument is None
        else (tuple, tuple([_argument_structure(element, tensors) for element in argument]))
    )


def _rebuild_arguments(argument_form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return an argument of the same structure with other tensors."""
    if argument_form is Tensor:
        return next(tensors)
    if argument_form is None:
        return None
    if argument_form[0] is dict:
        return {
            name: _rebuild_arguments(element, tensors)
            for name, element in zip(argument_form[1], argument_form[2], strict=True)
        }
    return tuple([_rebuild_arguments(element, tensors) for element in argument_form[1]])


def simplify_graph(traced: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """Remove operations that need not be repeated: numbers that depend only on shapes, and views of the same shape."""
    graph = traced.graph
    for graph_node in graph.nodes:
        if graph_node.target in RESHAPING_OPERATIONS or graph_node.target in ALIASING_OPERATIONS:
            metadata_before, metadata_after = (
                fx_node.meta.get("tensor_meta") for fx_node in (graph_node.args[0], graph_node)
            )
            if (
                metadata_before
                and metadata_after
                and (metadata_before.shape, metadata_before.stride) == (metadata_after.shape, metadata_after.stride)
            ):
                graph_node.replace_all_uses_with(graph_node.args[0])
    graph.eliminate_dead_code()
    constant_nodes = _constant_nodes(graph)
    value_recorder = _NodeValueRecorder(traced)
    value_recorder.run(*tensors)
    for index, graph_node in enumerate(constant_nodes):
        if any(user not in constant_nodes for user in graph_node.users):
            name = f"_known{index}"
            traced.register_buffer(name, value_recorder.values_by_node[graph_node].clone())
            with graph.inserting_before(graph_node):
                recorded_constant = graph.get_attr(name)
                value_recorder.values_by_node[recorded_constant] = value_recorder.values_by_node[graph_node]
                graph_node.replace_all_uses_with(
                    recorded_constant, delete_user_cb=lambda user: user not in constant_nodes
                )
    graph.eliminate_dead_code()
    replace_with_torch_functions(graph, value_recorder.values_by_node)
    traced.recompile()
    return traced


def replace_with_torch_functions(graph: fx.Graph, value_by_node: dict[fx.Node, Any]) -> None:
    """Call `torch.add` in place of `torch.ops.aten.add.Tensor`, and so on: the same kernels in about 1 µs less each.

    Which kernel a function calls depends on the types, shapes and numbers among its arguments, which are the same in
    each replay. It is called once on the recorded values; an operator that it does not reproduce bit for bit stays.
    Graphs that write in place, whose recorded values may have changed since, are left alone.
    """
    operators = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    if any(node.target._schema.is_mutable for node in operators):
        return
    for node in operators:
        name = node.target._schema.name.removeprefix("aten::")
        arguments = fx.map_arg((node.args, node.kwargs), value_by_node.__getitem__)
        for function in (getattr(torch, name, None), getattr(Tensor, name, None)):
            if function is not None and returns_equal_tensors(function, arguments, value_by_node[node]):
                node.target = function
                break


def returns_equal_tensors(function: Callable[..., Any], arguments: Any, expected_result: Any) -> bool:
    """Return whether a graph gives the same tensors in the same layout."""
    positional_arguments, keyword_arguments = arguments
    try:
        results = function(*positional_arguments, **keyword_arguments)
    except (TypeError, RuntimeError, ValueError):
        return False
    is_several = not isinstance(expected_result, Tensor)
    if isinstance(results, Tensor) == is_several or (is_several and len(results) != len(expected_result)):
        return False
    pairs = zip(results, expected_result, strict=True) if is_several else [(results, expected_result)]
    return all(
        isinstance(result, Tensor)
        and (result.dtype, result.stride()) == (value.dtype, value.stride())
        and torch.equal(result, value)
        for result, value in pairs
    )


def _constant_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that depend only on shapes, in order; none if anything is written in place, or if they are
    returned."""
    constant_nodes: dict[fx.Node, None] = {}
    for graph_node in graph.nodes:
        if graph_node.op == "output" and any(input_node in constant_nodes for input_node in graph_node.all_input_nodes):
            return []
        if graph_node.op != "call_function":
            continue
        if (schema := getattr(graph_node.target, "_schema", None)) and schema.is_mutable:
            return []
        input_nodes = graph_node.all_input_nodes
        if graph_node.target in CONSTANT_TENSOR_OPERATIONS or (
            input_nodes and all(input_node in constant_nodes for input_node in input_nodes)
        ):
            constant_nodes[graph_node] = None
    return list(constant_nodes)


class _NodeValueRecorder(fx.Interpreter):
    """Records the value of each node."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.values_by_node: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values_by_node[n] = super().run_node(n)
        return self.values_by_node[n]
