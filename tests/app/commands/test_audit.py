"""`fedsim audit`: of overrides and of run folders; its exit status; what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.app.cli import main
from fedsim.core import rng
from fedsim.uplink import private

RUN = [
    "dataset=quadratics", "model=mean", "partition=natural", "clients=6", "rounds=4", "availability=full",
    "uplink=gaussian", "uplink.gaussian.multiplier=2",
]  # fmt: skip


def fedsim(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["fedsim", *words])
    main()


@pytest.mark.usefixtures("composed_once")
def test_a_claim_and_a_lower_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of overrides, and of the run folder that the same overrides make; a wrong claim ends with 1."""
    fedsim(monkeypatch, "audit", *RUN, "--worlds", "400")
    told = capsys.readouterr().out
    assert told.startswith("claimed: ε = 4.729 at δ = 1e-05 after 4 rounds (RDP): one client's rows replaced by zeros")
    assert "ε claimed 4.729, lower bound " in told
    assert "no lower bound exceeds what is claimed\n400 worlds of 4 rounds in " in told
    out = tmp_path / "run"
    fedsim(monkeypatch, *RUN, f"out={out}", "tracking.tensorboard=false", "tracking.progress=none", "rounds=4")
    capsys.readouterr()
    fedsim(monkeypatch, "audit", str(out), "--worlds", "400")
    assert capsys.readouterr().out.splitlines()[:-1] == told.splitlines()[:-1]
    genuine = rng.normal
    monkeypatch.setattr(private.rng, "normal", lambda *arguments: genuine(*arguments) / 2)
    with pytest.raises(SystemExit, match="the run is less private than it says"):
        fedsim(monkeypatch, "audit", str(out), "uplink.gaussian.multiplier=1.5", "--rounds", "2", "--worlds", "1000")
    told = capsys.readouterr().out
    assert "audited: ε = 4.42 at δ = 1e-05 after 2 rounds" in told
    assert told.count("VIOLATED") == 1
    assert "a lower bound exceeds what is claimed" in told


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "nowhere is neither a run folder nor an override KEY=VALUE"),
        (["."], "config.yaml cannot be read"),
        (["uplin=gaussian"], "did you mean 'uplink'"),
        (RUN[:-2], "no stage of uplink adds noise; set uplink=gaussian or tree"),
        ([*RUN, "strategy=mifa"], "more of the rows than their sum"),
        ([*RUN, "--rounds", "5"], "--rounds 5 must be at least 1 and at most the run's rounds=4"),
        ([*RUN, "--worlds", "10"], "--worlds 10 is too few for a bound"),
        ([*RUN, "--confidence", "1"], "--confidence 1.0 must be at least 0.5 and below 1"),
    ],
)
def test_what_cannot_be_audited_is_one_sentence(
    words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        fedsim(monkeypatch, "audit", *words)
    assert str(left.value).startswith("fedsim audit: ")
    assert problem in str(left.value)
