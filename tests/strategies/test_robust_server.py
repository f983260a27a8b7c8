"""Servers that are told a robust aggregate: against a plain loop, and where they must be the rule or the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import Naive, with_
from naive_strategies import SEEDS

from fedsim import Execution
from fedsim.core import ConfigError
from fedsim.run.rehearsal import rehearse_run
from fedsim.strategies import (
    CentredClipping,
    FedAvg,
    FedAvgM,
    FedNova,
    FedOpt,
    FedProx,
    Median,
    NormBound,
    RobustServer,
    Scaffold,
    TrimmedMean,
)


def middle(rows):
    ordered, n = np.sort(rows, 0), len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


class NaiveAdam(Naive):
    """FedOpt on any aggregate of the rows; nothing moves where they are fewer than it needs."""

    least, tau = 1, 0.1

    def begin(self):
        self.first, self.second = 0 * self.model, 0 * self.model + self.tau**2

    def of(self, rows):
        return middle(rows)

    def round(self, t, active):
        if len(active) >= self.least and active:
            delta = -self.of([self.innovation(i, t) for i in active])
            self.first = 0.6 * self.first + 0.4 * delta
            self.second = 0.9 * self.second + 0.1 * delta**2
            self.model = self.model + 0.5 * self.first / (np.sqrt(self.second) + self.tau)


class NaiveClipped(NaiveAdam):
    def begin(self):
        super().begin()
        self.centre = 0 * self.model

    def of(self, rows):
        apart = [row - self.centre for row in rows]
        self.centre = self.centre + np.mean([a * min(1, 0.3 / np.linalg.norm(a)) for a in apart], axis=0)
        return self.centre


def adam():
    return FedOpt("adam", 0.5, 0.6, 0.9, 0.1)


CASES = {
    "median": (Median(), NaiveAdam),
    "trimmed mean": (
        TrimmedMean(bad=1),
        with_(NaiveAdam, least=3, of=lambda self, rows: np.sort(rows, 0)[1:-1].mean(0)),
    ),
    "centred clipping": (CentredClipping(radius=0.3), NaiveClipped),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_servers_step_along_the_rules_aggregate(name, follows):
    """Model, moments and the rule's own memory; rounds of too few rows leave all of them."""
    rule, naive = CASES[name]
    follows(RobustServer(rule, adam()), naive)


def test_under_a_plain_server_it_is_the_rule_and_under_a_wide_rule_the_server(models):
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(models(RobustServer(Median(), FedAvg(0.7))), models(Median(0.7)), **close)
    for server in (FedAvgM(0.7, 0.5), FedProx(0.4), adam()):
        torch.testing.assert_close(models(RobustServer(NormBound(norm=1e9), server)), models(server), **close)
    assert not torch.allclose(models(RobustServer(Median(), adam())), models(adam()), atol=1e-4)


def test_replicates_are_alone_as_together_and_the_contract_is_kept(models, federated):
    strategy = RobustServer(CentredClipping(radius=0.3), FedOpt("yogi", 0.5, 0.6))
    whole = models(strategy)
    for r, seed in enumerate(SEEDS):
        torch.testing.assert_close(models(strategy, seeds=(seed,))[:, 0], whole[:, r], rtol=0, atol=1e-12)
    strategy.__class__ = type("Own", (RobustServer,), {"__module__": "mypackage"})
    simulation = federated(strategy, execution=Execution(executor="loop", dtype="float64"))
    state = simulation.initial_state()
    rehearse_run(simulation, state, simulation.trainer.initial_memory(state.model))


def test_what_a_mean_cannot_be_taken_from_is_refused():
    for server, said in ((Scaffold(), "Scaffold"), (FedNova(), "FedNova"), (Median(), "Median")):
        with pytest.raises(ConfigError, match=rf"^server={said} does more with clients' rows than"):
            RobustServer(server=server)
    with pytest.raises(ConfigError, match=r"^server\.weighting=data .*give it to rule"):
        RobustServer(server=FedAvg(weighting="data"))
    with pytest.raises(ConfigError, match=r"^rule\.server_lr=0\.5 must be 1"):
        RobustServer(Median(0.5))
    with pytest.raises(ConfigError, match=r"^rule is a FedAvg"):
        RobustServer(FedAvg())
