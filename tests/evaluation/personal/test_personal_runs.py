"""Looking at clients' models changes nothing, whoever computes and however often a run is resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from three_models import RULES, SIZES, M, caught, double, simulation_of

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Bernoulli, Full, Sine, Uniform
from fedsim.core import ConfigError
from fedsim.data.datasets import BinaryGaussians, GaussianMean
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import PERSONAL_COLUMNS, Personal
from fedsim.local import APFL
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.shift import GroupMean, Location
from fedsim.strategies import FedAvg, FedAWE
from fedsim.uplink.attack import SignFlip

QUIET = Tracking(progress="none", tensorboard=False)
AT_END = ("apfl", "pfedme", "local_only")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", RULES)
def test_to_look_at_clients_changes_nothing(case):
    """State and memory are those of a run in which nobody looked, bit for bit."""
    rule, strategy = RULES[case]
    ends = []
    for over in ("none", "all", "online"):
        simulation = simulation_of(
            local=rule(), strategy=strategy(), personal=Personal(over=over), evaluation=EvaluationOptions(every=1)
        )
        memories, initial = [], simulation.trainer.initial_memory
        simulation.trainer.initial_memory = lambda model: memories.append(initial(model)) or memories[-1]  # noqa: B023
        result = simulation.run()
        ends.append((result.state.model, memories[0].clients))
        assert (simulation.personal is None) == (over == "none")
        assert ("global_validation_loss" in result.history[0]) == (over != "none")
    for model, clients in ends[1:]:
        assert torch.equal(model, ends[0][0])
        assert all(torch.equal(clients[name], ends[0][1][name]) for name in clients)


@pytest.mark.slow
def test_executors_chunks_and_company_do_not_matter():
    options = {"local": APFL(alpha=0.3, adaptive=True, lr=0.1, epochs=2, batch_size=4)}
    base = simulation_of(**options).run().history
    ways = (double("loop", workers=2, chunk=3), double(chunk=2))
    for change in (*({"execution": way} for way in ways), {"seeds": (5,)}):
        again = simulation_of(**options | change).run().history
        seeds = {row["seed"] for row in again}
        expected = [row for row in base if row["seed"] in seeds]
        for row, other in zip(expected, again, strict=True):
            for name in PERSONAL_COLUMNS.keys() & row.keys():
                assert other[name] == pytest.approx(row[name], abs=1e-10), name


def test_a_resumed_run_judges_as_the_uninterrupted_one(tmp_path):
    options = {"local": APFL(alpha=0.3, adaptive=True, lr=0.1, epochs=2, batch_size=4),
               "evaluation": EvaluationOptions(every=1), "personal": Personal(over="online", newcomers=2)}  # fmt: skip
    straight = simulation_of(rounds=4, **options).run(tmp_path / "straight", tracking=QUIET)
    simulation_of(rounds=2, **options).run(tmp_path / "parts", tracking=QUIET)
    resumed = simulation_of(rounds=4, **options).run(tmp_path / "parts", resume=True, tracking=QUIET)
    drop = ("seconds",)
    assert [{k: v for k, v in row.items() if k not in drop} for row in resumed.history] == [
        {k: v for k, v in row.items() if k not in drop} for row in straight.history
    ]
    assert resumed.extra == straight.extra


def test_data_answer_the_model_that_is_judged():
    """z = m_i + ε_i θ without noise: ½ (θ − m_i − ε_i θ)² of each model's own θ; a stream needs no split."""
    means, epsilons = [1.0, 2.0, 6.0], [0.5, -0.2, 0.9]
    for deploy in ("step", "round"):
        simulation = Simulation(
            GaussianMean(clients=3, means=means, std=0.0), Mean, clients=3, rounds=4, execution=double(),
            shift=Location(epsilons=epsilons, deploy=deploy), personal=Personal(over="all"),
            local=APFL(alpha=0.3, lr=0.1, steps=2, batch_size=4),
        )  # fmt: skip
        calls = caught(simulation)
        simulation.run()
        model, _, memory, *_, metrics, _ = calls[-1]
        x, losses = model[0, 0].item(), {"global": [], "personal": []}
        for i in range(3):
            for name, theta in (("global", x), ("personal", 0.3 * memory["personal"][i, 0].item() + 0.7 * x)):
                answered = theta if deploy == "step" else x
                losses[name].append(0.5 * (theta - means[i] - epsilons[i] * answered) ** 2)
        for name, values in losses.items():
            assert metrics[f"{name}_validation_loss"][0] == pytest.approx(np.mean(values))


def test_apfl_runs_under_fedawe_sine_and_a_shift_of_labelled_samples():
    simulation = Simulation(
        BinaryGaussians(clients=6), Linear, clients=6, shift=GroupMean(), rounds=3, loss="logistic",
        strategy=FedAWE(), availability=Bernoulli(Uniform(0.6), Sine()), personal=Personal(over="online"),
        local=APFL(alpha=0.5, adaptive=True, mix="outputs", lr=0.1),
    )  # fmt: skip
    row = simulation.run().history[-1]
    assert np.isfinite(row["personal_validation_accuracy"]) == (row["validated_clients"] > 0)


def test_a_run_folder_has_columns_and_histograms(tmp_path):
    simulation = simulation_of(local=APFL(alpha=0.3, lr=0.1), evaluation=EvaluationOptions(every=3))
    result = simulation.run(tmp_path, tracking=Tracking(progress="none"))
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert f"# personal_validation_loss_worst10: {PERSONAL_COLUMNS['personal_validation_loss_worst10']}" in lines
    assert read_metrics(tmp_path / "metrics.csv") == result.history
    events = EventAccumulator(str(tmp_path / "mean"), size_guidance={"histograms": 0, "scalars": 0}).Reload()
    for model in ("global", "localized", "personal"):
        assert [e.step for e in events.Histograms(f"clients/{model} validation loss")] == [0, 3]
    assert [e.step for e in events.Scalars("loss/personal_validation_loss_median")] == [0, 3]


def test_means_over_honest_clients_leave_out_those_that_an_attack_makes_byzantine():
    byzantine, results = [1, 4], {}
    for over in ("all", "honest"):
        simulation = simulation_of(
            local=APFL(alpha=0.3, lr=0.1, steps=3, batch_size=None), attack=SignFlip(clients=byzantine),
            personal=Personal(over=over, train_samples=99), seeds=(3,),
        )  # fmt: skip
        calls = caught(simulation)
        simulation.run()
        results[over] = calls[-1][-2:]
    (_, of_all), (means, of_honest) = results["all"], results["honest"]
    held = [
        client for client in range(M) if int(0.2 * SIZES[client])
    ]  # the histograms leave out clients without samples
    for model in ("global", "localized", "personal"):
        name = f"{model} validation loss"
        kept = [value for client, value in zip(held, of_all[name], strict=True) if client not in byzantine]
        assert of_honest[name].tolist() == kept
        assert means[f"{model}_validation_loss"][0] == pytest.approx(np.mean(kept))
    assert means["validated_clients"][0] == len(kept) < len(held)


def test_what_cannot_be_judged_is_refused_before_the_first_round():
    with pytest.raises(ConfigError, match=r"personal\.over=all needs validation samples.*partition\.validation=0\.2"):
        simulation_of(partition=Natural())
    with pytest.raises(ConfigError, match=r"personal\.newcomers=11 leaves none of clients=11"):
        simulation_of(personal=Personal(newcomers=11))
    with pytest.raises(ConfigError, match=r"personal\.over=honest leaves out Byzantine clients.*personal\.over=all"):
        simulation_of(personal=Personal(over="honest"))
    with pytest.raises(ConfigError, match=r"over='some'"):
        Personal(over="some")


@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.slow] * (n != "apfl")) for n in AT_END])
def test_personal_models_at_the_end_of_the_local_steps(case):
    """With everybody there: a model of one's own at a round's end is that at the next one's start; APFL's with α = 0 is
    the localized one."""
    rule, strategy = (
        (lambda: APFL(alpha=1.0, lr=0.1, steps=3, batch_size=None), FedAvg) if case == "apfl" else RULES[case]
    )

    def history(rule, at):
        options = {"personal": Personal(over="all", at=at), "evaluation": EvaluationOptions(every=1), "rounds": 4}
        return simulation_of(local=rule, strategy=strategy(), availability=Full(), **options).run().history

    start, end = history(rule(), "start"), history(rule(), "end")
    names = [name for name in start[0] if name.startswith("personal_")]
    assert start[0]["personal_validation_loss"] != pytest.approx(end[0]["personal_validation_loss"])
    for early, late in zip(end[:-2], start[2:], strict=True):  # two replicates
        assert [early[name] for name in names] == pytest.approx([late[name] for name in names])
    if case == "apfl":
        for row in history(APFL(alpha=0.0, lr=0.1, steps=3, batch_size=None), "end"):
            assert all(row[name] == pytest.approx(row[name.replace("personal", "localized")]) for name in names)
