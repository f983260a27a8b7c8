"""Settings that hold only with a choice: what a sweep's run gets of them is what a run alone would be given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

import fedsim as package
from fedsim.app.config import KEYS_WITHOUT_EFFECT, config_folder, identifying_settings, register_resolvers
from fedsim.app.per_choice import add_plus_prefix, apply_choice_settings
from fedsim.app.stored_configuration import load_run_configuration
from fedsim.core.errors import ConfigError

RULES = {  # the rules of one shift, and what each has of its own
    "pfl": [],
    "rrm": ["shift.deploy=round", "shift.redraw=2"],
    "pofl": ["local.history=3"],
    "profl": ["local.history=4", "local.bins=5"],
    "plugin": ["local.explore=6", "local.spread=2"],
    "dfo": ["local.radius=0.2", "lr=0.05"],
}
SHARED = [
    "dataset=gaussian_mean", "partition=natural", "model=mean", "shift=location", "availability=full", "clients=3",
    "rounds=2", "local_steps=4", "batch_size=20", "eval_every=1", "tracking.tensorboard=false",
    "tracking.progress=none", "trainer.executor=loop", "shift.references=none",
]  # fmt: skip
PER_CHOICE = [f"when.local.{rule}.{setting}" for rule, settings in RULES.items() for setting in settings]


def composed(*overrides: str) -> tuple[DictConfig, dict[str, str]]:
    """A configuration with its choices, settings per choice not yet applied."""
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = compose("config", add_plus_prefix(overrides), return_hydra_config=True)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg, choices


def applied(*overrides: str, block: dict[str, Any] | None = None) -> DictConfig:
    """The configuration of a run; `block` is what an experiment file has under `when`."""
    cfg, choices = composed(*overrides)
    if block is not None:
        cfg.when = OmegaConf.create(block)
    apply_choice_settings(cfg, choices, overrides)
    return cfg


@pytest.mark.slow
def test_the_six_rules_of_one_sweep_are_the_runs_alone(fedsim: Callable[..., Ended], tmp_path: Path) -> None:
    rules = ",".join(RULES)
    ended = fedsim(tmp_path, "-m", f"local={rules}", *SHARED, *PER_CHOICE, "out=sweep")
    assert ended.code == 0, ended.err
    for rule, settings in RULES.items():
        assert fedsim(tmp_path, f"local={rule}", *SHARED, *settings, f"out={rule}").code == 0
        ours, alone = (package.load(tmp_path / folder) for folder in (f"sweep/local={rule}", rule))
        configs = [OmegaConf.load(run.folder / "config.yaml") for run in (ours, alone)]
        assert identifying_settings(configs[0], KEYS_WITHOUT_EFFECT) == identifying_settings(
            configs[1], KEYS_WITHOUT_EFFECT
        )  # type: ignore[arg-type]
        for name in ("train_loss", "performative_risk"):
            assert ours.curve(name)[1].tolist() == alone.curve(name)[1].tolist(), (rule, name)
    again = fedsim(tmp_path, "-m", f"local={rules}", *SHARED, *PER_CHOICE, "out=sweep")
    assert "6 finished before" in again.err


def test_a_setting_that_a_run_refuses_fails_that_run_alone(fedsim: Callable[..., Ended], tmp_path: Path) -> None:
    command = ["-m", "local=pfl,pofl", *SHARED, "when.local.pofl.local.histroy=3", "out=sweep"]
    ended = fedsim(tmp_path, *command)
    assert "1 done, 1 failed" in ended.err
    assert "local.histroy is not a setting of this run; did you mean 'local.history'?" in ended.err


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["local=pofl", "when.local.pofl.local.history=6"], "local.history", 6),
        (["local=pfl", "when.local.pofl.local.history=6"], "local.history", None),
        (["local=pofl", "local.history=5", "when.local.pofl.local.history=6"], "local.history", 6),
        (["local=pofl", "when.local.pofl.lr=0.5"], "local.lr", 0.5),
        (["local=pofl", "when.local.pofl.local.lr=${clients}"], "local.lr", 50),
        (["local=pofl", "when.local.pofl.local.box=[-1,1]"], "local.box", [-1, 1]),
        (["availability/base=label_ordered", "when.availability.base.label_ordered.availability.base.low=0.3"],
         "availability.base.low", 0.3),
        (["local/schedule=inverse", "when.local.schedule.inverse.local.schedule.offset=7"], "local.schedule.offset", 7),
        (["when.strategy.fedavg.strategy={server_lr:0.5}"], "strategy.server_lr", 0.5),
        (["strategy=custom", "when.strategy.custom.strategy._target_=own.Class"], "strategy._target_", "own.Class"),
        (["strategy=custom", "when.strategy.custom.strategy.momentum=0.5"], "strategy.momentum", 0.5),
    ],
)  # fmt: skip
def test_settings_hold_with_their_choice(overrides: list[str], key: str, value: Any) -> None:
    cfg = applied(*overrides)
    assert OmegaConf.select(cfg, key) == value
    assert "when" not in cfg


def test_the_command_line_has_the_last_word_against_a_file() -> None:
    block = {"local": {"pofl": {"lr": 0.5, "local": {"history": 6, "growing": True}}}}
    cfg = applied("local=pofl", "local.history=4", block=block)
    assert (cfg.local.history, cfg.local.growing, cfg.lr) == (4, True, 0.5)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["when.local.pofl=3"], "when.local.pofl=3 is not a setting; write when.GROUP.CHOICE.KEY=VALUE"),
        (["when.local=3"], "when.local=3 names no choice"),
        (["when.locl.pofl.lr=3"], "locl is not a group; did you mean 'local'"),
        (["when.local.poflx.lr=3"], "local=poflx is unknown; did you mean 'pofl'?"),
        (["when.local.sgd.local.history=3"], "local.history is not a setting of this run"),
        (["when.local.sgd.out=elsewhere"], "out cannot depend on a choice"),
        (["when.local.sgd.trusted=[os]"], "trusted cannot depend on a choice"),
        (["when.local.sgd.when.local.sgd.lr=1"], "when cannot depend on a choice"),
        (["when.local.sgd.seeds.x=1"], "seeds.x is not a setting of this run"),
    ],
)
def test_what_does_not_exist_is_refused_and_nothing_is_set(overrides: list[str], problem: str) -> None:
    cfg, choices = composed(*overrides)
    before = OmegaConf.to_yaml(cfg)
    with pytest.raises(ConfigError) as refused:
        apply_choice_settings(cfg, choices, overrides)
    assert problem in str(refused.value)
    assert OmegaConf.to_yaml(cfg) == before


@pytest.mark.parametrize("override", ["availability/base=uniform", "partition=iid"])
def test_the_quickstart_takes_another_base_and_partition(override: str) -> None:
    usual, changed = applied("experiment=quickstart"), applied("experiment=quickstart", override)
    assert (usual.availability.base.low, usual.partition.classes_per_client) == (0.05, 1)
    assert ("low" in changed.availability.base) is (override == "partition=iid")
    assert ("classes_per_client" in changed.partition) is (override != "partition=iid")


def test_an_audit_has_the_settings_of_its_choices_too() -> None:
    cfg, _ = load_run_configuration(
        ["strategy=fedavg", "when.strategy.fedavg.clients=7", "when.strategy.fedawe.clients=8"]
    )
    assert cfg.clients == 7
    assert "when" not in cfg
