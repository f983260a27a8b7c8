"""What a run leaves of any module is taken by its own `load_state_dict`, strictly, and predicts as the run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import samples, simulation_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_any_model import STATISTICS, ZOO
from torch import Tensor, nn

import fedsim
from fedsim.core import CheckpointError, ConfigError
from fedsim.local import APFL, PerFedAvg, PFedMe
from fedsim.models.selectors import ByName, Normalisation
from fedsim.run import Stop
from fedsim.run.run_files import BEST_MODELS_FILE, CHECKPOINT_FILE, CONSTANTS_FILE
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAWE
from fedsim.studies.results import export_cli as export

UNMOVED = ("partly frozen", "instance norm")  # the latter's counter counts nothing
QUIET = Tracking(progress="none", tensorboard=False)


def loss_of(module: nn.Module, state: dict[str, Tensor]) -> float:
    """The test loss, by nothing of fedsim's but the data."""
    data = samples()
    module = module.double()
    module.load_state_dict(state, strict=True)
    with torch.no_grad():
        return F.cross_entropy(module.eval()(data.test_x), data.test_y).item()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ZOO)
def test_the_last_model_of_any_module(name: str, tmp_path: Path) -> None:
    result = simulation_of(ZOO[name], rounds=1).run(tmp_path, tracking=QUIET)
    run = fedsim.load(tmp_path)
    assert (tmp_path / CONSTANTS_FILE).exists() == (name in UNMOVED)
    for seed in (0, 1):
        expected = pytest.approx(result.history[-2 + seed]["test_loss"], abs=1e-10)
        assert loss_of(ZOO[name](), run.model(seed)) == expected
        assert loss_of(ZOO[name](), result.model(seed)) == expected
    assert bool(run.model(0).keys() - dict(ZOO[name]().named_parameters()).keys()) == (name in STATISTICS) or (
        name in ("spectral norm", "spectral norm by hooks", "weight norm", "lazy")
    )


class Tied(nn.Module):
    """One weight under two names, a buffer that nobody moves, and one that is not to be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.register_buffer("unstored", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x * self.scale)))) * self.unstored)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_tied_weights_and_fixed_buffers_are_exported_under_all_their_names(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulation_of(Tied, rounds=1).run(tmp_path / "run", tracking=QUIET)
    file = tmp_path / "deep" / f"model.{ending}"
    export.main([str(tmp_path / "run"), "--to", str(file), "--seed", "1"])
    state = load_file(file) if ending == "safetensors" else torch.load(file, weights_only=True)
    assert list(Tied().state_dict()) == list(fedsim.load(tmp_path / "run").model(1))
    torch.testing.assert_close(state["second.weight"], state["first.weight"], rtol=0, atol=0)
    torch.testing.assert_close(state["scale"], torch.linspace(1, 2, 4).double(), rtol=0, atol=1e-7)
    assert loss_of(Tied(), state) == pytest.approx(result.history[-1]["test_loss"], abs=1e-10)
    assert "7 tensors" in capsys.readouterr().out


def row_of(state: dict[str, Tensor], names: dict[str, Any]) -> Tensor:
    return torch.cat([state[name].reshape(-1).double() for name in names])


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_under_fedbn_every_client_has_its_normalisation_and_the_last_model_their_mean(tmp_path: Path) -> None:
    simulation = simulation_of(normalised, columns=Normalisation())
    result = simulation.run(tmp_path, tracking=QUIET)
    run = fedsim.load(tmp_path)
    clients = [run.client_model(client, seed=1) for client in range(3)]
    last = run.model(1)
    for name in ("0.weight", "3.bias"):
        for state in clients:
            torch.testing.assert_close(state[name], last[name], rtol=0, atol=0)
    for name in ("1.weight", "1.running_mean"):
        assert not torch.equal(clients[0][name], clients[1][name])
        torch.testing.assert_close(torch.stack([s[name] for s in clients]).mean(0), last[name])
    assert last["1.num_batches_tracked"].dtype == torch.int64
    assert loss_of(normalised(), last) == pytest.approx(result.history[-1]["test_loss"], abs=1e-10)


@pytest.mark.parametrize("given", [{"strategy": FedAWE()}, {"local": APFL(steps=2)}, {"local": PFedMe(steps=2)}])
def test_models_that_clients_keep(given: dict[str, Any], tmp_path: Path, Scripted: Any) -> None:
    came = Scripted([[[1, 1, 1], [1, 1, 1]], [[1, 0, 1], [1, 0, 0]]])
    simulation = simulation_of(ZOO["mlp"], availability=came, **given)
    result = simulation.run(tmp_path, tracking=QUIET)
    run, names = fedsim.load(tmp_path), simulation.model.shapes
    stored = load_file(tmp_path / "checkpoint.safetensors")
    rows = stored["models"] if "strategy" in given else stored["clients.personal"]
    assert not torch.equal(rows[3], rows[4])
    for r, client in ((0, 2), (1, 1)):
        state = run.client_model(client, replicate=r)
        torch.testing.assert_close(row_of(state, names), rows[3 * r + client], rtol=0, atol=0)
        ZOO["mlp"]().double().load_state_dict(state, strict=True)
    torch.testing.assert_close(row_of(run.model(1), names), result.state.model[1], rtol=0, atol=0)


def test_own_columns_beside_models_of_the_strategys(tmp_path: Path) -> None:
    simulation = simulation_of(ZOO["mlp"], strategy=FedAWE(), columns=ByName(stays=["^0"]))
    simulation.run(tmp_path, tracking=QUIET)
    stored = load_file(tmp_path / "checkpoint.safetensors")
    state = fedsim.load(tmp_path).client_model(2, seed=1)
    own, shared = ({n: v for n, v in simulation.model.shapes.items() if n.startswith("0") == home} for home in (1, 0))
    torch.testing.assert_close(row_of(state, own), stored["clients.own columns"][5], rtol=0, atol=0)
    torch.testing.assert_close(row_of(state, shared), stored["models"][5], rtol=0, atol=0)


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    simulation_of(ZOO["logistic"], local=PerFedAvg(steps=1)).run(tmp_path, tracking=QUIET)
    run = fedsim.load(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has the seeds 0, 1: say which model is meant, such as model\(seed=0\)"):
        run.model()
    with pytest.raises(ConfigError, match=r"seed=5, but .* has the seeds 0, 1"):
        run.model(5)
    with pytest.raises(ConfigError, match=r"replicate=2, but .* has 2"):
        run.model(replicate=2)
    with pytest.raises(ConfigError, match="have no models of their own"):
        run.client_model(0, seed=0)
    with pytest.raises(ConfigError, match=r"client=3, but .* has the clients 0 to 2"):
        run.client_model(3, seed=0)
    with pytest.raises(ConfigError, match="keeps no best model"):
        run.model(0, which="best")
    with pytest.raises(ConfigError, match="which='first' is unknown"):
        run.model(0, which="first")
    with pytest.raises(ConfigError, match=r"--to .*model\.onnx must end in \.safetensors, \.pt or \.pth"):
        export.main([str(tmp_path), "--to", str(tmp_path / "model.onnx")])
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors cannot be read"):
        run.model(0)
    with pytest.raises(ConfigError, match="holds no run"):
        fedsim.load(tmp_path / "nowhere")


def test_equal_seeds_are_told_apart_by_number(tmp_path: Path) -> None:
    simulation_of(ZOO["logistic"], seeds=(3, 3), rounds=1).run(tmp_path, tracking=QUIET)
    run = fedsim.load(tmp_path)
    with pytest.raises(ConfigError, match="give replicate=0 to 1"):
        run.model(3)
    torch.testing.assert_close(run.model(replicate=0), run.model(replicate=1))


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def with_a_changed_bit(path: Path, name: str) -> None:
    """One bit of a tensor's last entry."""
    header, tensors = header_of(path), load_file(path)
    tensors[name].view(-1)[-1:].view(torch.uint8)[0] ^= 1
    save_file(tensors, path, header)


def test_a_changed_bit_is_told_where_a_model_is_loaded_and_only_where_it_matters(tmp_path: Path) -> None:
    simulation = simulation_of(
        ZOO["logistic"], rounds=2, stop=Stop(metric="test_loss"), local=APFL(0.3, lr=0.1, steps=1)
    )
    simulation.run(tmp_path, tracking=QUIET)
    run = fedsim.load(tmp_path)
    whole = run.model(0)
    mine = f"clients.{json.loads(header_of(tmp_path / CHECKPOINT_FILE)['model'])['own'][0]}"
    with_a_changed_bit(tmp_path / CHECKPOINT_FILE, mine)
    assert all(torch.equal(value, whole[name]) for name, value in fedsim.load(tmp_path).model(0).items())
    with pytest.raises(
        CheckpointError, match=rf"{CHECKPOINT_FILE} is damaged: {mine} has changed since it was written"
    ):
        run.client_model(0, 0)
    with_a_changed_bit(tmp_path / CHECKPOINT_FILE, "model")
    with_a_changed_bit(tmp_path / BEST_MODELS_FILE, "model")
    for which, name in (("last", CHECKPOINT_FILE), ("best", BEST_MODELS_FILE)):
        with pytest.raises(CheckpointError, match=f"{name} is damaged: model has changed since it was written"):
            run.model(0, which)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            fedsim.load(tmp_path).model(0, which)
