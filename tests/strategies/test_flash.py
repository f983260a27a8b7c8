"""Flash: each round against its formula, where it is FedAdam, and how its steps react to a change of the updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import Naive, with_
from naive_strategies import BY_DATA, UNIFORM

from fedsim.core import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.report import Report
from fedsim.strategies import FedOpt, Flash

RATE, BETA1, BETA2 = 0.3, 0.6, 0.9


class NaiveFlash(Naive):
    """A loop over coordinates."""

    tau, weights = 0.05, UNIFORM

    def begin(self):
        size = len(self.model)
        self.first, self.second, self.drift = np.zeros(size), np.full(size, self.tau**2), np.zeros(size)

    def round(self, t, active):
        if not active:
            return
        delta = -self.over({i: self.innovation(i, t) for i in active}, self.weights)
        model = self.model.copy()
        for j, step in enumerate(delta):
            before = self.second[j]
            self.first[j] = BETA1 * self.first[j] + (1 - BETA1) * step
            self.second[j] = BETA2 * before + (1 - BETA2) * step**2
            excess = step**2 - self.second[j]
            beta3 = before / (abs(excess) + before)
            self.drift[j] = beta3 * self.drift[j] + (1 - beta3) * excess
            model[j] += RATE * self.first[j] / (max(self.second[j] ** 0.5 - self.drift[j], 0.0) + self.tau)
        self.model = model


@pytest.mark.parametrize("tau", [0.05, 1.0])
@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_each_round_follows_the_formula(weighting, tau, follows):
    naive = with_(NaiveFlash, tau=tau, weights=BY_DATA if weighting == "data" else UNIFORM)
    follows(Flash(RATE, BETA1, BETA2, tau, weighting), naive)


def steps_of(strategy, updates):
    """[T, d] the steps of a server that receives these mean updates [T, d], from one client."""
    federation = Federation((0,), 1, np.ones(1), dtype=torch.float64)
    state = strategy.initial(torch.zeros(1, updates.shape[1], dtype=torch.float64), federation)
    models = [state.model]
    for t, update in enumerate(updates):
        counts = np.ones((1, 1), dtype=int)
        cohort = federation.make_cohort(counts, np.ones((1, 1)))
        start = state.model[cohort.replicate_index]
        rates = torch.ones(1, dtype=torch.float64)
        report = Report(cohort, start, {"params": start + update}, start[:, 0], rates, rates, np.ones(1))
        state = strategy.aggregate(state, report, t)
        models.append(state.model)
    return torch.cat(models).diff(dim=0)


def test_it_is_fedadam_where_updates_keep_their_size():
    """|Δ| = τ = √v in all rounds, so d stays 0, whatever the signs."""
    signs = torch.as_tensor(np.random.default_rng(0).choice([-1.0, 1.0], (30, 4)))
    one, other = (
        steps_of(strategy, 0.01 * signs)
        for strategy in (Flash(RATE, BETA1, BETA2, 0.01), FedOpt("adam", RATE, BETA1, BETA2, 0.01))
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "reaction"), [(0.06, torch.greater), (0.002, torch.less)])
def test_its_steps_grow_when_updates_grow_and_shrink_when_they_shrink(size, reaction):
    updates = torch.full((40, 1), 0.01, dtype=torch.float64)
    updates[30] = size
    flash, adam = (
        steps_of(strategy, updates)
        for strategy in (Flash(RATE, BETA1, BETA2, 0.01), FedOpt("adam", RATE, BETA1, BETA2, 0.01))
    )
    torch.testing.assert_close(flash[:30], adam[:30], rtol=0, atol=1e-12)
    assert reaction(flash[30], 1.001 * adam[30] if size > 0.01 else 0.9999 * adam[30]).all()


def test_tau_alone_limits_a_step_whose_drift_term_exceeds_the_moment():
    """Δ = 3, so d = β₂ Δ² (1 − β₃) is far above √v: the step is η u / τ, in the direction of the update."""
    step = steps_of(Flash(RATE, BETA1, BETA2, 0.5), torch.tensor([[3.0]], dtype=torch.float64))
    assert float(step) == pytest.approx(RATE * (1 - BETA1) * 3 / 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta1": 1.0}, "beta1=1.0 trains nothing: the first moment stays 0"),
        ({"tau": 0.0}, "tau=0.0"),
        ({"tau": 1e19}, "must be below 1e[+]18"),
    ],
)
def test_settings_that_stop_training_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Flash(**options)
