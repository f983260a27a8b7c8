"""What the folders of runs are called; a sweep's runs by what varies among them, in the sweep's folder and no other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from fedsim.core.settings import short

RESUME = ("never", "auto", "overwrite")
LONGEST_NAME = 200  # of a run's folder in a sweep; file systems end at 255 bytes
ALONE = "run"  # the run of a sweep in which nothing varies
PLAIN = re.compile(r"[\w.,:()\[\]{}@+-]*(?: [\w.,:()\[\]{}@+-]+)*")  # values that name a folder as they are


def run_folder(out: str, resume: str | None) -> str:
    """`resume` may name the run folder itself."""
    return out if resume is None or resume in RESUME else resume


def job_folder(overrides: Iterable[str], fixed: Sequence[str] = ()) -> str:
    """The name of a sweep's run: keys by their last words, and what stands in the way of a folder's name as a digest.

    Args:
        overrides: that make the run, KEY=VALUE.
        fixed: keys that are the same in the whole sweep.
    """
    given = dict(sorted((key_of(text), text.partition("=")[2]) for text in overrides))
    named = short({key for key in given if key not in fixed})
    parts = [f"{named[key]}={_value(text)}" for key, text in given.items() if key in named]
    name = ",".join(parts) or ALONE
    if len(name.encode()) <= LONGEST_NAME:
        return name
    start = name.encode()[: LONGEST_NAME - 17].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def key_of(override: str) -> str:
    """Its key or group, without signs that add and remove."""
    return override.partition("=")[0].lstrip("+~")


def _value(text: str) -> str:
    """A value as a part of a folder's name. Of a path the last word, and a digest that keeps values apart."""
    if PLAIN.fullmatch(text):
        return text
    word = re.sub(r"[^\w.,+-]+", "_", re.split(r"[/\\]", text.strip("\"' /\\"))[-1]).strip("_")
    return f"{word}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")
