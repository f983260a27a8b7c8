"""Build the executor that takes the rows of a chunk through their local steps."""

from __future__ import annotations

from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.trainer.choose import ExecutorChoice
from fedsim.trainer.fused_executor import FusedExecutor, fusible_descents
from fedsim.trainer.loop_executor import LoopExecutor
from fedsim.trainer.vmap_executor import VmapExecutor

Executor = FusedExecutor | LoopExecutor | VmapExecutor


def make_executor(
    executor_choice: ExecutorChoice, local_rule: LocalRule, model: StatelessModel, shift: Shift, contaminated: bool
) -> Executor:
    """Build the chosen executor; `contaminated`: foreign samples are mixed into the batches."""
    if executor_choice.executor == "loop":
        return LoopExecutor(local_rule, model, shift, executor_choice.workers, contaminated)
    if executor_choice.executor == "vmap":
        return VmapExecutor(local_rule, model, shift, contaminated, executor_choice.compile)
    grouped = executor_choice.executor == "grouped"
    return FusedExecutor(
        local_rule,
        model,
        fusible_descents(local_rule, shift, model),
        executor_choice.rows_per_stack,
        executor_choice.workers,
        grouped,
    )
