"""What the command line does before a run: help imports nothing heavy, and a configuration is composed once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedsim.app import cli, help_page, sweep

LIBRARIES = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "torchvision", "tensorboard", "sympy")
NOT_FOR_A_ROUND = ("torch._dynamo", "sympy", "scipy", "matplotlib", "pandas", "sklearn", "torchvision", "torchmetrics")


def imported(folder: Path, arguments: list[str], names: tuple[str, ...]) -> str:
    """Which of these modules `fedsim` with these arguments imports."""
    code = (
        "import atexit, sys; from fedsim.app.cli import main; "
        f"atexit.register(lambda: print('imported', [name for name in {names} if name in sys.modules])); "
        f"sys.argv = {['fedsim', *arguments]}; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_help_imports_no_library_of_numbers(tmp_path: Path) -> None:
    assert imported(tmp_path, ["--help"], LIBRARIES) == "imported []"


@pytest.mark.slow
def test_a_round_imports_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    """With TensorBoard, as by default."""
    assert imported(tmp_path, ["rounds=1", "out=here"], NOT_FOR_A_ROUND) == "imported []"
    assert list(tmp_path.glob("here/*/events.out.tfevents.*"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Has the command line compose; returns the configuration, Hydra's section included, and the number of compositions
    or the command's error."""

    def run(*arguments: str) -> tuple[str, int]:
        configurations, compositions = list[str](), list[Any]()

        def job(cfg: DictConfig) -> None:
            configurations.append(OmegaConf.to_yaml(cfg) + OmegaConf.to_yaml(HydraConfig.get()))

        compose = ConfigLoaderImpl._load_configuration_impl

        def counted(*given: Any, **options: Any) -> DictConfig:
            compositions.append(given)
            return compose(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(cli, "_run_job", job)
            patch.setattr(sweep.SweepCallback, "records", None)
            patch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
            patch.setattr(sys, "argv", ["fedsim", *arguments, f"hydra.run.dir={tmp_path / 'run'}"])
            try:
                cli._hand_to_hydra()
            except SystemExit as end:
                return f"{end}{capsys.readouterr().err}", len(compositions)
        return "\n".join(configurations), len(compositions)

    return run


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "compositions"),
    [
        (["rounds=1"], 1),
        pytest.param(["strategy=fedawe", "+new=1", "hydra.verbose=false"], 1, marks=SLOW),
        pytest.param(["lr=0.1,0.2"], None, marks=SLOW),
        pytest.param(["nokey=1"], None, marks=SLOW),
    ],
)
def test_one_composition_gives_what_two_give(
    call: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], compositions: int | None
) -> None:
    once, count = call(*arguments)
    assert compositions is None or count == compositions
    monkeypatch.setattr(cli, "reuse_composition", contextlib.nullcontext)
    twice, count = call(*arguments)
    assert once == twice
    assert "lr" in once or "nokey" in once
    assert compositions is None or count == 2


@pytest.mark.slow
def test_a_file_can_ask_for_a_sweep(call: Any, tmp_path: Path) -> None:
    """By hydra.mode, which is read before the run."""
    (tmp_path / "experiment").mkdir()
    file = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {lr: '0.1,0.2'}}}\n"
    (tmp_path / "experiment" / "two.yaml").write_text(file)
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    configurations, _ = call("--config-dir", str(tmp_path), "experiment=two", folder)
    assert [line for line in configurations.splitlines() if line.startswith("lr:")] == ["lr: 0.1", "lr: 0.2"]


def test_groups_are_those_that_hydra_lists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    listings = []

    def listed(hydra: Hydra) -> dict[str, list[str]]:
        choices = of_help_page(hydra)
        listings.append(choices)
        for group in ("", "strategy", "availability", "hydra"):  # each call copies Hydra's sources
            prefix = f"{group}/" if group else ""
            for name in hydra.config_loader.list_groups(group):
                assert choices.get(prefix + name) or any(key.startswith(f"{prefix}{name}/") for key in choices)
            options = hydra.config_loader.get_group_options(group)
            assert not group or choices.get(group, []) == options
        return choices

    of_help_page = help_page.choices_by_group
    monkeypatch.setattr(help_page, "choices_by_group", listed)
    monkeypatch.setattr(sys, "argv", ["fedsim", "--help"])
    with pytest.raises(SystemExit) as end:
        cli._hand_to_hydra()
    assert not end.value.code
    assert "fedawe" in capsys.readouterr().out
    assert "fedawe" in listings[0]["strategy"]
