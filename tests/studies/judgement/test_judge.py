"""Judgements of a class that is FedAvg by another name, and of one that sees the absent."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from fedsim.app import commands
from fedsim.studies.judgement.environments import ENVIRONMENTS_BY_NAME, BenchmarkEnvironments
from fedsim.studies.judgement.judge import Contest, judge, rounds_within_budget

pytestmark = pytest.mark.slow
RENAMED = '''
from dataclasses import replace
from fedsim.strategies import Strategy


class Renamed(Strategy):
    """FedAvg."""

    def __init__(self, server_lr=1.0):
        self.server_lr = server_lr

    def aggregate(self, state, report, t):
        return replace(state, model=state.model - self.server_lr * report.cohort.mean(report.innovation))
'''
DIGITS = BenchmarkEnvironments(
    "digits",
    (
        "dataset=digits", "model=linear", "clients=8", "local_steps=2", "batch_size=8", "partition.validation=0.2",
        "availability/base=class_correlated", "device=cpu", "trainer.executor=loop", "trainer.trial=false",
    ),
    (("availability=markov",),), (("availability=stationary",),),
    ("validation_accuracy", "test_accuracy"), 0.005, rates="0.1,0.3,1.0",
)  # fmt: skip
QUADRATICS = dataclasses.replace(
    ENVIRONMENTS_BY_NAME["quadratics"],
    setting=(*ENVIRONMENTS_BY_NAME["quadratics"].setting, "clients=6", "trainer.trial=false"),
    tuning_cells=(("availability=sine",),), held_out_cells=(("availability=stationary",), ("availability=markov",)),
    rates="0.01,0.03,0.1",
)  # fmt: skip
SMALL = Contest((DIGITS, QUADRATICS), tuning_seeds=(0, 1), held_out_seeds=(10, 11, 12), rounds=4)


def test_another_name_of_fedavg_has_its_numbers_and_no_mechanism(tmp_path: Path, monkeypatch):
    (tmp_path / "renamed_fedavg.py").write_text(RENAMED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    judgement = judge("renamed_fedavg.Renamed", ("fedavg",), SMALL, tmp_path / "judge")
    for kind in ("digits", "quadratics"):
        evidence, chosen = judgement.evidence_by_environment[kind]["fedavg"], judgement.chosen_overrides[kind]
        assert chosen["renamed_fedavg.Renamed"] == chosen["fedavg"]
        assert np.array_equal(evidence.held_out_chosen, np.zeros(3))
        assert np.array_equal(evidence.tuned, np.zeros(2))
        assert evidence.held_out_best.mean() <= 0
    assert judgement.verdict in ("tuning", "seed", "not shown")
    assert judgement.sentence.startswith(f"{judgement.verdict}: ")
    assert json.loads(json.dumps(judgement.as_json()))["try"] == 1
    ledger = (tmp_path / "judge" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in ledger] == [judgement.verdict]
    again = judge("renamed_fedavg.Renamed", ("fedavg",), SMALL, tmp_path / "judge")
    assert (again.attempt_number, again.verdict) == (1, judgement.verdict)
    assert np.array_equal(again.evidence_by_environment["quadratics"]["fedavg"].held_out_best, evidence.held_out_best)


def test_the_command_writes_one_json_and_one_sentence(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few_seeds = functools.partial(Contest, tuning_seeds=(0, 1), held_out_seeds=(10, 11, 12))
    monkeypatch.setattr("fedsim.studies.judgement.judge_cli.Contest", few_seeds)
    words = ["clients=6", "local_steps=1", "--rounds", "2", "--against", "fedavg", "--environments", "digits"]
    commands.run_subcommand("judge", ["mifa", *words])
    stored = json.loads((tmp_path / "judge" / "mifa.json").read_text())
    assert capsys.readouterr().out.strip() == stored["sentence"]
    assert len(stored["differences"]["digits"]["fedavg"]["held_out_best"]) == 3
    assert list(stored["verdicts"]) == ["digits"]
    with pytest.raises(SystemExit, match="is unknown; choose one of"):
        commands.run_subcommand("judge", ["mifa", *words[:5], "nowhere"])


def test_a_longer_budget_has_no_fewer_rounds():
    rounds = [rounds_within_budget(seconds, "fedavg", ("mifa",), SMALL) for seconds in (1, 1e6)]
    assert rounds == [30, 200]
