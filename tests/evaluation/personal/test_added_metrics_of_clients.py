"""Metrics that a user adds, of clients' own models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from three_models import RULES, simulation_of

from fedsim import EvaluationOptions
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """½ ‖output − x‖² by another way: of two coordinates the mean square."""
    return (output - target).square().mean()


error.higher_is_better = False  # type: ignore[attr-defined]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("over", ["all", "online"])
@pytest.mark.parametrize("case", RULES)
def test_of_every_model_they_are_what_the_loss_is(case: str, over: str) -> None:
    """A metric that is the loss has the loss's mean, median and worst tenth, for each model and whoever is asked."""
    rule, strategy = RULES[case]
    simulation = simulation_of(
        local=rule(),
        strategy=strategy(),
        personal=Personal(over=over, train_samples=99),
        evaluation=EvaluationOptions(every=1, metrics=["mean_squared_error", error]),
    )
    history = simulation.run().history
    compared = [name for name in history[0] if name.endswith(("_error", "_error_median", "_error_worst10"))]
    own = {name for name in compared if "validation" in name}
    assert len(own) == 2 * 3 * 3  # metrics, summaries, models
    for row in history:
        for name in own:
            loss = row[name.replace("mean_squared_error", "loss").replace("error", "loss")]
            assert row[name] == pytest.approx(loss, abs=1e-12), name
        for name in ("train_mean_squared_error", "train_error"):
            assert row[name] == pytest.approx(row["train_loss"], abs=1e-12)


def test_newcomers_have_them_too() -> None:
    rule = APFL(alpha=0.3, lr=0.1, steps=3, batch_size=None)
    personal = Personal(over="all", newcomers=3, newcomer_epochs=2)
    simulation = simulation_of(local=rule, personal=personal, evaluation=EvaluationOptions(metrics=[error]))
    for epoch in simulation.run().extra["newcomers"]:
        for model in ("global", "localized", "personal"):
            np.testing.assert_allclose(
                epoch[f"{model}_validation_error"], epoch[f"{model}_validation_loss"], atol=1e-12
            )
