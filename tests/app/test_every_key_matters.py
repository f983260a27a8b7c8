"""No key is dead: for every one there is a composition in which another value of it changes what a run gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_files import write
from setting_pairs import BESIDE, base, given, values, with_value
from settings_that_matter import AVAILABILITY, BASE, ELSEWHERE, WHERE, more_files
from small_runs import configuration

from fedsim.app.config import keys
from fedsim.core.errors import MissingDataError

PARTS = 12


def matters(key: str) -> bool:
    """Does another value change anything, as the table says, or with the first choices that have the key?"""
    if key in WHERE:
        beside, value = WHERE[key]
        cfg, before, _ = base(*BASE, *beside)
        after, _ = given(configuration(*BASE, *beside, f"{key}={value}"))
        return after != before and not after.startswith(f"refused: {key}")
    for choice in keys()[key][:2] or [None]:
        own = [] if choice is None else [*BESIDE.get(choice, []), choice]
        there = [] if any(word.startswith("availability=") for word in own) else AVAILABILITY
        cfg, before, _ = base(*BASE, *there, *own)
        for value in values(cfg, key):
            after, _ = given(with_value(cfg, key, value))
            if after != before and not after.startswith("refused"):
                return True
    return False


HOLDERS = {key.rpartition(".")[0] for key in keys()}  # of other keys
ALL = sorted(key for key in keys() if not key.endswith("_target_") and key not in HOLDERS | ELSEWHERE.keys())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_key_matters_somewhere(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    more_files(tmp_path)
    dead = []
    for key in ALL[part::PARTS]:
        try:
            if not matters(key):
                dead.append(key)
        except MissingDataError:
            continue
    base.cache_clear()
    assert not dead


def test_the_table_knows_no_key_that_is_none() -> None:
    assert not (WHERE.keys() | ELSEWHERE.keys()) - keys().keys()
    assert not WHERE.keys() & ELSEWHERE.keys()
