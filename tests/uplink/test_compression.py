"""What compressors send: their formulas, client by client; their means; their bytes; what error feedback keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rows import COUNTS, SEEDS, D, M, arrived, drawn, sent

from fedsim import Execution, Simulation
from fedsim.core import ConfigError, rng
from fedsim.local import SGD
from fedsim.run.tracking import Tracking
from fedsim.strategies import MIFA, FedAvg, FedPBC, LocalOnly, Scaffold
from fedsim.uplink import QSGD, RandK, Sign, Stage, TopK, Uplink


def naive_topk(row, v, t, k=3):
    kept = sorted(range(D), key=lambda j: -abs(row[j]))[:k]
    return np.array([row[j] if j in kept else 0.0 for j in range(D)])


def naive_randk(row, v, t, k=3, scale=D / 3):
    bits = rng.random_bits(drawn(v, t), torch.arange(D))[0].tolist()
    kept = sorted(range(D), key=lambda j: -bits[j])[:k]
    return np.array([scale * row[j] if j in kept else 0.0 for j in range(D)])


def naive_qsgd(row, v, t, levels=4):
    norm, u = math.sqrt(sum(row**2)), rng.uniform(drawn(v, t), torch.arange(D), torch.float64)[0].tolist()
    found = []
    for number, chance in zip(row, u, strict=True):
        place = levels * abs(number) / norm
        low = math.floor(place)
        level = low + (chance >= 1 - (place - low))
        found.append(norm * np.sign(number) * level / levels)
    return np.array(found)


def naive_sign(row, v, t):
    return sum(abs(row)) / D * np.array([1.0 if number >= 0 else -1.0 for number in row])


CASES = {
    "topk": (lambda feedback: TopK(k=3, feedback=feedback), naive_topk),
    "randk": (lambda feedback: RandK(k=3, feedback=feedback), naive_randk),
    "qsgd": (lambda feedback: QSGD(4), naive_qsgd),
    "sign": (lambda feedback: Sign(feedback), naive_sign),
}
TRIED = [(name, how) for name in CASES for how in ("none", "ef14", "ef21") if name != "qsgd" or how == "none"]


@pytest.mark.parametrize(("name", "feedback"), TRIED)
def test_rows_arrive_as_the_formula_says(name, feedback):
    """Five rounds, client by client, with memory in a dictionary; Σ arrived + e = Σ G under EF14."""
    made, plain = CASES[name]

    def compress(row, v, t):
        return plain(row, v, t, scale=1.0) if name == "randk" and feedback != "none" else plain(row, v, t)

    kept: dict[int, np.ndarray] = {}
    whole = {v: np.zeros(D) for v in range(len(SEEDS) * M)}
    for t, found in enumerate(arrived(Uplink(made(feedback)))):
        assert list(found) == list(np.flatnonzero(COUNTS[t].reshape(-1)))
        for v, row in found.items():
            own, g = kept.get(v, np.zeros(D)), sent(t)[v]
            if feedback == "none":
                wanted = compress(g, v, t)
            elif feedback == "ef14":
                wanted = compress(g + own, v, t)
                kept[v] = g + own - wanted
                whole[v] += g - row
                np.testing.assert_allclose(whole[v], kept[v], atol=1e-12)
            else:
                wanted = kept[v] = own + compress(g - own, v, t)
            np.testing.assert_allclose(row, wanted, atol=1e-10, err_msg=f"round {t}, client {v}")


def test_stages_follow_one_another_with_random_numbers_of_their_own():
    for t, found in enumerate(arrived(Uplink(TopK(k=5, feedback="none"), QSGD(4)))):
        for v, row in found.items():
            top = naive_topk(sent(t)[v], v, t, k=5)
            u = rng.uniform(drawn(v, t, stage=1), torch.arange(D), torch.float64)[0].numpy()
            norm = np.linalg.norm(top)
            np.testing.assert_allclose(row, norm * np.sign(top) * np.floor(4 * abs(top) / norm + u) / 4, atol=1e-10)


@pytest.mark.parametrize("stage", [RandK(k=2), QSGD(2)])
def test_unbiased_compressors_are_so_and_err_no_more_than_they_may(stage):
    """The mean over 4000 clients is the row within five standard errors, number by number."""
    n, row = 4000, torch.as_tensor(sent(0)[1])
    keys = rng.row_keys(torch.zeros(n, dtype=torch.int64), rng.Purpose.UPLINK, torch.arange(n), 0)
    found = stage.compress(row.expand(n, -1), keys)
    assert ((found.mean(0) - row).abs() < 5 * found.std(0) / math.sqrt(n)).all()
    errors = (found - row).square().sum(1)
    bound = D / 2 - 1 if isinstance(stage, RandK) else min(D / 4, math.sqrt(D) / 2)
    most = bound * row.square().sum() + 5 * errors.std() / math.sqrt(n)
    assert 0.2 * most < errors.mean() < most
    if isinstance(stage, RandK):  # exactly d/k − 1
        assert abs(errors.mean() / row.square().sum() - bound) < 5 * errors.std() / row.square().sum() / math.sqrt(n)


def test_topk_and_sign_lose_what_they_may():
    rows = torch.as_tensor(sent(0))
    squares, keys = rows.square().sum(1), torch.zeros(len(rows), dtype=torch.int64)
    assert ((rows - TopK(k=2).compress(rows, keys)).square().sum(1) <= (1 - 2 / D) * squares).all()
    lost = (rows - Sign().compress(rows, keys)).square().sum(1)
    torch.testing.assert_close(lost, squares - rows.abs().sum(1).square() / D)


@pytest.mark.parametrize(
    ("stages", "bytes_sent"),
    [
        ([], 4000),
        ([TopK(k=10)], 10 * 4 + 10 * 4),
        ([TopK(k=100)], 100 * 4 + 125),  # a bit for every column is less than 4 bytes a place
        ([TopK(fraction=0.05)], 50 * 4 + 125),
        ([TopK(fraction=1e-9)], 4 + 4),
        ([TopK(fraction=1.0)], 4000),
        ([RandK(k=10)], 10 * 4 + 8),
        ([QSGD(1)], 4 + 250),
        ([QSGD(16)], 4 + 750),  # 17 levels take five bits, and a sign
        ([Sign()], 125 + 4),
        ([Sign(scaled=False)], 125),
        ([TopK(k=10), QSGD(3)], 4 + 40 + 4),  # three bits each
        ([TopK(k=10), Sign()], 125 + 4),
        ([Sign(), QSGD(3)], 375 + 4 + 4),  # three bits for each of all signs, and two numbers
    ],
)
def test_bytes_of_a_thousand_numbers(stages, bytes_sent):
    assert Uplink(*stages).code(1000, 4).bytes == bytes_sent


@pytest.fixture(name="run")
def run_fixture(Scripted, Regression, regression_of):
    """Five rounds on a small regression."""

    def build(*stages: Stage, counts=COUNTS, seeds=SEEDS, **options) -> Simulation:
        given = {"strategy": FedAvg(), "rounds": len(counts), "execution": Execution(dtype="float64", chunk=3)}
        rule = SGD(lr=0.05, steps=2, batch_size=None)
        own = np.asarray(counts)[:, [SEEDS.index(s) for s in seeds]]
        return Simulation(
            regression_of((5, 2, 9, 1)), Regression, clients=M, availability=Scripted(own), local=rule, seeds=seeds,
            uplink=Uplink(*stages), **given | options,
        )  # fmt: skip

    return build


@pytest.mark.parametrize("strategy", [FedAvg(), MIFA()])
@pytest.mark.parametrize("feedback", ["none", "ef14", "ef21"])
def test_with_nothing_lost_a_run_is_that_without_an_uplink(strategy, feedback, run):
    one = run(TopK(fraction=1.0, feedback=feedback), strategy=strategy).run()
    torch.testing.assert_close(one.state.model, run(strategy=strategy).run().state.model, rtol=0, atol=1e-13)


def test_ef21_under_mifa_steps_along_the_mean_of_all_that_is_remembered(run, play):
    """x ← x − (1/m) Σ_j g_j, in an empty round too."""
    simulation = run(TopK(k=1, feedback="ef21"), strategy=MIFA())
    g = torch.zeros(len(SEEDS) * M, 4, dtype=torch.float64)
    for played in play(simulation):
        g[played.report.cohort.virtual_client_index] = played.report.innovation
        expected = played.before.model - g.unflatten(0, (len(SEEDS), M)).mean(1)
        torch.testing.assert_close(played.after.model, expected, rtol=0, atol=1e-13)


CHAINS = {
    "topk ef14": lambda: [TopK(k=2)],
    "randk, qsgd": lambda: [RandK(k=3), QSGD(2)],
    "sign ef21": lambda: [Sign("ef21")],
}


@pytest.mark.parametrize("name", CHAINS)
def test_replicates_executors_and_memory_on_disk_change_nothing(name, run):
    whole = run(*CHAINS[name]()).run().state.model
    other = run(*CHAINS[name](), execution=Execution(dtype="float64", executor="loop", memory="disk")).run()
    torch.testing.assert_close(other.state.model, whole, rtol=0, atol=1e-12)
    alone = run(*CHAINS[name](), seeds=SEEDS[1:]).run().state.model
    torch.testing.assert_close(alone, whole[1:], rtol=0, atol=1e-12)
    assert not torch.allclose(whole, run().run().state.model, atol=1e-3)


def test_a_run_that_goes_on_is_the_uninterrupted_one(run, tmp_path):
    quiet = Tracking(progress="none", tensorboard=False)
    for rounds in (2, 5):
        resumed = run(TopK(k=2), rounds=rounds).run(tmp_path, resume=True, tracking=quiet)
    assert torch.equal(resumed.state.model, run(TopK(k=2)).run().state.model)


def test_who_computes_without_taking_part_sends_nothing(run, play):
    """Everybody computes under FedPBC; the others keep their own models, as they are."""
    simulation = run(Sign("none"), strategy=FedPBC())
    first = next(iter(play(simulation)))
    apart = ~torch.as_tensor(COUNTS[0].reshape(-1)).bool()
    start, model = first.report.start, first.report.carry["params"]
    assert torch.equal(first.after.models[apart], model[apart])
    heard = (start - model)[~apart]
    torch.testing.assert_close(heard.abs(), heard.abs()[:, :1].expand_as(heard))  # signs, with one magnitude
    assert (start - model)[apart].abs().std(1).min() > 1e-3


@pytest.mark.parametrize(("strategy", "rows"), [(FedAvg(), 1), (Scaffold(), 2), (LocalOnly(), 0)])
def test_bytes_of_a_run_are_those_of_what_is_sent(strategy, rows, run):
    """Four numbers of eight bytes; of SCAFFOLD's two vectors the second goes as it is."""
    last = run(Sign(), strategy=strategy).run().history[-1]
    one = 0 if rows == 0 else 1 + 8 + (rows - 1) * 32
    assert last["total_bytes_up"] == one * COUNTS[:, 1].sum()
    assert last["total_bytes_down"] == rows * 32 * COUNTS[:, 1].sum()


def test_what_cannot_follow_is_refused(run):
    with pytest.raises(ConfigError, match=r"QSGD comes after a stage with feedback=ef21.*feedback=ef14"):
        run(TopK(feedback="ef21"), QSGD())
    with pytest.raises(ConfigError, match=r"uplink\.mine is a int; give a class of fedsim\.uplink\.Stage"):
        Uplink(mine=3)

    class Half(Stage):
        def __call__(self, rows, link):
            return rows[:, :2]

    with pytest.raises(ConfigError, match="uplink=Half must return rows \\[3, 7\\], and returns \\[3, 2\\]"):
        arrived(Uplink(Half()), COUNTS[:1, :1].repeat(2, 1) * [[[1], [0]]])
