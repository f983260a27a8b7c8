"""Of a key in a composition another value changes what the run gives, or the log says that it has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_files import write
from setting_pairs import base, compositions, keys_of, mixed, outcome, sampled_keys
from settings_that_matter import BASE, UNHEARD, more_files

from fedsim.core.errors import MissingDataError

FAILED = "silent", "raised"
SLOW_MODELS = "resnet18", "torchvision", "cifar10_cnn", "cinic10_cnn", "svhn_cnn", "leaf_cnn", "vit"
EVERY = [
    (words, group)
    for words, group in compositions()
    if not words[-1].endswith(SLOW_MODELS) and not words[-1].endswith("=custom")
]
PARTS = 24
# Compositions in which keys wait for others: what stands there, and the key that is changed.
CONDITIONAL = [
    (["clock=devices"], "clock.link_spread"),
    (["uplink=clip"], "uplink.clip.rate"),
    (["uplink=clip"], "uplink.clip.count_noise"),
    (["attack=sign_flip", "attack.clients=[0,1]"], "attack.fraction"),
    (["strategy=fedlaavg", "strategy.select=all"], "strategy.fraction"),
    (["strategy=fedopt", "strategy.optimizer=adagrad"], "strategy.beta2"),
    (["availability=full", "strategy=mimic"], "strategy.first_round"),
    (["availability=full", "strategy=mifa"], "strategy.wait_for_all"),
    (["availability=full", "strategy=fedpbc"], "strategy.compute"),
]


@pytest.fixture(autouse=True, name="here")
def here_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    more_files(tmp_path)
    yield
    base.cache_clear()


def silent(words: tuple[str, ...], keys: list[str]) -> list[str]:
    """Those of the keys whose other values change nothing, and nobody says so."""
    found = []
    for key in keys:
        what, value = outcome(words, key)
        if what == "silent" and key not in UNHEARD:
            found.append(f"{key}={value}")
    return found


def runs(words: tuple[str, ...]) -> bool:
    try:
        return not base(*words)[1].startswith("refused")
    except MissingDataError:
        return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", range(len(CONDITIONAL)))
def test_a_key_that_waits_for_another_is_told(place: int) -> None:
    words, key = CONDITIONAL[place]
    assert outcome((*BASE, *words), key, patient=False)[0] == "told"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_key_of_a_choice_is_silent(part: int) -> None:
    found = {}
    for words, group in EVERY[part::PARTS]:
        if runs(words) and (own := silent(words, [k for k in keys_of(base(*words)[0]) if k.startswith(f"{group}.")])):
            found[words[-1]] = own
        base.cache_clear()
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_key_of_a_random_composition_is_silent(seed: int) -> None:
    keys = sampled_keys(seed)
    if not keys:
        pytest.skip("this composition is refused")
    assert not silent(mixed(seed), keys)
