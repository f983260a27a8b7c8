"""Configurations of run folders, whose settings follow one another as on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended
from omegaconf import OmegaConf

from fedsim.app.composition import compose, hydra_context
from fedsim.app.stored_configuration import load_run_configuration
from fedsim.core.errors import ConfigError
from fedsim.studies.attribution.causes import applicable_causes, config_without_causes

RUN = ("dataset=digits", "clients=6", "rounds=1", "device=cpu")
SETTINGS = {
    "linked": (),
    "epochs": ("local_epochs=2",),
    "local set apart": ("local.lr=0.03", "local.batch_size=4", "lr=0.2"),
    "rates per seed": ("seeds=[0,1]", "lr=[0.1,0.2]"),
    "another rule": ("local=momentum", "local_steps=3"),
    "nested choices": ("availability=sine", "availability/base=class_correlated", "partition.alpha=0.3"),
    "clients of the data": ("dataset=synthetic", "partition=natural"),
}
OVERRIDES = (
    ("lr=0.7",),
    ("local_steps=4", "local_epochs=null"),
    ("batch_size=5",),
    ("local_epochs=1", "local_steps=null"),
    ("clients=9",),
)


def resolved(config: Any) -> dict[str, Any]:
    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    for key in ("out", "resume", "trusted"):
        content.pop(key, None)
    return {str(key): value for key, value in content.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_set_after_a_folder_has_the_effect_it_has_on_the_command_line(
    fedsim: Callable[..., Ended], tmp_path: Path, name: str
) -> None:
    """A stored configuration holds `local.lr: 0.1`, where the command line's follows `lr`."""
    words = (*RUN, *SETTINGS[name])
    ended = fedsim(tmp_path, *words, "out=run")
    assert ended.code == 0, ended.err
    for overrides in ((), *OVERRIDES):
        stored, stored_choices = load_run_configuration([str(tmp_path / "run"), *overrides])
        with hydra_context():
            composed, choices = compose((*words, *overrides))
        assert resolved(stored) == resolved(composed)
        assert stored_choices == choices
        causes = applicable_causes(composed, choices)
        assert applicable_causes(stored, stored_choices) == causes
        for cause in causes:
            changed, changed_choices = config_without_causes(stored, stored_choices, [cause])
            expected, expected_choices = config_without_causes(composed, choices, [cause])
            assert resolved(changed) == resolved(expected)
            assert changed_choices == expected_choices
            assert resolved(changed) != resolved(stored)


def test_a_removed_cause_changes_the_settings_of_the_local_rule(fedsim: Callable[..., Ended], tmp_path: Path) -> None:
    assert fedsim(tmp_path, *RUN, "local.lr=0.03", "local.batch_size=4", "out=run").code == 0
    config, choices = load_run_configuration([str(tmp_path / "run")])
    by_name = {cause.name: cause for cause in applicable_causes(config, choices)}
    without_drift, _ = config_without_causes(config, choices, [by_name["drift"]])
    assert (without_drift.local.steps, without_drift.local.lr) == (1, pytest.approx(0.3))
    full_batches, _ = config_without_causes(config, choices, [by_name["batches"]])
    assert full_batches.local.batch_size is None


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        load_run_configuration([str(tmp_path)])
    (tmp_path / "config.yaml").write_text("- a list\n")
    with pytest.raises(ConfigError, match="holds no configuration"):
        load_run_configuration([str(tmp_path)])
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    (tmp_path / "environment.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="give a run folder"):
        load_run_configuration([str(tmp_path)])


def test_a_sweep_in_place_of_a_run_is_told_its_runs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("lr: 0.1\n")
    with pytest.raises(ConfigError, match=rf"is a sweep of 2 runs; name one of them, such as {tmp_path / 'a'}"):
        load_run_configuration([str(tmp_path)])
