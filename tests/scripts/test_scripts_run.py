"""Every script runs, at a tiny size and without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
try:
    from benches import BENCHMARKS
finally:
    sys.path.pop()

FIGURES = {benchmark.script: benchmark.tiny for benchmark in BENCHMARKS.values()}  # --json holds their figures
TESTED = {  # by a test of their own
    "algorithms_page.py": "test_algorithms_page.py",
    "bare_names.py": "test_scripts_run.py",
    "bench_frozen.py": "test_scripts_run.py",
    "benches.py": "test_performance_page.py",
    "calibration_page.py": "test_results_pages.py",
    "claims_page.py": "test_results_pages.py",
    "command_line_page.py": "test_command_line_page.py",
    "config_reference.py": "test_config_reference.py",
    "docs_site/api.py": "../test_docs_site.py",
    "docs_site/docstrings.py": "../test_docs_site.py",
    "docs_site/formulas.py": "../test_docs_site.py",
    "docs_site/hooks.py": "../test_docs_site.py",
    "docs_site/links.py": "../test_docs_site.py",
    "draw_imports.py": "test_scripts_run.py",
    "gallery.py": "test_results_pages.py",
    "judge_variants.py": "test_judge_variants.py",
    "metrics_page.py": "test_metrics_page.py",
    "mutants.py": "test_mutants.py",
    "notebook.py": "../test_notebook.py",
    "page_pictures.py": "test_page_pictures.py",
    "thumbnails.py": "test_results_pages.py",
    "performance_page.py": "test_performance_page.py",
    "printed_output.py": "../test_printed_numbers.py",
    "redraw_figures.py": "test_redraw_figures.py",
    "same_numbers.py": "test_same_numbers.py",
}
IMPORTED = {  # by a script that runs
    "bench_models.py": "bench_trial.py",
    "bench_options.py": "bench_peak.py",
    "bench_peers/fedlab_torchvision.py": "bench_peers/peer_fedlab.py",
    "bench_peers/table.py": "bench_peers/run.py",
    "bench_peers/workload.py": "bench_peers/run.py",
    "bench_population.py": "bench.py",
    "bench_record.py": "bench.py",
    "bench_rounds.py": "bench.py",
    "bench_workloads.py": "bench.py",
    "papers.py": "claims_page.py",
}
PEERS = {  # script → the environment in scripts/bench_peers/.envs that it needs; None is that of fedsim
    "bench_peers/peer_fedjax.py": "fedjax",
    "bench_peers/peer_fedlab.py": "fedlab",
    "bench_peers/peer_fedsim.py": None,
    "bench_peers/peer_flwr.py": "flwr",
    "bench_peers/peer_loop.py": None,
    "bench_peers/peer_pfl.py": "pfl",
    "bench_peers/peer_vmap.py": None,
}
ALL = sorted(
    path.relative_to(SCRIPTS).as_posix()
    for path in SCRIPTS.rglob("*.py")
    if ".envs" not in path.relative_to(SCRIPTS).parts
)


def run(script: str, *arguments: str) -> str:
    return finished(sys.executable, str(SCRIPTS / script), *arguments)


def finished(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ALL)
def test_a_script_is_run_by_a_test(script: str) -> None:
    """A new script needs an entry in one of the tables above."""
    assert sum(script in table for table in (FIGURES, TESTED, IMPORTED, PEERS)) == 1
    if script in TESTED:
        test = (Path(__file__).parent / TESTED[script]).read_text(encoding="utf-8")
        assert Path(script).stem in test or Path(script).parent.name in test
    if script in IMPORTED:
        source = (SCRIPTS / IMPORTED[script]).read_text(encoding="utf-8")
        assert re.search(rf"^(import|from) {Path(script).stem}\b", source, re.M)


def test_the_tables_name_no_script_that_is_gone() -> None:
    assert FIGURES.keys() | TESTED.keys() | IMPORTED.keys() | PEERS.keys() == set(ALL)


def test_names_that_cannot_be_guessed_do_not_become_more() -> None:
    assert "bindings are bare words" in run("bare_names.py")


@pytest.mark.slow
def test_rounds_with_and_without_cached_layers_are_timed() -> None:
    sizes = {"width": 8, "layers": 2, "rounds": 1, "epochs": 1, "repeat": 1}
    printed = run("bench_frozen.py", *(part for name, size in sizes.items() for part in (f"--{name}", str(size))))
    *_, ratio, ratio_of_rounds = map(float, printed.splitlines()[-1].split())
    assert min(ratio, ratio_of_rounds) > 0


@pytest.mark.slow
@pytest.mark.parametrize("script", FIGURES)
def test_a_benchmark_gives_figures(script: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert run(script, *FIGURES[script], "--json", str(out))
    record = json.loads(out.read_text())
    assert record["rows"]
    assert script.rpartition("/")[2] in record["made"]["command"]
    assert record["made"]["machine"]["cores"] >= 1
    assert '"error"' not in out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", PEERS)
def test_a_simulator_does_the_work(script: str) -> None:
    """Its script raises an error if it took other steps than the workload has, or other rounds."""
    name, python = PEERS[script], sys.executable
    if name is not None:
        python = str(SCRIPTS / "bench_peers" / ".envs" / name / "bin" / "python")
        if not Path(python).exists():
            pytest.skip(f"{name} is not installed: python scripts/bench_peers/run.py --only {name} installs it")
    said = finished(python, str(SCRIPTS / script), "p-mlp", "--rounds", "2", "--warm-up", "1")
    report = json.loads(next(line for line in said.splitlines() if line.startswith('{"seconds"')))
    assert len(report["seconds"]) == 2
    assert report["steps"] == 3 * 50 * 5


@pytest.mark.slow
def test_imports_are_drawn(tmp_path: Path) -> None:
    run("draw_imports.py", "--out", str(tmp_path / "imports.svg"))
    assert "<svg" in (tmp_path / "imports.svg").read_text()
