"""The interface to CUDA graphs; `fedsim.trainer.captures` uses it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.trainer.replay import has_fixed_operations

WARM_UP_RUNS = 3  # times, as PyTorch asks for, in which libraries choose their kernels and take their memory

GraphWork = Callable[[], list[Tensor]]
CapturedGraph = tuple[Callable[[], None], list[Tensor]]


def check_graph_capturable(local_rule: LocalRule, model: StatelessModel, shift: Shift) -> None:
    """Raise an error if a step of these cannot be captured."""
    if model.device.type != "cuda":
        raise ConfigError(
            f"trainer.compile=graph needs a GPU, and the device is {model.device}; use trainer.compile=replay"
        )
    if not has_fixed_operations(local_rule, model, shift):
        raise ConfigError(
            "trainer.compile=graph captures steps that do the same operations every time, and of the rule, shift, loss "
            "or module here one draws random numbers itself or is not known to; use trainer.compile=replay, or give a "
            "class of your own `replayable = True`"
        )


def graph_capturer(device: torch.device) -> Callable[[GraphWork], CapturedGraph]:
    """What takes down all kernels of some work that reads and writes the same memory every time, and gives what has
    them run again and the tensors that they write. All that is captured so shares its temporary memory."""
    memory_pool = torch.cuda.graph_pool_handle()

    def capture_graph(graph_work: GraphWork) -> CapturedGraph:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    graph_work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory_pool, capture_error_mode="thread_local"):
                outputs = graph_work()
        return graph.replay, outputs

    return capture_graph
