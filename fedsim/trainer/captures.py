"""Steps that a device has captured as a whole (`trainer.compile=graph`): one launch for all kernels of a step.

A graph reads and writes the same memory every time. So arguments are copied into tensors of its own, and results out of
them; what is handed through is the caller's. The memory that is held so is bounded: what has not been asked for longest
goes first. A step whose own would be beyond the bound runs operation by operation, and so does one that the device does
not take down, because an operation of it makes the host wait; that is said.

Experimental: tested on a CPU with a stand-in for the graph, and not timed on a GPU yet. Without a gain there it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.trainer.cuda_graph import CapturedGraph, GraphWork
from fedsim.trainer.replay import OperationRecording, Replay

log = logging.getLogger(__name__)

MAX_CAPTURE_BYTES = 2**30  # of arguments and results of one function


class CapturedCudaGraph:
    """A captured graph with its own input and output tensors.

    Args:
        recording: of these arguments.
        inputs: that nobody else writes to.
        capture: see `fedsim.trainer.cuda_graph.graph_capturer`.
    """

    def __init__(
        self, recording: OperationRecording, inputs: list[Tensor], capture: Callable[[GraphWork], CapturedGraph]
    ) -> None:
        self.inputs, self._rebuild_result = inputs, recording.result_from_tensors
        self._replay_graph, self.outputs = capture(lambda: list(recording.operations(*inputs)))
        input_indices = {id(tensor): index for index, tensor in enumerate(inputs)}
        self._passed_input_indices = [input_indices.get(id(output)) for output in self.outputs]

    def __call__(self, tensors: list[Tensor]) -> Any:
        torch._foreach_copy_(self.inputs, tensors)
        self._replay_graph()
        pairs = zip(self.outputs, self._passed_input_indices, strict=True)
        return self._rebuild_result(
            [output_tensor.clone() if index is None else tensors[index] for output_tensor, index in pairs]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of its arguments and results."""
        return tensor_bytes(self.inputs) + tensor_bytes(
            [o for o, p in zip(self.outputs, self._passed_input_indices, strict=True) if p is None]
        )


class GraphReplay(Replay):
    """As `Replay`, for graphs that the device captures.

    Args:
        capture: see `CapturedCudaGraph`.
        most_bytes: to hold for captured steps. None: `MAX_CAPTURE_BYTES`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        recording_cost: int | None = None,
        *,
        capture: Callable[[GraphWork], CapturedGraph],
        most_bytes: int | None = None,
    ) -> None:
        super().__init__(function, recording_cost)
        self._capture_graph = capture
        self.max_bytes = MAX_CAPTURE_BYTES if most_bytes is None else most_bytes
        self._has_warned = False

    def _build_recording(self, argument_form: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        if len({tensor.device for tensor in tensors}) > 1:  # a number on the host would be frozen in the graph
            return self._fall_back_to_replay(argument_form, tensors, "arguments lie on several devices")
        inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        try:
            capture = CapturedCudaGraph(
                OperationRecording(self.function, argument_form, inputs), inputs, self._capture_graph
            )
        except Exception as error:  # what cannot be recorded either is refused there
            return self._fall_back_to_replay(argument_form, tensors, str(error).partition("\n")[0].partition(". ")[0])
        if capture.num_bytes > self.max_bytes:
            return self._fall_back_to_replay(
                argument_form, tensors, f"it would hold {capture.num_bytes / 2**20:.3g} MiB; lower trainer.chunk"
            )
        return capture

    def _fall_back_to_replay(
        self, argument_form: Any, tensors: list[Tensor], reason: str
    ) -> Callable[[list[Tensor]], Any]:
        """Replay operation by operation from now on; logged once."""
        if not self._has_warned:
            log.warning("trainer.compile=graph: a step cannot be captured and runs operation by operation (%s)", reason)
        self._has_warned = True
        return super()._build_recording(argument_form, tensors)

    def _evict_least_recent(self) -> None:
        super()._evict_least_recent()
        bytes_by_key = {
            key: recording.num_bytes
            for key, recording in self._recordings.items()
            if isinstance(recording, CapturedCudaGraph)
        }
        while sum(bytes_by_key.values()) > self.max_bytes:
            oldest_key = next(iter(bytes_by_key))
            del bytes_by_key[oldest_key], self._recordings[oldest_key]


def tensor_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
