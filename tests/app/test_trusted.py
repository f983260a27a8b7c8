"""Whom a configuration may call is said by whoever types the command, and by no file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from small_runs import QUICK

from fedsim.app import hydra_section
from fedsim.app.build import build
from fedsim.app.composition import hydra_context
from fedsim.app.config import config_folder
from fedsim.core.errors import ConfigError
from fedsim.studies.board import submission
from fedsim.studies.board.board import BoardEntry
from fedsim.studies.reproduce.recipe import RecipeSetting
from fedsim.studies.reproduce.runner import compose_config as composed
from fedsim.studies.reproduce.runner import job_local_tasks, plan_jobs, trusted_packages
from fedsim.trainer import run_to_completion

SMALL = [*QUICK, "rounds=1", "dataset=quadratics", "partition=natural", "model=mean", "trainer.executor=loop"]


def test_a_file_cannot_trust(fedsim, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    stolen = tmp_path / "stolen"
    (tmp_path / "theirs" / "experiment" / "nice.yaml").write_text(
        f"# @package _global_\ntrusted: [os]\nmodel:\n  _target_: os.mkdir\n  path: {stolen}\n"
    )
    ended = fedsim(tmp_path, "--config-dir", "theirs", *SMALL, "experiment=nice", "out=o")
    assert "fedsim: trusted=['os'] is set in a file; give it on the command line" in ended.err
    assert not stolen.exists()
    ended = fedsim(tmp_path, "--config-dir", "theirs", *SMALL, "experiment=nice", "out=o", "trusted=[]")
    assert "model._target_='os.mkdir' is of the package os" in ended.err
    assert not stolen.exists()


def test_build_refuses_trust_that_nobody_typed() -> None:
    with hydra_context():
        cfg, _ = composed((*SMALL, "trusted=[os]", "model=custom", "model._target_=os.getcwd"))
    with pytest.raises(ConfigError, match=r"^trusted=\['os'\] is set in a file"):
        build(cfg)
    with pytest.raises(ConfigError, match=r"^model\._target_='os\.getcwd' is .*posix\.getcwd, and that"):
        build(cfg, trusted=["os"])


def test_neither_recipes_nor_entries_can_trust(tmp_path: Path) -> None:
    setting = RecipeSetting(
        (), (*SMALL, "trusted=[os]", "model=custom", "model._target_=os.mkdir", "+model.path=stolen")
    )
    (job,) = plan_jobs([setting], tmp_path, ())
    with pytest.raises(ConfigError, match=r"^trusted=\['os'\] is set in a file"):
        run_to_completion(job_local_tasks(job, without_progress=True))
    with pytest.raises(ConfigError, match="has trusted=…, which counts on the command line alone"):
        submission.add_board_entries(tmp_path, None, {"x": BoardEntry(["strategy=fedavg", "+trusted=[os]"])}, "d")  # type: ignore[arg-type]
    assert not (tmp_path / "stolen").exists()
    assert trusted_packages(["lr=1", "trusted=[mypackage, other]"]) == ("mypackage", "other")
    assert trusted_packages(["lr=1"]) == ()


def test_text_in_a_setting_is_not_resolved_again() -> None:
    """Hydra resolves `\\${…}` to text; a second resolution made an object of it that nobody had looked at."""
    text = r"\${oc.decode:'{_target_: os.mkdir, path: stolen}'}"
    with hydra_context():
        cfg, _ = composed(tuple(SMALL))
    cfg.strategy.server_lr = text
    with pytest.raises(ConfigError, match=r"strategy\.server_lr="):
        build(cfg)
    assert not Path("stolen").exists()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("callbacks: {x: {_target_: os.mkdir, path: stolen}}", r"hydra\.callbacks: _target_='os\.mkdir'"),
        ("job_logging: {handlers: {x: {'()': os.mkdir, path: stolen}}}", r"hydra\.job_logging: \(\)='os\.mkdir'"),
        ("job_logging: {handlers: {x: {class: subprocess.Popen, args: [ls]}}}", "class='subprocess.Popen'"),
        ("hydra_logging: {handlers: {x: {class: logging.StreamHandler, stream: 'ext://os.system'}}}", "ext://os.system"),
        ("job: {env_set: {LD_PRELOAD: x}}", r"hydra\.job\.env_set=\{'LD_PRELOAD': 'x'\} is set in a file"),
    ],
)  # fmt: skip
def test_hydras_own_section_of_a_file_calls_nothing(
    section: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs" / "experiment"
    theirs.mkdir(parents=True)
    (theirs / "nice.yaml").write_text(f"# @package _global_\nhydra:\n  {section}\n")
    search = [f"hydra.searchpath=[{tmp_path / 'theirs'}]", "experiment=nice"]
    with hydra_section.refuse_unsafe_hydra_sections(), initialize_config_dir(str(config_folder()), version_base="1.3"):
        compose("config", return_hydra_config=True)
        with pytest.raises(ConfigError, match=said):
            compose("config", search, return_hydra_config=True)
    assert not (tmp_path / "stolen").exists()


@pytest.mark.slow
def test_whoever_types_the_command_can(fedsim, tmp_path: Path) -> None:
    said = fedsim(tmp_path, *SMALL, "model._target_=collections.Counter", "out=o")
    assert "add trusted=[collections]" in said.err
    said = fedsim(tmp_path, *SMALL, "model._target_=collections.Counter", "out=o", "trusted=[collections]")
    assert "trusted" not in said.err
    assert "'collections.Counter' is a class, but not an nn.Module" in said.err


@pytest.mark.parametrize("given", ["-1", "0.5", "mypackage"])
def test_what_is_no_list_of_packages_is_refused_in_a_sentence(fedsim, tmp_path: Path, given: str) -> None:
    ended = fedsim(tmp_path, "rounds=1", "clients=2", f"trusted={given}")
    assert ended.code == 1
    assert "must be a list of packages' names, such as [mypackage]" in ended.err
