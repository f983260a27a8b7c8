"""What a strategy passes to the local rule in addition to start rows, tried before the run folder is created."""

from __future__ import annotations

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.core.memory import Memory
from fedsim.run.setup import Setup
from fedsim.strategies import State


def check_strategy_carry(simulation: Setup, state: State, memory: Memory) -> None:
    """Ask the strategy for what it passes to an empty cohort. Refuse entries that the local rule would not use, and
    entries whose names the rule or the shift uses for their own memory.

    Raises:
        ConfigError: naming it, and what to choose instead.
    """
    shape = (simulation.federation.num_replicates, simulation.federation.clients)
    empty_cohort = simulation.federation.make_cohort(np.zeros(shape), np.zeros(shape))
    start_rows = simulation.strategy.start(state, empty_cohort)
    if (
        simulation.round_clock.clock.may_drop_clients
        and (simulation.strategy.cohort(state, empty_cohort).host_index.multiplicity == 0).any()
    ):
        raise ConfigError(
            f"strategy={type(simulation.strategy).__name__} as configured lets clients compute that do not "
            "participate, and clock.deadline or clock.first would stop late clients from doing either; set both to "
            "null, or choose another strategy"
        )
    local_rule = simulation.trainer.local_rule
    carry_keys = set(start_rows) - {"params"} if isinstance(start_rows, dict) else set()
    duplicate_keys = ({*carry_keys, "params"} & memory.clients.keys()) | ({"round"} & {*carry_keys, *memory.clients})
    if duplicate_keys:
        raise ConfigError(
            f"{', '.join(sorted(duplicate_keys))} in the memory of local={type(local_rule).__name__} or of "
            f"shift={type(simulation.shift).__name__} is the name of something else in the rows of "
            f"strategy={type(simulation.strategy).__name__}; rename it"
        )
    ignored_keys = carry_keys - local_rule.supported_keys
    if ignored_keys:
        raise ConfigError(
            f"strategy={type(simulation.strategy).__name__} hands {', '.join(sorted(ignored_keys))} to the "
            f"local rule, but {type(local_rule).__name__} does not use it; choose local=sgd, or another strategy"
        )
