"""Causes that can reduce the performance of a federated run, and how to remove each of them from a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedsim.app.build import build
from fedsim.app.composition import compose, hydra_context
from fedsim.core.errors import ConfigError
from fedsim.data import datasets
from fedsim.data.samples.stored import StoredClientData

ChoiceByGroup = dict[str, str]  # config group → choice
PRIVACY_STAGES = {"gaussian", "tree", "clip"}
MAX_CAUSES = 5  # causes of one attribution, which needs 2^5 runs


@dataclass(frozen=True)
class DegradationCause:
    """A cause of lower performance that is removed in the counterfactual run.

    Attributes:
        name: its name on the command line.
        label: its label in tables and pictures.
        override_function: function of a run's configuration and the choice of each group; returns the groups and keys
            that replace the cause, with their values, or None if the run does not have the cause.
        removal: a description of the replacement.
    """

    name: str
    label: str
    override_function: Callable[[DictConfig, ChoiceByGroup], dict[str, Any] | None]
    removal: str


def _choice_replacement(
    name: str, choice: str, *equivalents: str
) -> Callable[[DictConfig, ChoiceByGroup], dict[str, Any] | None]:
    """Return a replacement that sets a group's choice unless the run has it, or one of `equivalents`, already."""

    def cause_removal_overrides(config: DictConfig, choice_by_group: ChoiceByGroup) -> dict[str, Any] | None:
        return {name: choice} if choice_by_group.get(name, choice) not in (choice, *equivalents) else None

    return cause_removal_overrides


def _one_step_replacement(config: DictConfig, choices: ChoiceByGroup) -> dict[str, Any] | None:
    """Replace the settings of the local rule, which follow `lr` and `local_steps` unless the user set them apart."""
    steps, rates = OmegaConf.select(config, "local.steps"), OmegaConf.select(config, "local.lr")
    if steps is None or int(steps) < 2 or rates is None:  # with epochs, the number of steps differs between clients
        return None
    total = [steps * rate for rate in rates] if OmegaConf.is_list(rates) else steps * rates
    return {"local_steps": 1, "local.steps": 1, "lr": total, "local.lr": total}


def _iid_partition_overrides(config: DictConfig, choices: ChoiceByGroup) -> dict[str, Any] | None:
    if choices.get("partition") in ("iid", "natural", None):
        return None
    validation = OmegaConf.select(config, "partition.validation")
    return {"partition": "iid"} | ({} if validation is None else {"partition.validation": validation})


def _full_batch_overrides(config: DictConfig, choices: ChoiceByGroup) -> dict[str, Any] | None:
    if OmegaConf.select(config, "local.batch_size") is None or _draws_fresh_samples(config):
        return None
    return {"batch_size": None, "local.batch_size": None}


def _has_full_batches(config: DictConfig, trusted_packages: tuple[str, ...]) -> bool:
    """Whether each client's batch holds all its samples; no IID share of the same data is larger than the largest."""
    if OmegaConf.select(config, "local.sampling") == "replacement":
        return False
    simulation, _, _ = build(config, trusted=trusted_packages)
    data = simulation.population.data
    return isinstance(data, StoredClientData) and int(data.sizes.max()) <= int(
        OmegaConf.select(config, "local.batch_size")
    )


def _draws_fresh_samples(config: DictConfig) -> bool:
    """Whether the data set is a stream of fedsim, of which a client has no full batch."""
    module, _, name = str(OmegaConf.select(config, "dataset._target_")).rpartition(".")
    dataset_class = getattr(datasets, name, None) if module == datasets.__name__ else None
    return isinstance(dataset_class, type) and issubclass(dataset_class, datasets.StreamDataset)


def _uplink_replacement(private: bool) -> Callable[[DictConfig, ChoiceByGroup], dict[str, Any] | None]:
    def cause_removal_overrides(config: DictConfig, choice_by_group: ChoiceByGroup) -> dict[str, Any] | None:
        stages = {str(name) for name in config.uplink} - {"_target_"} if config.get("uplink") else set()
        is_private = bool(stages & {"gaussian", "tree"})
        if not stages or choice_by_group.get("uplink") == "none" or is_private != private:
            return None
        if private and not stages <= PRIVACY_STAGES:
            raise ConfigError(
                f"uplink={choice_by_group.get('uplink')} compresses and adds noise, which cannot be removed "
                "separately; leave out "
                "the cause privacy by --causes"
            )
        return {"uplink": "none"}

    return cause_removal_overrides


CAUSES = (
    DegradationCause(
        "availability",
        "availability",
        _choice_replacement("availability", "full"),
        "all clients participate in each round",
    ),
    DegradationCause("drift", "client drift", _one_step_replacement, "one local step of the same total length"),
    DegradationCause("heterogeneity", "heterogeneity", _iid_partition_overrides, "IID shares of the same data"),
    DegradationCause("batches", "batch noise", _full_batch_overrides, "full batches"),
    DegradationCause(
        "shift", "performative shift", _choice_replacement("shift", "none"), "data that do not react to the model"
    ),
    DegradationCause(
        "data_drift", "data drift", _choice_replacement("drift", "none"), "data whose distribution does not change"
    ),
    DegradationCause("attack", "attack", _choice_replacement("attack", "none"), "no attacker"),
    DegradationCause("contamination", "contamination", _choice_replacement("contamination", "none"), "clean samples"),
    DegradationCause("privacy", "privacy noise", _uplink_replacement(private=True), "neither clipping nor noise"),
    DegradationCause("compression", "compression", _uplink_replacement(private=False), "uncompressed updates"),
    DegradationCause(
        "staleness", "staleness", _choice_replacement("delay", "none"), "updates that arrive in their round"
    ),
    DegradationCause("deadlines", "deadlines", _choice_replacement("clock", "none"), "no deadline"),
    DegradationCause(
        "stragglers", "partial work", _choice_replacement("work", "all"), "each client computes all its local steps"
    ),
)


def applicable_causes(
    config: DictConfig,
    choice_by_group: ChoiceByGroup,
    cause_names: Iterable[str] | None = None,
    trusted_packages: tuple[str, ...] = (),
) -> list[DegradationCause]:
    """Return the named causes, or without names the first `MAX_CAUSES` of `CAUSES` that the run has.

    Batches are no cause if the samples of each client fit in one batch.

    Args:
        config, choice_by_group: of the run.
        cause_names: the causes that the user names.
        trusted_packages: those that the user trusts.

    Raises:
        ConfigError: a name is unknown, the run does not have a named cause or has no causes, or too many are named.
    """
    if cause_names is None:
        present_causes = [cause for cause in CAUSES if cause.override_function(config, choice_by_group) is not None]
        if any(cause.name == "batches" for cause in present_causes) and _has_full_batches(config, trusted_packages):
            present_causes = [cause for cause in present_causes if cause.name != "batches"]
        present_causes = present_causes[:MAX_CAUSES]
        if not present_causes:
            raise ConfigError(
                "this run has none of the causes that can be removed: "
                f"{', '.join(cause.name for cause in CAUSES)}; there is nothing to attribute"
            )
        return present_causes
    by_name = {cause.name: cause for cause in CAUSES}
    chosen_causes = []
    for name in cause_names:
        if name not in by_name:
            raise ConfigError(f"--causes {name} is unknown; choose among {', '.join(by_name)}")
        if by_name[name].override_function(config, choice_by_group) is None:
            raise ConfigError(f"--causes {name}: this run does not have it; leave it out")
        if name == "batches" and _has_full_batches(config, trusted_packages):
            raise ConfigError(
                "--causes batches: the samples of each client fit in one batch, so that there is no batch noise; leave "
                "it out"
            )
        chosen_causes.append(by_name[name])
    if len(chosen_causes) > MAX_CAUSES:
        raise ConfigError(
            f"--causes names {len(chosen_causes)} causes, which need 2^{len(chosen_causes)} runs; "
            f"name up to {MAX_CAUSES}"
        )
    return chosen_causes


def config_without_causes(
    config: DictConfig, choice_by_group: ChoiceByGroup, causes: Iterable[DegradationCause]
) -> tuple[DictConfig, ChoiceByGroup]:
    """Return the configuration and choices of the same run without some causes."""
    changed_config, changed_choices = OmegaConf.create(OmegaConf.to_container(config)), dict(choice_by_group)
    assert isinstance(changed_config, DictConfig)
    for cause in causes:
        for config_key, replacement_value in (cause.override_function(config, choice_by_group) or {}).items():
            if config_key in changed_choices:
                OmegaConf.update(
                    changed_config, config_key, _default_group_configuration(config_key, replacement_value), merge=False
                )
                nested_groups = [group for group in changed_choices if group.startswith(f"{config_key}/")]
                for group in nested_groups:
                    del changed_choices[group]
                changed_choices[config_key] = replacement_value
            else:
                OmegaConf.update(changed_config, config_key, replacement_value, merge=False)
    return changed_config, changed_choices


@functools.cache
def _default_group_configuration(group: str, choice: str) -> Any:
    """Return the configuration of a group's choice, composed with defaults otherwise."""
    with hydra_context():
        content = compose((f"{group}={choice}",))[0][group]
    return OmegaConf.to_container(content) if OmegaConf.is_config(content) else content
