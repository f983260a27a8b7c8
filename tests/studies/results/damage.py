"""Ways to damage each file of a run folder."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Damage = Callable[[Path], None]
FILES = ("metrics.csv", "config.yaml", "environment.json", "summary.json", "clients.npz", "checkpoint.safetensors")


def content(data: bytes) -> Damage:
    return lambda path: path.write_bytes(data) and None


def changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def entry(**values: object) -> Damage:
    """Other values of a JSON file's names."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values)) and None


def array(**values: object) -> Damage:
    """Other arrays of an .npz file; None leaves one out."""

    def damage(path: Path) -> None:
        with np.load(path) as file:
            known = {name: file[name] for name in file} | values
        np.savez_compressed(path, **{name: value for name, value in known.items() if value is not None})

    return damage


def replaced(old: bytes, new: bytes) -> Damage:
    return changed(lambda data: data.replace(old, new))


def huge_array() -> bytes:
    """An .npy file that says it has 10^15 numbers."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    return header.getvalue()


ALL: dict[str, Damage] = {
    "empty": content(b""),
    "one byte": content(b"x"),
    "newline": content(b"\n"),
    "zeros": content(bytes(1000)),
    "binary": content(bytes(range(256)) * 4),
    "not UTF-8": content(b"\xff\xfe\x00a: 1\n"),
    "list": content(b"[1, 2, 3]\n"),
    "number": content(b"7\n"),
    "text": content(b'"text"\n'),
    "null": content(b"null\n"),
    "NaN": content(b"NaN\n"),
    "deep": content(b"[" * 5000),
    "a long number": content(b"9" * 6000),
    "braces": content(b"{}\n"),
    "half": changed(lambda data: data[: len(data) // 2]),
    "a third": changed(lambda data: data[: len(data) // 3]),
    "last byte": changed(lambda data: data[:-1]),
    "doubled": changed(lambda data: data + data),
    "bytes changed": changed(lambda data: bytes(b ^ (37 * (i % 11 == 3)) for i, b in enumerate(data))),
    "first byte": changed(lambda data: b"\x00" + data[1:]),
    "folder": _folder,
    "link to nowhere": _nowhere,
    "pipe": _pipe,
    "gone": lambda path: path.unlink(),
}
OWN: dict[str, dict[str, Damage]] = {
    "metrics.csv": {
        "a column less": replaced(b"train_loss,", b""),
        "other columns": replaced(b"round,seed", b"rund,sed"),
        "a word": replaced(b"\n1,", b"\none,"),
        "rounds out of order": replaced(b"\n2,", b"\n0,"),
        "a replicate less": changed(lambda data: data.replace(b"\n1,0,", b"\n# ", 1)),
        "huge": changed(lambda data: data.replace(b"\n1,", b"\n1" + b"0" * 400 + b",")),
        "a NUL": replaced(b"\n1,", b"\n\x00,"),
    },
    "config.yaml": {
        "tabs": replaced(b"  ", b"\t"),
        "an object": content(b"rounds: !!python/object/apply:os.system ['true']\n"),
        "rounds are a word": replaced(b"rounds: 2", b"rounds: [many]"),
        "an interpolation": content(b"rounds: ${nothing.here}\n"),
        "strategy is a number": content(b"strategy: 3\nrounds: 2\n1: 2\n"),
        "itself": content(b"a: &a\n  b: *a\n"),
    },
    "environment.json": {
        "settings are a list": entry(settings=[1]),
        "versions are a text": entry(versions="many"),
        "commit is a number": entry(commit=7),
        "no letter": entry(command="\ud800"),
    },
    "summary.json": {
        "stopped is a list": entry(stopped=[1]),
        "speed is a text": entry(samples_per_second="fast"),
        "speed is infinite": entry(samples_per_second=float("inf")),
        "newcomers are a number": entry(newcomers=3),
        "newcomers are unlike": entry(newcomers=[{"epoch": 0}, {"a": 1}]),
        "newcomers are none": entry(newcomers=[]),
        "final is a list": entry(final=[]),
    },
    "clients.npz": {
        "present is missing": array(present=None),
        "number is missing": array(number=None),
        "number is an array": array(number=np.arange(3)),
        "number is negative": array(number=-4),
        "accuracy is text": array(accuracy=np.array([["a"]])),
        "accuracy is flat": array(accuracy=np.arange(3.0)),
        "accuracy is empty": array(accuracy=np.zeros((2, 0))),
        "accuracy is infinite": array(accuracy=np.full((2, 4), np.inf)),
        "samples are of others": array(samples=np.arange(99)),
        "fractions are NaN": array(class_fractions=np.full((4, 10), np.nan)),
        "names are of others": array(names=np.array(["a"])),
        "pickled": content(
            b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n" + b"\x80"
        ),
        "enormous": content(huge_array()),
    },
}


def cases() -> list[tuple[str, str]]:
    """File and damage, all of them."""
    return [(file, name) for file in FILES for name in [*ALL, *OWN.get(file, {})]]


def damage(folder: Path, file: str, name: str) -> None:
    """Damage a file of a run in this way."""
    (ALL | OWN.get(file, {}))[name](folder / file)


def copies(good: Path, folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """The good run, copied under these names."""
    for name in names:
        shutil.copytree(good, folder / name)
        yield folder / name
