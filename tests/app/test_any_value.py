"""Whatever value any key is given: it is taken, or refused in a sentence that names the key."""

from __future__ import annotations

import copy
import functools
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from bad_input import QUIET, RoundStartedError, answer, started
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from own_files import SETTINGS, write
from small_runs import COMPANY, SHIFTED

from fedsim.app.cli import run
from fedsim.app.config import config_folder, groups, keys
from fedsim.core import ConfigError
from fedsim.trainer import Trainer

NEVER = ("abc", "nan", "inf", "[1,a]", "{a:1}", "''")  # whatever the key
WRONG = ("abc", "-1", "nan", "inf", "[]", "[1,a]", "{a:1}", "null", "true", "0", "-0.5", "''", "99999999999999999999")
BESIDE = {
    "model=mean": ["dataset=gaussian_mean", "partition=natural"],
    "model=custom": ["model._target_=fedsim.models.MLP"],
    **COMPANY,
    **SETTINGS,
    **{f"shift={name}": beside for name, beside in SHIFTED.items()},
} | {
    f"dataset={name}": ["partition=natural"] + (["model=mean"] if name.startswith(("gau", "mar", "pri", "qua")) else [])
    for name in groups()["dataset"]
    if name.startswith(("binary", "gaussian", "house", "market", "pricing", "quadratics", "regression", "synthetic"))
}
SETTABLE = sorted(name for name in keys() if name not in ("out", "resume") and not name.startswith("dataset.augment"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's library, where it is there, keeps nothing outside."""
    if find_spec("datasets"):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def any_value(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any key, under a choice that has it, with a value that few of them take: it runs, or says why not."""
    name = data.draw(st.sampled_from(SETTABLE))
    choice = [data.draw(st.sampled_from(keys()[name]))] if keys()[name] else []
    beside = BESIDE.get(choice[0], []) if choice else []
    value = data.draw(st.sampled_from(WRONG))
    said = answer(monkeypatch, *beside, *choice, f"{name}={value}", "resume=overwrite")
    assert value not in NEVER if said is None else len(said) > 20


QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.mark.slow
@settings(max_examples=12, **QUICK)
@given(data=st.data())
def test_any_value_of_any_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    any_value(data, monkeypatch)


OTHERWISE = (
    "no usable ",
    "needs a data set with natural owners",
    "model does not fit dataset=digits",  # a language model, or a network for colours
    "availability.path is missing",
    "dataset.path is missing",
    "partition.partitioner",
    "dataset.target is missing",
    "._target_ is missing",
    "inputs, but dataset",
)


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """The configuration; composing it takes several times as long as refusing it."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", [*QUIET, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_every_key_with_every_wrong_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words, NaN and the like are no key's value; the message names the key, unless something else stops the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "generate_round_tasks", started)
    write(tmp_path)
    text, tried, refused = WRONG[number], 0, 0
    for place, name in enumerate(SETTABLE):
        choices = keys()[name] or [None]
        choice = choices[(place + number) % len(choices)]
        cfg = copy.deepcopy(composed(*([] if choice is None else [*BESIDE.get(choice, []), choice])))
        value = OverridesParser.create().parse_override(f"{name}={text}").value()
        OmegaConf.update(cfg, name, value, merge=False, force_add=True)
        tried += 1
        with pytest.raises((ConfigError, RoundStartedError)) as raised:
            run(cfg, tmp_path / "out", {})
        said = str(raised.value)
        if raised.type is RoundStartedError:
            assert text not in NEVER, f"{name}={text} runs with {choice}"
        else:
            refused += 1
            assert any(word in said for word in (name.rpartition(".")[2], *OTHERWISE)), said
        shutil.rmtree("out", ignore_errors=True)
    with capsys.disabled():
        print(f" {text}: {refused} of {tried} keys refuse it", end="")
    assert tried == len(SETTABLE) > 150
