"""hydra/sweeper=tune: where Hydra looks for sweepers. What it does is in `fedsim.studies.tuning.hydra_sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TuneSweeper(Sweeper):
    """A sweep that tunes settings as `fedsim tune` does, in this process.

    Args:
        params: overrides of the sweep, key → value; those of the command line replace them.
        **options: of tuning, the fields of `fedsim.studies.tuning.hydra_sweep.SweepOptions`.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.params, self.options = params, options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def sweep(self, arguments: list[str]) -> Any:
        # Here, since it imports PyTorch, and Hydra imports this module always.
        from fedsim.studies.tuning.hydra_sweep import run_tuning_sweep

        return run_tuning_sweep(
            self.hydra_context.config_loader, self.config, arguments, self.params or {}, self.options
        )
