"""The privacy claim of a run, which depends on all of its parts."""

from __future__ import annotations

import torch

from fedsim.availability import UniformK
from fedsim.run.server import Server
from fedsim.run.training import ClientTraining
from fedsim.uplink.accounting import Privacy, privacy
from fedsim.uplink.attack import Attack


def privacy_claim(server: Server, training: ClientTraining, rounds: int) -> Privacy | None:
    """Return the claim after `rounds` rounds; None if rows have no noise."""
    strategy, stages, columns = server.strategy, server.uplink.stages, server.model.columns
    uniform = getattr(strategy, "weighting", "uniform") == "uniform"
    server_sees = strategy.server_sees if uniform else "rows"
    leak_reasons = {
        "the strategy asks clients for losses and gradients": strategy.needs_full_gradients,
        "further vectors go up": strategy.vectors_up > 1,
        strategy.side_information: bool(strategy.side_information),
        "the local rule sends estimates": training.trainer.local_rule.extra_transmitted_numbers(server.model.dimension)[
            1
        ]
        > 0,
        "some clients send what follows from others' rows": any(isinstance(stage, Attack) for stage in stages),
        "how late clients are shows how much data they have": training.round_clock.clock.may_drop_clients
        or training.delayed_updates.active,
        "statistics of the model are averaged": len(columns.averaged) > 0,
    }
    active_leaks = [leak for leak, is_active in leak_reasons.items() if is_active]
    remembers_participation = (
        isinstance(server.availability, UniformK) and bool(stages) and has_client_memory(server, training)
    )
    return privacy(stages, server.availability, server_sees, active_leaks, rounds, remembers_participation)


def has_client_memory(server: Server, training: ClientTraining) -> bool:
    """Return whether local work depends on the earlier rounds in which a client took part."""
    rule, shift, federation = (
        training.trainer.local_rule,
        training.trainer_factory.shift,
        training.trainer_factory.data.federation,
    )
    if server.model.columns.has_hidden_columns or rule.own_models:
        return True
    model = torch.zeros(federation.num_replicates, server.model.dimension, device=federation.device)
    return (shift.active and bool(shift.memory(federation, model))) or bool(rule.memory(federation, 1))
