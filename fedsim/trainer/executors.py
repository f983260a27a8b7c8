"""What takes the rows of a chunk through their local steps, made as it was chosen."""

from __future__ import annotations

from fedsim.local import LocalRule
from fedsim.models import RowModel
from fedsim.shift import Shift
from fedsim.trainer.choose import ExecutorChoice
from fedsim.trainer.fused_executor import FusedExecutor, plain_descents
from fedsim.trainer.loop_executor import LoopExecutor
from fedsim.trainer.vmap_executor import VmapExecutor

Executor = FusedExecutor | LoopExecutor | VmapExecutor


def executor(choice: ExecutorChoice, rule: LocalRule, model: RowModel, shift: Shift, contaminated: bool) -> Executor:
    """The chosen one; `contaminated`: foreign samples are mixed into the batches."""
    if choice.executor == "loop":
        return LoopExecutor(rule, model, shift, choice.workers, contaminated)
    if choice.executor == "vmap":
        return VmapExecutor(rule, model, shift, contaminated, choice.compile)
    return FusedExecutor(rule, model, plain_descents(rule, shift, model), choice.stack, choice.workers)
