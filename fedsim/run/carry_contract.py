"""What a strategy hands to the local rule beside start rows, tried before a folder is made."""

from __future__ import annotations

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.core.memory import Memory
from fedsim.run.setup import Setup
from fedsim.strategies import State


def check_carry(run: Setup, state: State, memory: Memory) -> None:
    """Ask the strategy what it hands to nobody, and refuse what the local rule would not use, or what bears the name of
    something that rule or shift remember.

    Raises:
        ConfigError: naming it, and what to choose instead.
    """
    shape = (run.federation.replicates, run.federation.clients)
    empty_cohort = run.federation.cohort(np.zeros(shape), np.zeros(shape))
    start = run.strategy.start(state, empty_cohort)
    if run.pace.clock.may_drop_clients and (run.strategy.cohort(state, empty_cohort).host.count == 0).any():
        raise ConfigError(
            f"strategy={type(run.strategy).__name__} as configured lets clients compute that do not participate, and "
            "clock.deadline or clock.first would make the late do neither; give null for both, or another strategy"
        )
    local = run.trainer.rule
    carry_keys = set(start) - {"params"} if isinstance(start, dict) else set()
    duplicate_keys = ({*carry_keys, "params"} & memory.clients.keys()) | ({"round"} & {*carry_keys, *memory.clients})
    if duplicate_keys:
        raise ConfigError(
            f"{', '.join(sorted(duplicate_keys))} in the memory of local={type(local).__name__} or of "
            f"shift={type(run.shift).__name__} is the name of something else in the rows of "
            f"strategy={type(run.strategy).__name__}; rename it"
        )
    ignored = carry_keys - local.supported_keys
    if ignored:
        raise ConfigError(
            f"strategy={type(run.strategy).__name__} hands {', '.join(sorted(ignored))} to the local rule, but "
            f"{type(local).__name__} does not use it; choose local=sgd, or another strategy"
        )
