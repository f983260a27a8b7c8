"""Dropout is keyed: its share, its masks, its gradient, and layers that cannot be keyed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import SETTINGS, inputs
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsim.core import rng
from fedsim.models import StatelessModel
from fedsim.models.dropout import KeyedDropout, key_dropouts


def keyed(p: float, key: int = 0, layer: int = 0, channelwise: bool = False) -> KeyedDropout:
    dropout = KeyedDropout(p, layer, channelwise).train()
    dropout.key = torch.tensor(key)
    return dropout


class Nested(nn.Module):
    """Dropouts of every kind, at every depth."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout2d(0.2)) for _ in range(2)])
        self.deep = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Sequential(nn.Dropout(0.3), nn.Linear(128, 3))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.deep(x)


@SETTINGS
@given(p=st.sampled_from([0.1, 0.2, 0.5, 0.9]), key=st.integers(-(2**63), 2**63 - 1), layer=st.integers(0, 20))
def test_dropout_keeps_its_share_and_scales_it(p: float, key: int, layer: int) -> None:
    """Kept entries are 1/(1 − p), the rest 0, and their share is 1 − p within 5 σ (many keys: within 6)."""
    x = torch.ones(100, 100)
    out = keyed(p, key, layer)(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full((int(kept.sum()),), 1 / (1 - p)))
    assert abs(kept.double().mean() - (1 - p)) < 6 * math.sqrt(p * (1 - p) / x.numel())


def test_dropout_masks_are_independent_over_keys_layers_and_positions() -> None:
    """No two of 40 masks correlate, nor neighbours within a mask."""
    x = torch.ones(50, 200)
    masks = [keyed(0.5, key, layer)(x) for key in range(10) for layer in range(4)]
    flat = torch.stack([m.reshape(-1) for m in masks]).double()
    assert (torch.corrcoef(flat) - torch.eye(40)).abs().max() < 6 / math.sqrt(x.numel())
    for a, b in ((masks[0][:-1], masks[0][1:]), (masks[0][:, :-1], masks[0][:, 1:])):
        assert abs(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1]) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("channelwise", [False, True])
def test_dropout_is_the_same_vmapped_looped_and_padded(channelwise: bool) -> None:
    """A client's masks depend neither on its neighbours in a chunk nor on the padding behind its batch."""
    x = torch.ones(6, 5, 3, 4, 4)
    keys = rng.row_keys(torch.zeros(6, dtype=torch.int64), rng.Purpose.DROPOUT, torch.arange(6), 0)
    dropout = KeyedDropout(0.4, 1, channelwise).train()
    together = vmap(lambda k, batch: functional_call(dropout, {"key": k}, (batch,)))(keys, x)
    for client in range(6):
        alone = functional_call(dropout, {"key": keys[client]}, (x[client],))
        assert torch.equal(together[client], alone)
        assert torch.equal(functional_call(dropout, {"key": keys[client]}, (x[client, :2],)), alone[:2])


def test_channelwise_dropout_drops_whole_channels() -> None:
    out = keyed(0.5, channelwise=True)(torch.ones(40, 50, 4, 4)).flatten(2)
    assert ((out == 0).all(2) | (out == 2).all(2)).all()
    kept = (out[:, :, 0] != 0).double()
    assert abs(kept.mean() - 0.5) < 5 * 0.5 / math.sqrt(kept.numel())


def test_dropout_is_the_identity_in_evaluation_and_for_p_zero() -> None:
    x = torch.randn(4, 7)
    assert torch.equal(keyed(0.5).eval()(x), x)
    assert torch.equal(keyed(0.0)(x), x)


def test_dropout_with_p_one_drops_everything() -> None:
    """As `nn.Dropout(1.0)` does: zeros, not 0/0."""
    x = torch.randn(4, 7)
    assert torch.equal(keyed(1.0)(x), torch.zeros_like(x))
    assert torch.equal(nn.Dropout(1.0)(x), torch.zeros_like(x))


def test_the_gradient_flows_through_kept_entries_only() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    out = keyed(0.3, 4)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, (out != 0).float() / 0.7)


def test_every_nested_dropout_is_replaced() -> None:
    """With its own p, kind and layer number; nothing of the global stream is left."""
    module = Nested()
    names = key_dropouts(module)
    assert names == ["first.key", "blocks.0.1.key", "blocks.1.1.key", "deep.1.0.0.key"]
    found = [m for m in module.modules() if isinstance(m, KeyedDropout)]
    assert [(m.p, m.channelwise) for m in found] == [(0.1, False), (0.2, True), (0.2, True), (0.3, False)]
    assert len({m.layer for m in found}) == 4
    assert not [m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]


def test_a_dropout_used_in_two_places_is_replaced_in_both() -> None:
    """One object under two names, as in `drop = nn.Dropout(0.5); nn.Sequential(a, drop, b, drop)`."""
    drop = nn.Dropout(0.5)
    model = StatelessModel(nn.Sequential(nn.Flatten(), nn.Linear(128, 64), drop, nn.Linear(64, 64), drop))
    assert not [m for m in model.training_module.modules() if isinstance(m, nn.Dropout)]
    batch, row = {"x": inputs(), "key": torch.tensor(3)}, torch.randn(model.dimension)
    torch.manual_seed(1)
    first = model.predict(model.unflatten(row), batch)
    torch.manual_seed(2)
    assert torch.equal(model.predict(model.unflatten(row), batch), first)


def test_a_model_with_dropout_predicts_by_its_key() -> None:
    model = StatelessModel(Nested)
    row, x = model.initial([0])[0], inputs()
    outputs = [model.predict(model.unflatten(row), {"x": x, "key": torch.tensor(key)}) for key in (1, 1, 2)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(model.evaluate(row, x), model.evaluate(row, x))


def test_keys_lie_on_the_device_of_the_model() -> None:
    """The device 'meta' stands for a GPU."""
    module = Nested().to("meta")
    names = key_dropouts(module, torch.device("meta"))
    assert {name: buffer.device.type for name, buffer in module.named_buffers()} == dict.fromkeys(names, "meta")
