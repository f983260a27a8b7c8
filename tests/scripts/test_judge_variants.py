"""`scripts/judge_variants.py`: the variants are what it says they are, and a tiny judgement is stored."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.data.datasets import Digits
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.strategies import MIFA, FedAvg, FedVARP

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
try:
    from judge_variants import FACTORS, variants
finally:
    sys.path.pop()


def test_there_are_forty_null_variants_and_ten_others() -> None:
    every = variants()
    assert Counter(real for _, real, _ in every) == {False: 40, True: 10}
    assert len({name for name, _, _ in every}) == 50
    for name, _, source in every:
        assert name in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    null = [source.replace(name, "") for name, real, source in every if not real]
    assert len(set(null)) == 40


def models(strategy) -> torch.Tensor:
    return (
        Simulation(
            Digits(), Linear, clients=6, rounds=6, strategy=strategy, availability=Bernoulli(Uniform(0.8)),
            local=SGD(lr=0.1, steps=2, batch_size=8), execution=Execution(executor="loop", dtype="float64"),
        )
        .run()
        .state.model
    )  # fmt: skip


@pytest.mark.slow
def test_null_variants_are_fedavg_and_three_others_are_strategies_of_the_library(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    classes = {}
    for name, _, source in variants():
        module = f"variant_{name.lower()}"
        (tmp_path / f"{module}.py").write_text(source)
        classes[name] = getattr(__import__(module), name)
    fedavg = models(FedAvg())
    for name, cls in classes.items():
        kind, number = name.rstrip("0123456789"), name[-1]
        if kind in ("Renamed", "Ineffective"):
            torch.testing.assert_close(models(cls()), fedavg, rtol=0, atol=1e-10, msg=name)
        elif kind == "Rescaled":
            expected = models(FedAvg(FACTORS[int(number)]))
            torch.testing.assert_close(models(cls()), expected, rtol=0, atol=1e-10, msg=name)
        elif kind == "Reseeded":
            difference = (models(cls()) - fedavg).abs().max()
            assert 0 < difference < 0.2, name
    for name, strategy in (
        ("Memory", MIFA()),
        ("MemoryOfSeen", MIFA(divide_by="seen")),
        ("VarianceReduced", FedVARP()),
    ):
        torch.testing.assert_close(models(classes[name]()), models(strategy), rtol=0, atol=1e-10, msg=name)


@pytest.mark.slow
def test_a_judgement_is_stored_and_not_repeated(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = [
        "--out",
        str(tmp_path / "out"),
        "--rounds",
        "2",
        "--only",
        "Renamed0",
        "--json",
        str(figures),
    ]
    for most in ("1", "0"):
        command = [sys.executable, str(SCRIPTS / "judge_variants.py"), *words, "--most", most]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(figures.read_text())["rows"]
        assert row["summary"]["null"] == 1
        assert row["summary"]["false_positives"] == 0
