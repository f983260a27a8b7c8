"""`fedsim info` says what is installed, here and now."""

import importlib.metadata

import pytest
import torch
from packaging.requirements import Requirement

from fedsim import __version__
from fedsim.app.cli import main
from fedsim.app.commands import info


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_it_names_versions_threads_and_the_data_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr("sys.argv", ["fedsim", "info"])
    main()
    facts = shown(capsys)
    assert facts["fedsim"].startswith(__version__)
    assert facts["torch"] == importlib.metadata.version("torch")
    assert facts["threads"] == f"{torch.get_num_threads()} (OMP_NUM_THREADS=7)"
    assert facts["data"] == f"{tmp_path} (FEDSIM_DATA)"
    assert facts["found"] == "none"
    assert "mnist" in facts["missing"]
    assert "cores" in facts["cpu"]


def test_an_extra_lists_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=1", "pytest>=8; extra == 'good'", "no-such-package; extra == 'bad'", "pytest>=99; extra == 'bad'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    monkeypatch.setattr(
        importlib.metadata, "metadata", lambda _: type("M", (), {"get_all": lambda *_: ["good", "bad"]})()
    )
    assert info.missing_packages_by_extra() == {"good": [], "bad": ["no-such-package", "pytest"]}
    assert not info.is_installed(Requirement("pytest>=99"))


def test_a_surplus_word_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fedsim", "info", "lr=1"])
    with pytest.raises(SystemExit):
        main()
    assert "unrecognized arguments: lr=1" in capsys.readouterr().err
