"""Random calls inside a forward pass: a function of the key, the same under vmap, with the laws they are called for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedsim.core import ConfigError
from fedsim.models.randomness import ALPHA_DROPOUT_VALUE, KeyedRandomness

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(2, 3, 4)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True).double()


def noise(x: Tensor) -> Tensor:
    """As torchvision's StochasticDepth draws it."""
    kept = torch.empty([len(x), 1, 1], dtype=x.dtype).bernoulli_(0.7)
    kept.div_(0.7)
    return x * kept


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of channels": lambda x: F.dropout2d(x[..., None], 0.3)[..., 0],
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rand": lambda x: x + torch.rand(4),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(3, 4, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal": lambda x: torch.normal(x, 0.1),
    "normal of a size": lambda x: x + torch.normal(0.0, 1.0, size=(4,)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli by p": lambda x: x * torch.bernoulli(x, 0.3),
    "stochastic depth": noise,
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(1, 2),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "randint": lambda x: x + torch.randint(3, (4,)),
    "randperm": lambda x: x + torch.randperm(4),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "hard gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True),
    "multihead": lambda x: ATTENTION(x, x, x)[0],
    "two calls": lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5),
}


def under(key: Tensor, call: Callable[[Tensor], Tensor], x: Tensor = X) -> Tensor:
    with KeyedRandomness(key):
        return call(x)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_a_function_of_its_key_and_vmap_changes_nothing(name: str) -> None:
    keys, call = torch.tensor([11, 12, 11]), CALLS[name]
    stream = torch.get_rng_state()
    alone = [under(key, call) for key in keys]
    torch.manual_seed(7)
    seeded = torch.get_rng_state()
    together = vmap(lambda key, x: under(key, call, x))(keys, X.expand(3, -1, -1, -1))
    assert torch.equal(torch.get_rng_state(), seeded)  # nothing is drawn from the global stream
    torch.set_rng_state(stream)
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-14)
    assert torch.equal(alone[0], alone[2])
    assert not torch.equal(alone[0], alone[1])


def test_two_calls_in_one_pass_draw_different_numbers() -> None:
    def both(x: Tensor) -> Tensor:
        return torch.stack([torch.rand_like(x), torch.rand_like(x)])

    first, second = under(torch.tensor(3), both)
    assert not torch.equal(first, second)


MANY = torch.zeros(40_000, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "mean", "std"),
    [
        (torch.rand_like, 0.5, 12**-0.5),
        (torch.randn_like, 0.0, 1.0),
        (lambda x: torch.empty_like(x).uniform_(1, 3), 2.0, 2 * 12**-0.5),
        (lambda x: torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
        (lambda x: torch.empty_like(x).exponential_(4.0), 0.25, 0.25),
        (lambda x: torch.empty_like(x).bernoulli_(0.2), 0.2, 0.4),
        (lambda x: torch.empty_like(x).bernoulli_(), 0.5, 0.5),
        (lambda x: F.dropout(x + 1, 0.2), 1.0, 0.5),
        (lambda x: torch.randint(2, 6, x.shape).double(), 3.5, 1.25**0.5),
        (lambda x: F.rrelu(x - 1, 0.2, 0.4, training=True), -0.3, 0.2 * 12**-0.5),
    ],
)
def test_the_laws_are_those_asked_for(call: Callable[[Tensor], Tensor], mean: float, std: float) -> None:
    drawn = under(torch.tensor(5), call, MANY)
    assert drawn.mean().item() == pytest.approx(mean, abs=5 * std / 200)
    assert drawn.std().item() == pytest.approx(std, rel=0.03)


def test_a_hard_gumbel_sample_is_1_where_the_soft_one_is_largest() -> None:
    soft = under(torch.tensor(5), F.gumbel_softmax)
    hard = under(torch.tensor(5), lambda x: F.gumbel_softmax(x, hard=True))
    torch.testing.assert_close(hard, F.one_hot(soft.argmax(-1), 4).double())


def test_dropout_of_everything_leaves_zeros() -> None:
    """As `F.dropout(x, 1.0)` does: zeros, not 0/0."""
    assert torch.equal(under(torch.tensor(5), lambda x: F.dropout(x, 1.0), X), torch.zeros_like(X))


def test_alpha_dropout_keeps_mean_and_variance_and_puts_its_value() -> None:
    x = under(torch.tensor(1), torch.randn_like, MANY)
    out = under(torch.tensor(2), lambda x: F.alpha_dropout(x, 0.25, True), x)
    assert out.mean().item() == pytest.approx(0, abs=0.03)
    assert out.std().item() == pytest.approx(1, rel=0.03)
    a = (0.75 * (1 + 0.25 * ALPHA_DROPOUT_VALUE**2)) ** -0.5
    dropped = torch.isclose(out, torch.tensor(a * ALPHA_DROPOUT_VALUE * 0.75, dtype=out.dtype))
    assert dropped.double().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(out[~dropped], a * (x[~dropped] - ALPHA_DROPOUT_VALUE * 0.25))


@pytest.mark.parametrize("training", [False, True])
def test_without_dropout_attention_is_torchs_own(training: bool) -> None:
    module = nn.MultiheadAttention(4, 2, dropout=0.0 if training else 0.4, batch_first=True).double().train(training)
    with KeyedRandomness(torch.tensor(0)):
        mine = module(X, X, X)[0]
    torch.testing.assert_close(mine, module(X, X, X)[0])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_with_further_keys_is_refused_with_dropout(option: str) -> None:
    module = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True, **{option: True}).double()
    with KeyedRandomness(torch.tensor(0)), pytest.raises(ConfigError, match="set its dropout to 0"):
        module(X, X, X)


def test_attentions_weights_are_dropped_and_the_rest_scaled() -> None:
    """Multi-head attention against its formula, with the weights that it returns."""
    module = ATTENTION.train()
    with KeyedRandomness(torch.tensor(9)):
        out, weights = module(X, X, X, average_attn_weights=False)
    plain = module.eval()(X, X, X, average_attn_weights=False)[1]
    kept = weights != 0
    torch.testing.assert_close(weights, plain * kept / 0.6)
    assert 0 < kept.double().mean() < 1
    values = F.linear(X, module.in_proj_weight[8:], module.in_proj_bias[8:]).reshape(2, 3, 2, 2).transpose(1, 2)
    mixed = (weights @ values).transpose(1, 2).reshape(2, 3, 4)
    torch.testing.assert_close(out, module.out_proj(mixed))
    module.train()


def test_scaled_attention_with_a_mask_never_sees_what_is_hidden() -> None:
    hidden = torch.tensor([[True, False, True]] * 3)
    moved = X.clone()
    moved[:, 1] += 100
    first, second = (
        under(torch.tensor(4), lambda x: F.scaled_dot_product_attention(X, x, x, hidden, dropout_p=0.3), x)
        for x in (X, moved)
    )
    torch.testing.assert_close(first, second)
    added = torch.zeros(3, 3, dtype=X.dtype).masked_fill(~hidden, -math.inf)
    third = under(torch.tensor(4), lambda x: F.scaled_dot_product_attention(x, x, x, added, dropout_p=0.3))
    torch.testing.assert_close(third, first)


def test_what_has_no_answer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="multinomial in a forward pass draws from a global stream"):
        under(torch.tensor(0), lambda x: torch.multinomial(x.abs()[0], 2))


def test_attention_over_one_sequence_is_that_over_a_batch_of_one() -> None:
    module = ATTENTION.train()
    with KeyedRandomness(torch.tensor(9)):
        single = module(X[0], X[0], X[0])[0]
    with KeyedRandomness(torch.tensor(9)):
        batched = module(X[:1], X[:1], X[:1])[0]
    torch.testing.assert_close(single, batched[0])
