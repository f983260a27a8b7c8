"""Submodels: the part of the model that each client holds in a round, if some clients cannot hold all of it
(`fedsim.models.capacity`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError, RunError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.models.capacity import Capacity
from fedsim.models.channels import HiddenLayerChannels, check_channel_chain
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.server import Server
from fedsim.run.training import ClientTraining

CLIENT_MEAN = "client_mean"
NUM_TRIAL_ROUNDS, NUM_TRIAL_CHANNEL_SETS = 2, 2  # rounds in which the model is tried, and sets of channels in each
ROUNDING_TOLERANCE = 1e-6  # tolerance, relative to the largest parameter


class SubmodelMasking:
    """Sets the columns that a client lacks to zero, and checks that local training leaves them at zero.

    Args:
        capacity: how much each client holds.
        chain: the channels of the model's hidden layers; None where each client holds the whole model.
        training: names local rule and model in messages.
    """

    def __init__(self, capacity: Capacity, chain: HiddenLayerChannels | None, training: ClientTraining) -> None:
        self.capacity, self.channel_chain, self.training = capacity, chain, training

    @classmethod
    def build(
        cls, components: Parts, population: Population, server: Server, training: ClientTraining
    ) -> SubmodelMasking:
        """Set up the capacity for the population, and follow the model's channels.

        Raises:
            ConfigError: the model is no chain of channels, or something in the run needs whole models.
        """
        capacity, chain = components.capacity, None
        if capacity.active:
            _check_submodel_support(components, population, server, training)
            samples = population.data.example_samples(2, server.model.dtype)
            chain = HiddenLayerChannels.from_model(server.model, samples)
            capacity.setup(population.federation)
            for held_channels in _sample_channel_sets(capacity, chain, population.federation):
                check_channel_chain(server.model, chain, held_channels, samples)
        return cls(capacity, chain, training)

    def __call__(self, start_rows: Tensor | dict[str, Tensor], cohort: Cohort, t: int) -> Tensor | dict[str, Tensor]:
        """Return the start rows without the columns that clients lack; the cohort stores which columns each client
        holds."""
        if self.channel_chain is None:
            return start_rows
        sets, index = _held_channels(self.capacity, cohort, self.channel_chain, t)
        rows = start_rows["params"] if isinstance(start_rows, dict) else start_rows
        masks = self.channel_chain.held_column_masks(sets).to(rows)[index.to(rows.device)]
        cohort.column_masks = masks
        if not isinstance(start_rows, dict):
            return start_rows * masks
        return {name: value * masks if value.shape == masks.shape else value for name, value in start_rows.items()}

    def check(self, report: Report, t: int) -> None:
        """Refuse rows in which a column that the client lacks is not zero.

        Raises:
            RunError: naming the round.
        """
        masks = report.cohort.column_masks
        if masks is None or not len(report.end):
            return
        end = torch.nan_to_num(report.end, posinf=0.0, neginf=0.0)
        outside_magnitude = (end * (1 - masks)).abs().amax(1)
        if bool((outside_magnitude > ROUNDING_TOLERANCE * end.abs().amax(1).clamp(min=1.0)).any()):
            raise RunError(
                f"capacity: in round {t} local={type(self.training.trainer.local_rule).__name__} moved columns that "
                "its "
                "client does not hold; use capacity=full, or another local rule or model"
            )

    def held_fractions(self, cohort: Cohort) -> np.ndarray:
        """Return the fraction of the model's columns that each row's client holds, [n] (host)."""
        if cohort.column_masks is None:
            return np.ones(len(cohort))
        return cohort.column_masks.mean(1, dtype=torch.float64).cpu().numpy()


def _held_channels(
    capacity: Capacity, cohort: Cohort, chain: HiddenLayerChannels, t: int
) -> tuple[list[Tensor], Tensor]:
    """Return which channels clients hold in round t, according to the capacity.

    Raises:
        ConfigError: these are no sets of channels, one for each client.
    """
    held_channels = capacity.held_channels(cohort, chain.widths, t)
    component_label = f"capacity={type(capacity).__name__}: held_channels, in round {t},"
    if not (isinstance(held_channels, tuple) and len(held_channels) == 2):
        raise ConfigError(f"{component_label} must return sets of channels and the index of each client's, two things")
    channel_sets, client_set_index = held_channels
    shapes = [
        list(channels.shape)
        for channels in channel_sets
        if isinstance(channels, Tensor) and channels.dtype == torch.bool
    ]
    num_layers = shapes[0][0] if shapes and len(shapes[0]) == 2 else 0
    if shapes != [[num_layers, width] for width in chain.widths]:
        raise ConfigError(
            f"{component_label} must return sets of channels [k, width] of type bool for hidden layers of the widths "
            f"{', '.join(map(str, chain.widths))}"
        )
    if (
        not isinstance(client_set_index, Tensor)
        or client_set_index.dtype != torch.int64
        or client_set_index.shape != (len(cohort),)
    ):
        raise ConfigError(f"{component_label} must return an int64 index of {len(cohort)} entries, one for each client")
    if len(client_set_index) and not bool(((client_set_index >= 0) & (client_set_index < num_layers)).all()):
        raise ConfigError(f"{component_label} must return an index of its {num_layers} sets, 0 to {num_layers - 1}")
    return list(channel_sets), client_set_index


def _sample_channel_sets(
    capacity: Capacity, chain: HiddenLayerChannels, federation: Federation
) -> Iterator[list[Tensor]]:
    """Return sets of channels that clients hold in the first rounds, at most two a round, incomplete ones first."""
    count = np.ones((federation.num_replicates, federation.clients))
    for t in range(NUM_TRIAL_ROUNDS):
        sets, index = _held_channels(capacity, federation.make_cohort(count, count, t), chain, t)
        order_by_missing = torch.cat([~layer for layer in sets], 1).sum(1)[index].argsort(descending=True)
        for k in dict.fromkeys(index[order_by_missing].tolist()[:NUM_TRIAL_CHANNEL_SETS]):
            yield [layer[k : k + 1] for layer in sets]


def _check_submodel_support(
    components: Parts, population: Population, server: Server, training: ClientTraining
) -> None:
    """Refuse parts that take clients' rows for whole models.

    Raises:
        ConfigError: naming it, and the remedy.
    """
    strategy, local_rule, name = server.strategy, training.trainer.local_rule, type(components.capacity).__name__
    refusal_reasons: dict[str, Any] = {
        f"strategy={type(strategy).__name__} uses more of the clients' updates than their mean; choose fedavg, "
        "fedprox, fedavgm or fedopt": strategy.server_sees != "mean",
        "some columns stay with the client or are averaged statistics; use columns=all and a model without running "
        "statistics": server.model.columns.has_hidden_columns,
        "an uplink, and an attack, change columns that a client does not hold; use uplink=none attack=none": bool(
            server.uplink.stages
        ),
        "updates that arrive later would be averaged over the wrong clients; use delay=none": components.delay.active,
        "a clock counts transfers of the whole model; use clock=none": components.clock.active,
        f"local={type(local_rule).__name__} keeps whole models of the clients; use local=sgd": bool(
            local_rule.own_models
        ),
        "newcomers train the whole model; set personal.newcomers=0": population.num_newcomers > 0,
        "evaluate=client_mean needs whole models of the clients; use evaluate=global": CLIENT_MEAN
        in components.evaluation.models,
    }
    for reason, is_present in refusal_reasons.items():
        if is_present:
            raise ConfigError(f"capacity={name} gives clients a part of the model, and {reason}, or capacity=full")
