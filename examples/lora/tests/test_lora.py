"""Adapters alone are trained and travel, the backbone is kept once; from Python and from the command line."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import gpt2

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.app.cli import main
from fedsim.availability import UniformK
from fedsim.data.datasets import Text
from fedsim.local import Adam
from fedsim.models.selectors import ByName
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.strategies import FedPBC

HERE = Path(__file__).parents[1]
INSTALLED = find_spec("transformers") is not None and find_spec("peft") is not None
ABSENT = pytest.mark.skipif(not INSTALLED, reason="needs transformers and peft: the extra huggingface")
WIDTH, LAYERS, RANK, CLIENTS = 32, 2, 8, 4
PARAMETERS = LAYERS * RANK * 16 * WIDTH  # a block's four layers: w → 3w, w → w, w → 4w, 4w → w, rank·(in + out) each


def needed(test: Any) -> Any:
    """Slow, since transformers alone takes seconds to import."""
    return pytest.mark.slow(ABSENT(test))


small = functools.partial(gpt2, width=WIDTH, layers=LAYERS, rank=RANK)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(draw.choice(("federation", "of", "clients", "that", "come")) for _ in range(700)))
    return str(path)


def simulation_of(text: str, **given: Any) -> Simulation:
    options = {
        "model": small,
        "output": "logits",
        "clients": CLIENTS,
        "availability": UniformK(3),
        "local": Adam(lr=0.02, steps=20, batch_size=8),
        "rounds": 4,
        "evaluation": EvaluationOptions(every=4),
    }
    return Simulation(Text(text, 16, clients=CLIENTS), **options | given)


def frozen(simulation: Simulation) -> dict[str, torch.Tensor]:
    named = simulation.model.training_module.named_parameters()
    return {name: p.detach().clone() for name, p in named if not p.requires_grad}


@needed
def test_adapters_alone_are_in_rows_and_travel(text: str) -> None:
    simulation = simulation_of(text)
    before = frozen(simulation)
    assert all("lora_" in name for name in simulation.model.shapes)
    assert not any("lora_" in name for name in before)
    assert simulation.model.dimension == PARAMETERS
    result = simulation.run()
    assert result.state.model.shape == (1, PARAMETERS)
    after = frozen(simulation)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    first, last = result.history
    assert last["bytes_up"] == last["bytes_down"] == PARAMETERS * 4 * 3
    assert last["total_bytes_up"] == 4 * last["bytes_up"]
    commonest = Counter(Path(text).read_text()).most_common(1)[0][1] / len(Path(text).read_text())
    assert last["test_accuracy"] > commonest + 0.1 > first["test_accuracy"]


@needed
def test_of_clients_own_models_the_adapters_alone_are_kept(text: str) -> None:
    simulation = simulation_of(text, strategy=FedPBC(), rounds=1, columns=ByName(travels=["lora_B"]))
    half = LAYERS * RANK * WIDTH * (3 + 1 + 4 + 1)
    result = simulation.run()
    assert result.state.models.shape == (CLIENTS, half)
    assert result.history[-1]["bytes_up"] == half * 4 * 3


@needed
def test_rows_together_are_rows_one_by_one(text: str) -> None:
    together, alone = (
        simulation_of(text, rounds=1, execution=Execution(executor=name, dtype="float64")).run().state.model
        for name in ("vmap", "loop")
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-8)


@needed
def test_a_backbone_with_weights_is_kept_as_it_is(text: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    backbone = small(shape=(16,), classes=Text(text, 16, clients=CLIENTS).classes).unload()
    backbone.save_pretrained(tmp_path)
    found = frozen(simulation_of(text, model=functools.partial(gpt2, rank=RANK, weights=str(tmp_path))))
    name = "base_model.model.transformer.h.1.mlp.c_fc.base_layer.weight"
    assert torch.equal(found[name], backbone.transformer.h[1].mlp.c_fc.weight)


@needed
def test_from_the_command_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        f"fedsim dataset=text dataset.path={text} dataset.length=16 partition=natural clients=4 model=custom "
        f"model._target_=adapters.gpt2 +model.width={WIDTH} +model.rank={RANK} +model.output=logits local=adam lr=0.02 "
        f"availability=full rounds=2 eval_every=2 tracking.progress=none tracking.tensorboard=false out={tmp_path}/run"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    main()
    assert read_metrics(tmp_path / "run" / "metrics.csv")[-1]["bytes_up"] == PARAMETERS * 4 * 4


@needed
def test_the_script_runs(text: str) -> None:
    found = subprocess.run([sys.executable, str(HERE / "train.py"), text], capture_output=True, text=True, check=True)
    assert "16,384 are of adapters" in found.stdout
    assert "sent 262,144 bytes to the server" in found.stdout


def test_without_the_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs transformers and peft.*fedsim-torch\[huggingface\]"):
        gpt2((4,), 3)


def test_the_documentation_shows_this_model() -> None:
    page = (HERE.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    assert (HERE / "adapters.py").read_text(encoding="utf-8") in page
