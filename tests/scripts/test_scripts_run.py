"""Every script runs, at a tiny size and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FIGURES = {  # script → arguments of a small run, whose figures --json holds
    "bench.py": ["--only", "a", "--repeat", "1"],
    "bench_executors.py": ["--only", "linear", "--repeat", "1", "--seconds", "0.01"],
    "bench_peak.py": ["--only", "c", "--active", "1", "--repeat", "1"],
    "bench_peers/run.py": ["--only", "fedsim,loop,vmap", "--workloads", "p-mlp", "--rounds", "2", "--repeat", "1"],
    "bench_precision.py": ["--only", "c", "--active", "1", "--steps", "1", "--repeat", "1"],
    "bench_sweeps.py": ["--only", "means", "--repeat", "1", "--rounds", "2"],
    "bench_trial.py": ["--only", "digits_cnn", "--repeat", "1", "--trials", "1", "--seconds", "0.01"],
}
ELSEWHERE = {  # run by another test, or by none
    "algorithms_page.py": "test_algorithms_page.py",
    "metrics_page.py": "test_metrics_page.py",
    "claims_page.py": "test_results_pages.py",
    "config_reference.py": "test_config_reference.py",
    "gallery.py": "test_results_pages.py",
    "mutants.py": "test_mutants.py",
    "notebook.py": "../test_notebook.py",
    "page_pictures.py": "test_page_pictures.py",
    "command_line_page.py": "test_command_line_page.py",
    "printed_output.py": "../test_printed_numbers.py",
    "same_numbers.py": "test_same_numbers.py",
    "bare_names.py": "test_scripts_run.py",
    "bench_peers/peer_flwr.py": None,  # needs Flower, in an environment of its own
    "client_memory.py": None,  # has one size, of gigabytes
    "draw_imports.py": "test_scripts_run.py",
}


def run(script: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_scripts_are_run_by_some_test() -> None:
    mains = [path for path in SCRIPTS.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert {path.relative_to(SCRIPTS).as_posix() for path in mains} == FIGURES.keys() | ELSEWHERE.keys()
    assert all(test is None or (Path(__file__).parent / test).exists() for test in ELSEWHERE.values())


def test_names_that_cannot_be_guessed_do_not_become_more() -> None:
    assert "bindings are bare words" in run("bare_names.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", FIGURES)
def test_a_benchmark_gives_figures(script: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert run(script, *FIGURES[script], "--json", str(out))
    assert json.loads(out.read_text())
    assert '"error"' not in out.read_text()


@pytest.mark.slow
def test_imports_are_drawn(tmp_path: Path) -> None:
    run("draw_imports.py", "--out", str(tmp_path / "imports.svg"))
    assert "<svg" in (tmp_path / "imports.svg").read_text()
