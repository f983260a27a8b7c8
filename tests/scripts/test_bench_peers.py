"""The table of simulators side by side: ratios are of neighbours in time, and a failed script hides nothing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_peers" / "table.py"))


def reported(*seconds: float) -> dict[str, object]:
    return {
        "seconds": list(seconds),
        "setting": "as documented",
        "threads": 1,
        "versions": {"torch": "2"},
        "moved": 1.0,
        "parameters": 10,
    }


def test_ratios_hold_when_the_machine_slows_down() -> None:
    """Every repetition is k times slower than the last, for everybody: the ratio stays 3."""
    runs = {
        "fedsim": [reported(k, k, 9 * k) for k in (1.0, 2.0, 50.0)],
        "other": [reported(3 * k, 3 * k, 30 * k) for k in (1.0, 2.0, 50.0)],
    }
    own, other = TABLE["rows"]("p-mlp", runs)
    assert own["peer"] == "fedsim"
    assert "fedsim_faster" not in own
    assert other["fedsim_faster"] == pytest.approx(3.0)
    assert other["rounds"] == 9


def test_the_best_peer_is_a_simulator() -> None:
    """The plain loop and the bare vmap are references, however fast."""
    runs = {name: [reported(s)] for name, s in {"fedsim": 1.0, "pfl": 4.0, "pfl2": 2.0, "vmap": 0.5}.items()}
    found = TABLE["rows"]("p-cnn", runs)
    assert [row["peer"] for row in found] == ["vmap", "fedsim", "pfl2", "pfl"]
    assert TABLE["against_best"](found) == ("pfl2", pytest.approx(2.0))
    assert "2.00 times as fast as the best peer, pfl2" in TABLE["lines"](found)[-1]


def test_a_failed_repetition_is_left_out_and_a_failed_peer_is_named() -> None:
    runs = {
        "fedsim": [reported(1.0), reported(1.0)],
        "pfl": [{"error": "out of memory"}, reported(5.0)],
        "flwr": [{"error": "no module"}, {"error": "no module"}],
    }
    found = TABLE["rows"]("p-mlp", runs)
    assert found[1]["fedsim_faster"] == pytest.approx(5.0)
    assert found[2] == {"workload": "p-mlp", "peer": "flwr", "error": "no module"}
    assert any("flwr" in line and "no module" in line for line in TABLE["lines"](found))
    assert TABLE["against_best"](found) == ("pfl", pytest.approx(5.0))


def test_without_fedsim_nothing_is_compared() -> None:
    found = TABLE["rows"]("p-mlp", {"pfl": [reported(1.0)]})
    assert TABLE["against_best"](found) is None
