"""`fedsim why` on quadratic clients, whose models a few lines of NumPy give for each subset of the causes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from fedsim.app import commands
from fedsim.app.build import build
from fedsim.app.composition import hydra_context
from fedsim.core.errors import ConfigError
from fedsim.studies.attribution.attribute import (
    Attribution,
    default_attribution_metric,
    run_attribution,
    summary_sentence,
)
from fedsim.studies.attribution.causes import CAUSES, applicable_causes, config_without_causes
from fedsim.studies.attribution.shapley import shapley_values
from fedsim.studies.attribution.why_cli import _run_configuration, main
from fedsim.studies.reproduce.runner import compose_config

POINTS = [0.0, 1.0, 5.0, 2.0]
ROUNDS, RATE, STEPS = 7, 0.1, 4
QUADRATICS = (
    "dataset=quadratics", f"dataset.points={POINTS}", "partition=natural", "model=mean", "clients=4",
    f"rounds={ROUNDS}", f"lr={RATE}", f"local_steps={STEPS}", "batch_size=null", "trainer.dtype=float64",
    "availability=cyclic", "availability.groups=2", "seeds=[0,1,2]", "device=cpu", "out=unused",
)  # fmt: skip


def composed(*overrides: str):
    with hydra_context():
        return compose_config((*QUADRATICS, *overrides))


def distance(counts: np.ndarray, steps: int, rate: float) -> float:
    """FedAvg on ½(x − u_i)²: the distance of its model to the mean of all u_i."""
    model, points = 0.0, np.array(POINTS)
    for t in range(ROUNDS):
        present = counts[t] > 0
        if present.any():
            model = float(np.mean(points[present] + (1 - rate) ** steps * (model - points[present])))
    return abs(model - points.mean())


def test_shares_on_quadratics_are_those_of_the_closed_form(tmp_path: Path) -> None:
    config, choices = composed()
    causes = applicable_causes(config, choices)
    assert [cause.name for cause in causes] == ["availability", "drift"]
    attribution = run_attribution(config, choices, causes, tmp_path, "distance_to_optimum")
    availability = build(config)[0].availability
    everybody = np.ones((ROUNDS, 4))
    for r, seed in enumerate(config.seeds):
        counts = np.stack([availability.counts(t)[r] for t in range(ROUNDS)])
        values = np.array([
            distance(counts, STEPS, RATE), distance(everybody, STEPS, RATE),
            distance(counts, 1, STEPS * RATE), distance(everybody, 1, STEPS * RATE),
        ])  # fmt: skip
        np.testing.assert_allclose(attribution.values[:, r], values, atol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(attribution.shares[:, r], -shapley_values(values[:, None])[:, 0], atol=1e-9)
    np.testing.assert_allclose(attribution.shares.sum(0), attribution.total_effect, atol=1e-12)
    assert summary_sentence(attribution).startswith("Of ")


def test_a_total_whose_interval_contains_zero_is_said_not_to_show_a_loss() -> None:
    causes = [cause for cause in CAUSES if cause.name == "availability"]

    def sentence(values: list[list[float]]) -> str:
        return summary_sentence(Attribution("test_accuracy", causes, np.array(values), higher_is_better=True))

    assert sentence([[0.5, 0.52, 0.51], [0.7, 0.72, 0.71]]).endswith("].")
    assert sentence([[0.5, 0.72, 0.6], [0.7, 0.52, 0.61]]).endswith(
        "The interval of the total contains zero: these seeds do not show a loss."
    )


def test_batch_noise_is_no_cause_where_samples_are_drawn_afresh() -> None:
    with hydra_context():
        stream = compose_config(("dataset=gaussian_mean", "partition=natural", "model=mean", "shift=location"))
        stored = compose_config(("dataset=digits", "clients=10"))
    assert [cause.name for cause in applicable_causes(*stream)] == ["availability", "drift", "shift"]
    assert "batches" in [cause.name for cause in applicable_causes(*stored)]
    with pytest.raises(ConfigError, match=r"--causes batches: this run does not have it"):
        applicable_causes(*stream, ["batches"])


def test_batch_noise_is_no_cause_where_each_batch_holds_all_samples_of_the_client() -> None:
    """Equal shares of the 1,438 training samples of the digits: 28 or 29 for each of 50 clients."""
    settings = ("dataset=digits", "partition=iid", "clients=50")
    with hydra_context():
        full, smaller, repeated = (
            compose_config((*settings, *more))
            for more in (("batch_size=29",), ("batch_size=28",), ("batch_size=29", "local.sampling=replacement"))
        )
    assert [cause.name for cause in applicable_causes(*full)] == ["availability", "drift"]
    assert "batches" in [cause.name for cause in applicable_causes(*smaller)]
    assert "batches" in [cause.name for cause in applicable_causes(*repeated)]
    with pytest.raises(ConfigError, match=r"--causes batches: the samples of each client fit in one batch"):
        applicable_causes(*full, ["batches"])


def test_the_folder_of_the_results_is_not_a_setting_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"out= is set for each run by fedsim why; --out FOLDER names the folder"):
        main(["rounds=1", "out=here"])


def test_a_run_without_a_cause_is_the_one_that_its_overrides_describe() -> None:
    config, choices = composed("uplink=topk", "attack=sign_flip", "delay=constant")
    causes = {cause.name: cause for cause in applicable_causes(config, choices)}
    assert set(causes) == {"availability", "drift", "attack", "compression", "staleness"}
    changed, changed_choices = config_without_causes(config, choices, causes.values())
    with hydra_context():
        expected, expected_choices = compose_config((
            *(text for text in QUADRATICS if not text.startswith(("availability", "lr", "local_steps"))),
            "availability=full", "local_steps=1", f"lr={STEPS * RATE}",
        ))  # fmt: skip
    assert changed == expected
    assert changed_choices == expected_choices


@pytest.mark.parametrize(
    ("stages", "privacy", "compression"),
    [
        ((), False, False),
        (("topk",), False, True),
        (("clip",), False, True),
        (("clip", "gaussian"), True, False),
        (("clip", "tree"), True, False),
        (("topk", "clip", "gaussian"), None, False),
    ],
)
def test_noise_and_compression_are_causes_of_their_own(
    stages: tuple[str, ...], privacy: bool | None, compression: bool
) -> None:
    """None: refused, since the stages of compression and of noise cannot be removed apart."""
    config, choices = OmegaConf.create({"uplink": {name: {} for name in stages}}), {"uplink": "some"}
    replacements = {cause.name: cause.override_function for cause in CAUSES}
    assert replacements["compression"](config, choices) == ({"uplink": "none"} if compression else None)
    if privacy is None:
        with pytest.raises(ConfigError, match="compresses and adds noise"):
            replacements["privacy"](config, choices)
    else:
        assert replacements["privacy"](config, choices) == ({"uplink": "none"} if privacy else None)


def test_what_cannot_be_attributed_is_refused_in_a_sentence() -> None:
    config, choices = composed()
    with pytest.raises(ConfigError, match="--causes weather is unknown; choose among availability"):
        applicable_causes(config, choices, ["weather"])
    with pytest.raises(ConfigError, match="--causes attack: this run does not have it"):
        applicable_causes(config, choices, ["attack"])
    words = [text for text in QUADRATICS if not text.startswith(("availability", "local_steps"))]
    with hydra_context():
        config, choices = compose_config((*words, "availability=full", "local_steps=1"))
    with pytest.raises(ConfigError, match="none of the causes that can be removed"):
        applicable_causes(config, choices)


def test_a_word_that_is_neither_a_folder_nor_an_override_is_refused() -> None:
    for words in (["nowhere"], ["nowhere", "lr=0.1"]):
        with pytest.raises(ConfigError, match="nowhere is neither a run folder nor an override KEY=VALUE"):
            _run_configuration(words)


def test_the_command_prints_a_table_a_sentence_and_writes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [text for text in QUADRATICS if not text.startswith("out=")]
    commands.run_subcommand("why", [*words, "--metric", "distance_to_optimum", "--jobs", "1"])
    printed = capsys.readouterr().out
    assert "client drift" in printed
    assert printed.splitlines()[-1].startswith("Of ")
    stored = json.loads((tmp_path / "why" / "why.json").read_text())
    assert set(stored["values"]) == {"", "availability", "drift", "availability,drift"}
    assert (tmp_path / "why" / "why.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="--metric weather is not among those of the run"):
        commands.run_subcommand("why", [*words, "--metric", "weather", "--jobs", "1"])


def test_under_a_shift_runs_are_compared_by_a_metric_on_samples_that_react() -> None:
    columns = ["test_accuracy", "performative_risk", "train_loss"]
    shift = [cause for cause in CAUSES if cause.name == "shift"]
    assert default_attribution_metric(columns, shift) == "performative_risk"
    assert default_attribution_metric(columns, []) == "test_accuracy"
    assert default_attribution_metric(["test_accuracy"], shift) == "test_accuracy"
    assert default_attribution_metric([], shift) is None
