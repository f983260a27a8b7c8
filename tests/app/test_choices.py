"""Every choice of every group, every shift, augmentation, generated data set, experiment and rule composes and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.utils import instantiate
from small_runs import COMPANY, QUICK, SHIFTED, configuration

from fedsim.app import per_choice
from fedsim.app.build import build
from fedsim.app.composition import hydra_context
from fedsim.app.config import groups
from fedsim.core import ConfigError
from fedsim.studies.reproduce.runner import compose_config

NATURAL = {
    "synthetic": [],
    "quadratics": ["model=mean"],
    "gaussian_mean": ["model=mean"],
    "market": ["model=mean"],
    "pricing": ["model=mean"],
    "pricing_groups": ["model=mean"],
    "house_prices": [],
    "regression_groups": [],
    "binary_gaussians": [],
    "text": COMPANY["dataset=text"],
}
ONE_GROUP_AT_A_TIME = [
    f"{group}={choice}"
    for group, choices in groups().items()
    for choice in choices
    if group not in ("experiment", "sweep", "dataset", "dataset/augment", "model", "shift")
    and choice not in ("natural", "trace", "custom")
    and f"{group}={choice}" not in ("availability=log", "availability=table", "drift=replay")
]
BESIDE = COMPANY | {
    "strategy=p_fedavg": ["availability=full"],
    "strategy=scaffnew": ["availability=full"],
    "partition=grouped": ["dataset=synthetic"],
    "columns=fedbn": ["model=custom", "model._target_=small_runs.Normalised"],
}


def test_the_groups_with_a_choice_custom_are_those_that_the_page_names() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8").split())
    with_custom = sorted(group for group, choices in groups().items() if "custom" in choices)
    assert f"The groups {', '.join(with_custom[:-1])} and {with_custom[-1]} have the choice `custom`" in page


@pytest.mark.sampled(5)
@pytest.mark.parametrize("override", ONE_GROUP_AT_A_TIME)
def test_every_choice_composes_and_runs(override: str) -> None:
    if override == "partition=flwr":
        pytest.importorskip("flwr_datasets")
    beside = BESIDE.get(override, ["strategy=robust_server"] if override.startswith("strategy/") else [])
    simulation, tracking, _ = build(configuration(*QUICK, "tracking.progress=none", override, *beside))
    assert simulation.run(tracking=tracking).history[-1]["round"] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choice", [choice for choice in groups()["shift"] if choice != "custom"])
def test_every_shift_composes_and_is_measured_against_its_references(choice: str) -> None:
    cfg = configuration(*QUICK, "tracking.progress=none", f"shift={choice}", *SHIFTED.get(choice, []))
    simulation, tracking, _ = build(cfg)
    last = simulation.run(tracking=tracking).history[-1]
    assert ("performative_loss" in last) == (choice != "none")
    assert ("distance_to_po" in last) == (choice not in ("none", "strategic", "elastic"))  # 650 parameters


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", groups()["dataset/augment"])
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist", "cifar10"])
def test_every_augmentation_composes_with_images(dataset: str, choice: str) -> None:
    cfg = configuration(f"dataset={dataset}", f"dataset/augment={choice}", "dataset.augment.per=batch")
    augment = instantiate(cfg.dataset.augment)
    assert (augment.active, augment.per) == (choice != "none", "batch")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NATURAL)
def test_every_generated_data_set_composes_and_runs(name: str) -> None:
    cfg = configuration(*QUICK, "tracking.progress=none", f"dataset={name}", "partition=natural", *NATURAL[name])
    simulation, tracking, _ = build(cfg)
    assert simulation.run(tracking=tracking).history[-1]["round"] == 2


NEEDS_FILES = ("mnist", "fedawe", "p_fedavg_credit", "apfl", "apfl_convex")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", groups()["experiment"])
def test_every_experiment_composes(name: str) -> None:
    assert configuration(f"experiment={name}").rounds > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n for n in groups()["experiment"] if not n.startswith(NEEDS_FILES)])
def test_every_experiment_composes_and_runs(name: str) -> None:
    with hydra_context():
        cfg, choices = compose_config(
            (f"experiment={name}", "rounds=2", "tracking.progress=none", "device=cpu", "out=unused")
        )
    per_choice.apply_choice_settings(cfg, choices)
    simulation, tracking, _ = build(cfg)
    assert simulation.run(tracking=tracking).history[-1]["round"] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "rule", [r for r in groups()["local"] if r not in ("pg", "play", "custom")]
)  # one client; no newcomers
def test_every_rule_is_judged_client_by_client(rule: str, tmp_path: Path) -> None:
    asked = ["personal.over=online", "personal.newcomers=2", "personal.newcomer_epochs=1", "trainer.memory=disk"]
    asked += BESIDE.get(f"local={rule}", [])
    cfg = configuration(*QUICK, "tracking.progress=none", f"local={rule}", "partition.validation=0.2", *asked)
    simulation, tracking, _ = build(cfg)
    last = simulation.run(tmp_path, tracking=tracking).history[-1]
    assert 0 <= last["localized_validation_accuracy_worst10"] <= last["localized_validation_accuracy"] <= 1
    own = ("apfl", "ditto", "fedala", "fedrod", "perfedavg", "pfedme", "fedrep", "fedbabu")
    assert ("personal_validation_accuracy" in last) == (rule in own)
    newcomers = json.loads((tmp_path / "summary.json").read_text())["newcomers"]
    assert [epoch["epoch"] for epoch in newcomers] == [0, 1]


def test_the_model_constructors_mistakes_are_errors_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="model"):
        build(configuration("+model.witdh=3"))


def test_epochs_replace_the_default_steps_and_both_are_refused() -> None:
    assert build(configuration("local_epochs=2"))[0].trainer.local_rule.work.epochs == 2
    assert build(configuration())[0].trainer.local_rule.work.steps == 10
    with pytest.raises(ConfigError, match="mutually exclusive"):
        build(configuration("local_epochs=2", "local_steps=3"))
