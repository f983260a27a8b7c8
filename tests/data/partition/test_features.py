"""Feature skew: noise that grows by client and belongs to the sample, images turned by client."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim import Execution, Simulation
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import Arrays, Digits, Text
from fedsim.data.partition import IID, FeatureNoise, FeatureRotation
from fedsim.data.partition.partition import Skew
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.shift import Location

FLAT = Arrays(np.zeros((600, 40)), np.arange(600) % 2, test_fraction=0)
TALL = Arrays(np.arange(600.0)[:, None], np.arange(600) % 2, test_fraction=0)


def held(simulation: Simulation) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, n, …] what clients' own samples are, and the same as they are stored."""
    rows = torch.arange(simulation.federation.clients)
    width = simulation.data.width(None)
    found = simulation.data.fixed_samples(rows, width, torch.float64, rng.Purpose.EVALUATION)["x"]
    return found, simulation.dataset.prepare(
        simulation.dataset.train_x[simulation.data.numbers(rows, width)[0]], torch.float64
    )


def test_noise_is_normal_and_its_variance_grows_with_the_clients_number() -> None:
    found, _ = held(Simulation(FLAT, Linear, clients=6, partition=FeatureNoise(sigma=2.0)))
    for client, own in enumerate(found):
        level = 2 * np.sqrt((client + 1) / 6)
        assert stats.kstest(own.flatten() / level, "norm").pvalue > 1e-6
        assert stats.kstest(own.flatten() / (1.2 * level), "norm").pvalue < 1e-3
    assert len(found.unique()) > 0.99 * found.numel()


def test_a_sample_has_its_noise_whenever_it_is_met() -> None:
    """In training as in evaluation, in every replicate; with another seed another."""
    partition = FeatureNoise(sigma=1.0, validation=0.25)
    simulation = Simulation(FLAT, Linear, clients=3, partition=partition, seeds=[0, 0])
    data, met = simulation.data, {}
    rows, everyone = torch.arange(6), np.arange(6)
    known = {}
    fixed = data.fixed_samples(rows, data.width(None), torch.float32, rng.Purpose.EVALUATION)["x"]
    for row, numbers in enumerate(data.numbers(rows, data.width(None))[0]):
        known |= {(row % 3, int(n)): x for n, x in zip(numbers, fixed[row], strict=True)}
    work = simulation.trainer.local_rule.work
    load = data.workload(work, everyone)
    from fedsim.data.samples.client_data import BatchKeys

    keys = BatchKeys(np.zeros(6, dtype=np.int64), (rows % 3).numpy(), rows.device, 0)
    feed = data.make_feed(rows, rows % 3, keys, load, load.batch_sizes(), "pass")
    batch = feed.batch_of_rows(2, slice(1, 5), 8, torch.float32)["x"]
    for row, numbers in enumerate(feed.numbers[2, 1:5, :8]):
        met |= {((row + 1) % 3, int(n)): x for n, x in zip(numbers, batch[row], strict=True)}
    assert len(met) > 20
    assert all(torch.equal(x, known[key]) for key, x in met.items())
    assert simulation.partition_tables[0].validation.skew is simulation.partition_tables[0].skew
    other = Simulation(FLAT, Linear, clients=3, partition=FeatureNoise(seed=1, validation=0.25), seeds=[0, 0])
    assert not torch.equal(other.data.fixed_samples(rows, 5, torch.float32, rng.Purpose.EVALUATION)["x"], fixed[:, :5])


@pytest.mark.parametrize("turns", [2, 4])
def test_images_are_turned_by_client(turns: int) -> None:
    found, stored = held(Simulation(Digits(), Linear, clients=9, partition=FeatureRotation(turns)))
    for client in range(9):
        degrees = (client % turns) * 360 // turns
        turned = np.rot90(stored[client].numpy(), degrees // 90, (-2, -1))
        assert np.array_equal(found[client].numpy(), turned)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("partition", [FeatureNoise(0.3), FeatureRotation()])
def test_executors_agree_and_the_skew_is_felt(partition) -> None:
    models = []
    for executor in ("vmap", "loop", "fused"):
        run = Simulation(
            Digits(), Linear, clients=5, partition=partition, rounds=3, execution=Execution(executor=executor)
        ).run()
        models.append(run.state.model)
    assert torch.allclose(models[0], models[1], atol=1e-5)
    assert torch.allclose(models[0], models[2], atol=1e-5)
    plain = Simulation(Digits(), Linear, clients=5, partition=IID(), rounds=3).run()
    assert not torch.allclose(models[0], plain.state.model, atol=1e-3)


def test_without_noise_nothing_changes() -> None:
    runs = [
        Simulation(Digits(), Linear, clients=5, partition=p, rounds=2).run() for p in (IID(), FeatureNoise(sigma=0.0))
    ]
    assert torch.equal(runs[0].state.model, runs[1].state.model)


def test_what_cannot_be_skewed(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"partition=feature_rotation rotates images, but inputs of .* have shape \[40\]"
    ):
        Simulation(FLAT, Linear, clients=3, partition=FeatureRotation())
    wide = Arrays(np.zeros((40, 4, 6), np.uint8), np.arange(40) % 2)
    with pytest.raises(ConfigError, match=r"partition\.turns=4 turns square images, but those of .* are 4×6"):
        Simulation(wide, Linear, clients=3, partition=FeatureRotation())
    Simulation(wide, Linear, clients=3, partition=FeatureRotation(2))
    with pytest.raises(ConfigError, match=r"turns=3 must be 2 \(upside down\) or 4"):
        FeatureRotation(3)
    with pytest.raises(ConfigError, match=r"sigma=-1 must not be negative"):
        FeatureNoise(-1)
    (tmp_path / "a.txt").write_text("to be or not to be. " * 99)
    with pytest.raises(ConfigError, match=r"partition=feature_noise adds noise to numbers, but dataset=.* has tokens"):
        Simulation(Text(str(tmp_path / "a.txt"), length=8, clients=2), Linear, clients=2, partition=FeatureNoise())
    numbers = Arrays(np.zeros((40, 1)), np.arange(40.0), task="regression")
    with pytest.raises(ConfigError, match="shift=Location knows the data as they are stored"):
        Simulation(numbers, Mean, clients=3, partition=FeatureNoise(), shift=Location())


class Shifted(IID):
    """Halves of a user's own whose inputs are moved, by a rule that is given."""

    def __init__(self, move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.move = move

    def skew(self, clients: int) -> Skew:
        partition = self

        class Moved(Skew):
            def check(self, name: str, shape: tuple[int, ...], tokens: bool) -> None:
                pass

            def __call__(self, x: torch.Tensor, client: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
                return partition.move(x, client)

        return Moved()


def test_a_skew_of_ones_own_depends_on_the_sample_and_its_client_alone() -> None:
    partition = Shifted(lambda x, client: x + client[:, None, None])
    simulation = Simulation(TALL, Linear, clients=3, partition=partition, local=SGD(lr=1e-9, steps=1), rounds=1)
    assert simulation.run().final
    found, stored = held(simulation)
    for client in range(3):
        torch.testing.assert_close(found[client], stored[client] + client)
    with pytest.raises(ConfigError, match="its skew gives a sample other features when other samples are with it"):
        Simulation(TALL, Linear, clients=3, partition=Shifted(lambda x, client: x - x.mean())).run()
