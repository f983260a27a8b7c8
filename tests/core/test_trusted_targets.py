"""What a configuration may call: trusted packages and the user's own code, by what a name leads to."""

from __future__ import annotations

import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch

from fedsim import load
from fedsim.core import ConfigError
from fedsim.core.targets import CLOSED, PACKAGES, check_all, found, trusting


@pytest.mark.parametrize(
    "target",
    ["torch.nn.Linear", "torch.nn.functional.softplus", "torch.optim.Adam", "torchvision.models.resnet18",
     "fedsim.models.MLP", "fedsim.strategies.FedAvg", "fedsim.run.Stop", "sklearn.linear_model.Ridge"],
)  # fmt: skip
def test_what_models_are_made_of_is_found(target: str) -> None:
    assert callable(found("model._target_", target))


@pytest.mark.parametrize(
    "target",
    ["os.system", "posix.system", "subprocess.Popen", "builtins.eval", "functools.partial", "pathlib.Path",
     "shutil.rmtree", "pickle.loads", "hydra.utils.instantiate", "numpy.load", "torch.os.system",
     "torch.nn.modules.module.torch.hub.load", "torch.load",
     "torch.utils.cpp_extension.load", "torch.multiprocessing.spawn", "fedsim.core.files.write_json",
     "fedsim.app.cli.main", "fedsim.models.losses.torch.save", "sys.exit"],
)  # fmt: skip
def test_what_runs_other_things_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\._target_='{re.escape(target)}' is .*add trusted=\[\w+\]"):
        found("model._target_", target)


def test_own_code_may_be_called_and_what_it_imported_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_own.py").write_text("import os\nfrom subprocess import run\nclass Net: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert found("model._target_", "mine_own.Net").__name__ == "Net"
    with pytest.raises(ConfigError, match=r"'mine_own\.os\.system' is posix\.system, and that is of the package posix"):
        found("model._target_", "mine_own.os.system")
    with pytest.raises(ConfigError, match=r"'mine_own\.run' is subprocess\.run"):
        found("model._target_", "mine_own.run")
    with pytest.raises(ImportError):
        found("model._target_", "mine_own.Nothing")
    with pytest.raises(ImportError):
        found("model._target_", "mine_nowhere.Net")


def test_nothing_is_imported_before_it_is_known_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(ConfigError):
        found("model._target_", "this.s")
    assert "this" not in sys.modules


def test_whom_the_user_trusts_is_called_within_the_block_alone() -> None:
    with trusting(["pathlib"]):
        assert found("x", "pathlib.Path") is Path
        with pytest.raises(ConfigError):
            found("x", "os.system")
    with pytest.raises(ConfigError):
        found("x", "pathlib.Path")


def test_every_depth_is_looked_at() -> None:
    fine = {"_target_": "torch.nn.Linear", "a": [{"b": {"_target_": "fedsim.models.MLP"}}], "c": "os.system"}
    check_all("model", fine)
    with pytest.raises(ConfigError, match=r"model\.a\.b\._target_='os\.system' is of"):
        check_all("model", {"a": [[{"b": {"_target_": "os.system"}}]]})


def test_what_is_closed_exists() -> None:
    """Else a name was mistyped, or PyTorch has another by now."""
    for name in CLOSED:
        assert name.partition(".")[0] in PACKAGES
        if name.startswith(("fedsim.", "torch.")) and name not in ("torch.ops", "torch.classes"):
            assert pkgutil.resolve_name(name) is not None, name
    assert torch.nn.Linear.__module__.startswith("torch.")


def test_a_run_folder_of_a_stranger_calls_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("# round: r\nround,seed,test_loss\n0,0,1.0\n")
    target = f"dataset:\n  _target_: os.mkdir\n  path: {tmp_path / 'stolen'}\ntrusted: [os]\n"
    (tmp_path / "config.yaml").write_text(target)
    with pytest.raises(ConfigError, match=r"dataset\._target_='os\.mkdir' is of the package os"):
        load(tmp_path).dataset()
    assert not (tmp_path / "stolen").exists()
