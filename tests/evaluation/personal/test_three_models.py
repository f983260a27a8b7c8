"""Three models for each client, scored as plain loops score them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from three_models import RULES, SIZES, M, caught, simulation_of
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core.memory import Memory
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import PERSONAL_COLUMNS, Personal
from fedsim.local import APFL
from fedsim.models import Linear
from fedsim.strategies import FedAvg, Scaffold, State

HELD = [int(n * 0.2 + 1e-9) for n in SIZES]


def shares(simulation, replicate):
    """Training and validation points of every client of the replicate."""
    x, table = simulation.dataset.train_x, simulation.partition_tables[replicate]
    return (
        [x[torch.as_tensor(p).long()] for p in np.split(t.order, t.offsets[1:-1])] for t in (table, table.validation)
    )


def half_squared(model, z):
    return (0.5 * (model - z).square().sum(1)).mean().item()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("over", ["all", "online"])
@pytest.mark.parametrize("case", RULES)
def test_every_column_is_that_of_plain_loops(case, over):
    rule, strategy = RULES[case]
    simulation = simulation_of(
        local=rule(),
        strategy=strategy(),
        personal=Personal(over=over, train_samples=99),
        evaluation=EvaluationOptions(every=1),
    )
    calls = caught(simulation)
    history = simulation.run().history
    assert [t for _, _, _, t, *_ in calls] == [0, 1, 2, 3]
    for model, kept, memory, t, online, metrics, histograms in calls:
        for r in range(2):
            training, validation = map(list, shares(simulation, r))
            assert [len(part) for part in validation] == HELD
            who = [i for i in range(M) if HELD[i] and (over == "all" or online is None or r * M + i in online)]
            found = {name: [] for name in ("global", "localized", "personal")}
            for i in range(M) if over == "all" or online is None else [v - r * M for v in online if v // M == r]:
                centre = training[i].mean(0)
                x = kept[r * M + i] if len(kept) else model[r]
                adapted = centre + 0.6**2 * (x - centre)
                own = {name: value[r * M + i] for name, value in memory.items()}
                if case == "perfedavg":
                    halves = training[i][::2].mean(0), training[i][1::2].mean(0) if len(training[i]) > 1 else centre
                    w = x
                    for _ in range(3):
                        w = w - 0.1 * (halves[0] + 0.6 * (w - halves[0]) - halves[1])
                elif case == "pfedme":
                    w = x
                    for _ in range(3):
                        target = (centre + 2 * w) / 3
                        w = w - 0.1 * 2 * (w - target - 0.7**5 * (w - target))
                else:
                    w = centre + 0.9**3 * (x - centre)
                v = own.get("personal", x)
                kinds = {"perfedavg": adapted, "local_only": x, "pfedme": v, "ditto": v}
                models = {"global": model[r], "localized": w, "personal": kinds.get(case, 0.3 * v + 0.7 * x)}
                for name, row in models.items():
                    held = half_squared(row, validation[i]) if HELD[i] else np.nan
                    found[name].append((held, half_squared(row, training[i])))
            for name, pairs in found.items():
                losses, train = (np.array(values) for values in zip(*pairs, strict=True))
                losses = np.sort(losses[~np.isnan(losses)])
                assert len(losses) == len(who) == metrics["validated_clients"][r]
                expected = {
                    "validation_loss": losses.mean(),
                    "validation_loss_median": np.median(losses),
                    "validation_loss_worst10": losses[-1:].mean(),
                    "training_loss": train.mean(),
                }
                for measure, value in expected.items():
                    assert metrics[f"{name}_{measure}"][r] == pytest.approx(value, abs=1e-9), (name, measure, t)
        assert len(histograms["personal validation loss"]) == metrics["validated_clients"].sum()
    row = history[-2]
    assert {name for name in row if name in PERSONAL_COLUMNS} == set(calls[-1][5])
    assert row["personal_validation_loss"] == calls[-1][5]["personal_validation_loss"][0]


def test_accuracies_are_those_of_plain_modules():
    """With 25 clients the worst tenth are two; a client's accuracy is over all its validation samples."""
    draw = np.random.default_rng(1)
    owners = np.repeat(np.arange(25), 20)
    x, y = torch.as_tensor(draw.standard_normal((500, 4))), torch.as_tensor(draw.integers(0, 3, 500))
    dataset = Dataset("noise", x, y, classes=3, owners=torch.as_tensor(owners))
    simulation = Simulation(
        dataset, Linear, clients=25, rounds=2, execution=Execution(dtype="float64"),
        partition=Natural(validation=0.4), personal=Personal(over="all"), local=APFL(alpha=0.5, mix="outputs", lr=0.5),
    )  # fmt: skip
    calls = caught(simulation)
    simulation.run()
    model, _, memory, _, _, metrics, histograms = calls[-1]

    def scores(row, x):
        module = nn.Linear(4, 3).double()
        nn.utils.vector_to_parameters(row, module.parameters())
        return module(x).detach()

    table = simulation.partition_tables[0].validation
    expected = {"global": [], "personal": []}
    for i, part in enumerate(np.split(table.order, table.offsets[1:-1])):
        own, numbers = memory["personal"][i], torch.as_tensor(part).long()
        of_global = scores(model[0], x[numbers])
        mixture = 0.5 * scores(own, x[numbers]) + 0.5 * of_global
        for name, output in (("global", of_global), ("personal", mixture)):
            expected[name].append((output.argmax(1) == y[numbers]).double().mean().item())
    for name, values in expected.items():
        np.testing.assert_allclose(histograms[f"{name} validation accuracy"], values)
        column = f"{name}_validation_accuracy"
        assert metrics[column][0] == pytest.approx(np.mean(values))
        assert metrics[f"{column}_median"][0] == pytest.approx(np.median(values))
        assert metrics[f"{column}_worst10"][0] == pytest.approx(np.mean(sorted(values)[:2]))


@pytest.mark.parametrize("localize", ["rule", "sgd"])
def test_scaffolds_localized_model_follows_its_correction_unless_steps_are_plain(localize):
    """x − η Σ (g − c_i + c): towards the client's mean minus (c − c_i), by (1 − η)^s; plain steps: towards its mean."""
    personal = Personal(over="all", train_samples=99, localize=localize)
    simulation = simulation_of(strategy=Scaffold(), evaluation=EvaluationOptions(every=3), personal=personal)
    calls, controls = caught(simulation), []
    start = simulation.strategy.start

    def noted(state, cohort):
        if len(cohort) == 2 * M:
            controls.append((state.mean.clone(), state.memory.clone()))
        return start(state, cohort)

    simulation.strategy.start = noted
    simulation.run()
    model, *_, metrics, _ = calls[-1]
    mean, memory = controls[-1]
    assert memory.abs().max() > 0.1
    for r in range(2):
        training, validation = map(list, shares(simulation, r))
        losses = []
        for i in range(M):
            centre = training[i].mean(0) - (localize == "rule") * (mean[r] - memory[r * M + i])
            if HELD[i]:
                losses.append(half_squared(centre + 0.9**3 * (model[r] - centre), validation[i]))
        assert metrics["localized_validation_loss"][r] == pytest.approx(np.mean(losses))


@pytest.mark.parametrize("case", ["apfl", "pfedme"])
def test_plain_steps_leave_the_personal_models_alone(case):
    """At the end of a round personal models are of the rule's own steps, however the localized ones are made."""
    runs = {}
    for localize in ("rule", "sgd"):
        personal = Personal(over="all", at="end", train_samples=99, localize=localize)
        runs[localize] = simulation_of(local=RULES[case][0](), personal=personal).run().history
    for by_rule, plain in zip(runs["rule"], runs["sgd"], strict=True):
        assert {n: v for n, v in by_rule.items() if n.startswith("personal") or n == "train_loss"} == {
            n: v for n, v in plain.items() if n.startswith("personal") or n == "train_loss"
        }
        same = plain["localized_training_loss"] == pytest.approx(by_rule["localized_training_loss"])
        assert same == (case == "apfl")  # whose steps of the federation's model are plain, as pFedMe's are not


def test_clients_begin_as_the_strategy_has_them_begin_in_the_next_round():
    class Watched(FedAvg):
        """Knows for which rounds it was asked where clients begin."""

        def __init__(self):
            super().__init__()
            self.asked = []

        def start(self, state, cohort):
            self.asked.append(cohort.round)
            return super().start(state, cohort)

    simulation = simulation_of(strategy=Watched(), execution=Execution("loop", dtype="float64"))
    state = State(simulation.model.initial(simulation.federation.seeds))
    simulation.strategy.asked.clear()
    simulation.personal(state, Memory(), 3, None)
    assert set(simulation.strategy.asked) == {3}
