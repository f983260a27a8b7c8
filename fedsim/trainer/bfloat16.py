"""Whether `trainer.precision=bf16` pays: on a processor without bfloat16 units, products are slower than in float32.

Experimental: no machine with such units, and no GPU, has been measured yet. Without a gain there bfloat16 goes.
"""

from __future__ import annotations

import copy
import logging

from fedsim.data.samples import RoundPlan
from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.models.precision import bfloat16_units_text
from fedsim.shift import Shift
from fedsim.trainer import trial
from fedsim.trainer.choose import ExecutorChoice
from fedsim.trainer.executors import make_executor

log = logging.getLogger(__name__)


def warn_if_precision_slower(
    executor_choice: ExecutorChoice,
    local_rule: LocalRule,
    model: StatelessModel,
    shift: Shift,
    batch_plan: RoundPlan,
    rows: trial.TimingRows,
) -> None:
    """Log a warning if a step of the round's rows takes longer with the chosen precision than in full precision."""
    row_count = min(len(batch_plan.load.steps), executor_choice.chunk)
    timing_key = (
        "precision",
        model.timing_key(),
        type(local_rule),
        type(shift),
        executor_choice,
        int(batch_plan.load.size.max()),
        row_count,
    )
    if timing_key not in trial.FASTEST_EXECUTOR_NAMES:
        contenders = {}
        for precision in ("bf16", "full"):
            full_precision_model = copy.copy(model)
            full_precision_model.precision = precision
            contenders[precision] = trial.make_timed_step(
                make_executor(executor_choice, local_rule, full_precision_model, shift, False), batch_plan, rows
            )
        trial.FASTEST_EXECUTOR_NAMES[timing_key] = trial.fastest_of_contenders(
            contenders, rows, row_count, executor_choice.workers
        )
    if trial.FASTEST_EXECUTOR_NAMES[timing_key] == "full":
        log.warning(
            "trainer.precision=bf16: steps of this model are slower here than with trainer.precision=full, which "
            "rounds nothing (bfloat16 units of the processor: %s)",
            bfloat16_units_text(),
        )
