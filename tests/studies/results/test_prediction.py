"""`Run.predict` and `Run.test` prepare raw inputs as the run did: their numbers are those of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedsim
from fedsim.app import cli
from fedsim.core import ConfigError, targets
from fedsim.data.datasets import Dataset
from fedsim.studies.results.prediction import Predictor

QUIET = ["tracking.progress=none", "tracking.tensorboard=false", "clients=4", "rounds=3", "eval_every=3"]


def main(arguments: list[str]) -> None:
    """The command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedsim", *arguments])
        cli.main()


@pytest.fixture(scope="module", name="images")
def images_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark and bright pictures, three colours of unlike mean and spread."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 15)):
        for number, name in enumerate(("bright", "dark")):
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                pixels = draw.normal([200, 90, 30], [40, 15, 5], (8, 8, 3)) - 20 * number
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / split / name / f"{n}.png")
    return root


@pytest.fixture(scope="module", name="run")
def run_fixture(images: Path, tmp_path_factory: pytest.TempPathFactory) -> fedsim.studies.results.Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    data = ["dataset=image_folder", f"dataset.path={images}"]
    main([*data, "model=linear", "seeds=[3,5]", "partition=iid", "availability=full", *QUIET, f"out={out}"])
    return fedsim.load(out)


def test_a_test_gives_the_numbers_of_the_run(run: fedsim.studies.results.Run) -> None:
    for replicate, seed in enumerate((3, 5)):
        found = run.test(seed)
        assert found.keys() == {"test_loss", "test_accuracy"}
        for name, value in found.items():
            assert value == pytest.approx(run.final_values(name)[replicate], rel=1e-5)


def test_raw_images_are_scaled_and_normalised_as_in_the_run(run: fedsim.studies.results.Run) -> None:
    data = run.dataset()
    assert data.test_x is not None
    assert data.test_x.dtype == torch.uint8
    by_hand = data.test_x.float() / 255
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in (data.mean, data.std))
    by_hand = (by_hand - mean) / std
    scores = run.predict(data.test_x, seed=5)
    with torch.no_grad():
        torch.testing.assert_close(scores, run.module(5)(by_hand), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(scores, run.module(5)(data.test_x.float()), atol=0.1)
    torch.testing.assert_close(run.predict(data.test_x.numpy(), seed=5), scores)
    torch.testing.assert_close(run.predict(by_hand, seed=5), scores, rtol=1e-4, atol=1e-5)  # floats as they are
    accuracy = (scores.argmax(1) == data.test_y).float().mean()
    assert float(accuracy) == pytest.approx(run.test(5)["test_accuracy"])
    assert not torch.equal(scores, run.predict(data.test_x, seed=3))


def test_what_is_missing_is_one_sentence(run: fedsim.studies.results.Run, tmp_path: Path) -> None:
    for call in (run.model, run.test, run.module, lambda: run.predict(torch.zeros(1, 3, 8, 8))):
        with pytest.raises(ConfigError, match=r"has the seeds 3, 5: say which model is meant, such as model\(seed=3\)"):
            call()
    with pytest.raises(ConfigError, match=r"inputs have shape \[3, 8, 8\]; give \[n, 3, 8, 8\]"):
        run.predict(torch.zeros(3, 8, 8), seed=3)
    main(["dataset=pricing", "partition=natural", "model=mean", "shift=demand", *QUIET, f"out={tmp_path / 'r'}"])
    with pytest.raises(ConfigError, match="draws its samples and keeps none"):
        fedsim.load(tmp_path / "r").test()


@pytest.mark.parametrize(
    "settings",
    [
        ["model=linear", "dataset=synthetic", "partition=natural"],
        ["model=mlp", "model.hidden=[20]", "availability=sine"],
        ["model=linear", "partition=dirichlet", "strategy=fedawe", "personal.over=all", "partition.validation=0.2"],
    ],
)
def test_of_other_data_and_losses(settings: list[str], tmp_path: Path) -> None:
    main([*settings, *QUIET, f"out={tmp_path / 'run'}"])
    run = fedsim.load(tmp_path / "run")
    for name, value in run.test().items():
        assert value == pytest.approx(run.final_values(name)[0], rel=1e-5), name


def test_rows_of_a_table_are_encoded_as_those_of_the_run(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    path = tmp_path / "people.csv"
    lines = [f"{draw.integers(20, 80)},{draw.choice(['cook', 'smith'])},{draw.integers(2)}" for _ in range(80)]
    path.write_text("\n".join(["age,job,ill", *lines]) + "\n")
    data = ["dataset=table", f"dataset.path={path}", "dataset.target=ill", "partition=iid"]
    main([*data, "model=linear", *QUIET, f"out={tmp_path / 'run'}"])
    run = fedsim.load(tmp_path / "run")
    rows = {"age": [34, 78], "job": ["cook", "smith"]}
    (tmp_path / "new.csv").write_text("job,age\ncook,34\nsmith,78\n")
    expected = run.predict(run.dataset().encode(rows))
    for given in (rows, tmp_path / "new.csv", str(tmp_path / "new.csv")):
        assert torch.equal(run.predict(given), expected)
    assert torch.equal(run.predict(run.dataset().encode(rows).tolist()), expected)


@pytest.mark.parametrize("inputs", [{"age": [1]}, "rows.csv", None])
def test_inputs_that_are_no_numbers_are_refused(run: fedsim.studies.results.Run, inputs: object) -> None:
    with pytest.raises(ConfigError, match=r"are no tensor or array; give \[n, 3, 8, 8\] of n samples"):
        run.predict(inputs, seed=3)


class Masked(nn.Module):
    """A linear layer of the entries that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x * mask)


def test_further_inputs_are_those_of_the_same_samples() -> None:
    """Of more samples than one forward pass takes; a mask in double precision is made the model's."""
    draw = np.random.default_rng(0)
    x = torch.as_tensor(draw.standard_normal((2500, 3)), dtype=torch.float32)
    mask, y = torch.as_tensor(draw.integers(0, 2, (2500, 3)).astype(float)), torch.as_tensor(draw.integers(0, 2, 2500))
    with targets.trust_packages([__name__], own_code=False, remedy=""):
        predictor = Predictor(
            {"_target_": f"{__name__}.Masked"}, Dataset("masked", x, y, classes=2, more={"mask": mask})
        )
        module = Masked()
        with torch.no_grad():
            expected = module(x, mask.float())
        torch.testing.assert_close(predictor.outputs(module.state_dict(), x, {"mask": mask}), expected)
        with pytest.raises(ConfigError, match=r"the model has further inputs; give mask=… too"):
            predictor.outputs(module.state_dict(), x, {})
