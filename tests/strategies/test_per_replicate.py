"""A strategy that is written for one replicate at a time is the same as one that is written for all."""

from __future__ import annotations

import pytest
import torch

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.local import APFL, SGD
from fedsim.strategies import FedAvg, PerReplicateStrategy, State, Strategy

COUNTS = [[[1, 0, 1], [1, 1, 1]], [[0, 0, 0], [0, 0, 1]], [[0, 1, 1], [0, 0, 0]]]  # [T, R, m]


class Mean(PerReplicateStrategy):
    def next_model(self, model, rows, memory, t):
        return model - rows.innovation.mean(0)


class Momentum(PerReplicateStrategy):
    """With memory; `seen` is what it met."""

    def __init__(self):
        self.seen = []

    def memory(self, model):
        return {"velocity": torch.zeros_like(model), "rounds": torch.tensor(0)}

    def next_model(self, model, rows, memory, t):
        self.seen.append((t, rows.client.tolist(), rows.data_fraction.tolist(), rows.probability.tolist()))
        memory["velocity"] = memory["velocity"] / 2 + rows.start.mean(0) - rows.end.mean(0)
        memory["rounds"] = memory["rounds"] + 1
        return model - memory["velocity"]


@pytest.fixture(name="run")
def run_fixture(Scripted, Regression, regression_of):
    def run(strategy, **options):
        data = regression_of((5, 2, 9))
        scripted = Scripted(COUNTS, 0.5)
        known = {"clients": 3, "availability": scripted, "rounds": 3, "seeds": (3, 4), "local": SGD(lr=0.1, epochs=1)}
        return Simulation(data, Regression, strategy=strategy, **known | options)

    return run


def test_its_mean_is_fedavg(run, play):
    for mine, theirs in zip(play(run(Mean())), play(run(FedAvg())), strict=True):
        torch.testing.assert_close(mine.after.model, theirs.after.model)


def test_it_sees_one_replicate_at_a_time_and_keeps_what_it_remembers(run, play):
    simulation = run(Momentum())
    played = list(play(simulation))
    sizes = [5 / 16, 2 / 16, 9 / 16]
    met = [(0, [0, 2]), (0, [0, 1, 2]), (1, [2]), (2, [1, 2])]
    assert simulation.strategy.seen == [
        (t, who, [pytest.approx(sizes[client]) for client in who], [0.5] * len(who)) for t, who in met
    ]
    assert played[-1].after.rounds.tolist() == [2, 2]
    velocity = torch.zeros(2, 4)
    for t, one in enumerate(played):
        for r, counts in enumerate(COUNTS[t]):
            if any(counts):
                own = one.report.cohort.split_by_replicate(one.report.innovation)[r]
                velocity[r] = velocity[r] / 2 + own.mean(0)
        torch.testing.assert_close(one.after.velocity, velocity)


def test_what_a_local_rule_remembers_is_read_by_name(run, play):
    class Personal(Strategy[State]):
        def aggregate(self, state, report, t):
            own = report.client_memory("personal")
            return State(report.cohort.where_nonempty(report.cohort.mean(own), state.model))

    simulation = run(Personal(), local=APFL(lr=0.1, epochs=1))
    state, memory = simulation.initial_state(), simulation.trainer.initial_memory(simulation.initial_state().model)
    cohort = simulation.availability.sample(0)
    report = simulation.trainer.run(simulation.strategy.start(state, cohort), cohort, 0, state.model, memory)
    mean = torch.stack([memory.clients["personal"][[0, 2]].mean(0), memory.clients["personal"][[3, 4, 5]].mean(0)])
    torch.testing.assert_close(simulation.strategy.aggregate(state, report, 0).model, mean)
    assert not torch.equal(mean, report.cohort.mean(report.end))


def test_what_nobody_remembers_is_refused_by_name(run, play):
    class Asks(PerReplicateStrategy):
        def next_model(self, model, rows, memory, t):
            return rows.client_memory("personel").mean(0)

    with pytest.raises(ConfigError, match="did you mean 'personal'"):
        list(play(run(Asks(), local=APFL(lr=0.1, epochs=1))))
    with pytest.raises(ConfigError, match=r"'personel', but local rule and shift of this run remember nothing"):
        list(play(run(Asks())))


class Grows(PerReplicateStrategy):
    def next_model(self, model, rows, memory, t):
        return rows.end


class Forgets(PerReplicateStrategy):
    def memory(self, model):
        return {"velocity": torch.zeros_like(model)}

    def next_model(self, model, rows, memory, t):
        del memory["velocity"]
        return model


@pytest.mark.parametrize(("wrong", "message"), [(Grows, "must be a tensor"), (Forgets, "velocity is not what")])
def test_what_is_no_model_is_refused(run, play, wrong, message):
    with pytest.raises(ConfigError, match=f"strategy={wrong.__name__}: .*{message}"):
        list(play(run(wrong())))
