"""hydra/launcher=lockstep: where Hydra looks for launchers. What it does is in `fedsim.app.lockstep`."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LockstepLauncher(Launcher):
    """A sweep's jobs in one process, their clients in one matrix.

    Args:
        at_once: how many of them go together.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self.at_once = at_once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from fedsim.app.lockstep import CachingConfigLoader  # imports PyTorch, and Hydra imports this module always

        hydra_context.config_loader = CachingConfigLoader(hydra_context.config_loader)  # type: ignore[assignment]
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from fedsim.app.lockstep import launch

        return launch(self.context, self.config, job_overrides, initial_job_idx, self.at_once)
