"""Measured figures on the pages are those of the committed files, which say where they come from."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "performance_page.py")))
RECORDS = SCRIPT.read()


def test_pages_have_the_figures_of_the_files() -> None:
    for path, write in ((SCRIPT.PAGE, SCRIPT.page), (SCRIPT.README, SCRIPT.readme)):
        text = path.read_text(encoding="utf-8")
        assert write(text, RECORDS) == text, "python scripts/performance_page.py"
    assert {name for _, name, _ in SCRIPT.BLOCK.findall(SCRIPT.PAGE.read_text(encoding="utf-8"))} == set(SCRIPT.BLOCKS)


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_says_where_its_figures_come_from(name: str) -> None:
    made = RECORDS[name]["made"]
    assert made["command"]
    assert len(made["commit"].rstrip("+")) == 40
    assert made["machine"]["cores"]
    assert "copied_from" in made or made["versions"]["torch"]


def test_another_figure_changes_both_pages() -> None:
    """Of fedsim's round in the comparison of simulators, whose headline is in the README."""
    records = json.loads(json.dumps(RECORDS))
    row = next(row for row in records["peers"]["rows"] if (row["workload"], row["peer"]) == ("p-mlp", "fedsim"))
    row["seconds"] = 0.4321
    assert "| fedsim | 0.432 |" in SCRIPT.page(SCRIPT.PAGE.read_text(encoding="utf-8"), records)
    assert "| 432 ms per round" in SCRIPT.readme(SCRIPT.README.read_text(encoding="utf-8"), records)


def test_figures_of_now_name_machine_and_commit() -> None:
    made = {"date": "2027-01-02", "commit": "abcdef0123" + "0" * 30 + "+", "versions": {"torch": "2.9.0"}}
    made["machine"] = {"gpu": None, "processor": "A processor", "platform": "Linux", "cores": 8}
    said = SCRIPT.provenance("peak", {"made": made, "rows": []})
    expected = "Measured on 2027-01-02 at commit abcdef0 with changes on A processor, 8 cores, torch 2.9.0"
    assert said.startswith(f"*{expected}: [figures/peak.json]")


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """scripts/benches.py with one benchmark, which counts its runs, and with a checksum of the code."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "benches", raising=False)
    import benches  # type: ignore[import-not-found]

    script = tmp_path / "count.py"
    script.write_text(
        "import sys; from pathlib import Path; import bench_record\n"
        f"bench_record.code = lambda: 'now'; runs = Path({str(tmp_path / 'runs')!r})\n"
        "runs.write_text(runs.read_text() + '|' if runs.exists() else '|')\n"
        "bench_record.save(sys.argv[-1], [1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    monkeypatch.setattr(benches, "BENCHMARKS", {"count": benches.Benchmark(str(script))})
    monkeypatch.setattr(benches.bench_record, "code", lambda: "now")
    return benches  # type: ignore[no-any-return]


def call(benches: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["benches.py", *map(str, arguments)])
    code: int = benches.main()
    return code


@pytest.mark.slow
def test_a_second_call_measures_what_is_missing(
    benches: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    assert call(benches, monkeypatch, "--out", out) == 0
    assert call(benches, monkeypatch, "--out", out) == 0
    assert runs.read_text() == "|"
    monkeypatch.setattr(benches.bench_record, "code", lambda: "changed")
    assert call(benches, monkeypatch, "--out", out) == 0
    assert runs.read_text() == "||"
    assert call(benches, monkeypatch, "--out", out, "--again") == 0
    assert runs.read_text() == "|||"
    (tmp_path / "count.py").write_text("raise SystemExit(3)")
    assert call(benches, monkeypatch, "--out", tmp_path / "elsewhere") == 1


def test_only_the_same_code_on_the_same_machine_has_measured(benches: ModuleType, tmp_path: Path) -> None:
    file, machine = tmp_path / "count.json", benches.bench_record.hardware()

    def measured(**changes: Any) -> bool:
        file.write_text(json.dumps({"made": {"code": "now", "machine": machine} | changes}))
        return bool(benches.is_measured(file))

    assert not benches.is_measured(tmp_path / "absent.json")
    assert measured()
    assert not measured(code="before")
    assert not measured(code=None)
    assert not measured(machine=machine | {"processor": "another"})


def test_tiny_figures_do_not_replace_those_of_the_pages(benches: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        call(benches, monkeypatch, "--tiny")
