"""LEAF's JSON: users become clients, their test samples stay theirs, and files that are something else."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import LEAF
from fedsim.models import CharLSTM, Linear

DRAW = np.random.default_rng(2)
SIZES = {"f0001_41": (6, 2), "f0000_14": (9, 3), "976906": (4, 1)}
BOTH = ("train", "test")
USERS = {
    half: {
        user: {"x": DRAW.random((sizes[k], 12)).tolist(), "y": DRAW.integers(0, 3, sizes[k]).tolist()}
        for user, sizes in SIZES.items()
    }
    for k, half in enumerate(BOTH)
}


def content(half: str = "train", users: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    users = list(SIZES) if users is None else users
    data = {user: USERS[half][user] for user in users}
    return {"users": users, "num_samples": [len(d["y"]) for d in data.values()], "user_data": data} | changes


def written(content: Any, path: str = "leaf/train/all.json") -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content if isinstance(content, str) else json.dumps(content))
    return path.split("/")[0]


def both() -> str:
    """Users in two files a half, as LEAF writes many of them."""
    for half in BOTH:
        written(content(half, list(SIZES)[:2]), f"leaf/{half}/0.json")
        written(content(half, list(SIZES)[2:]), f"leaf/{half}/1.json")
    return "leaf"


def test_users_are_clients_in_training_and_test() -> None:
    data = LEAF(both())
    assert data.client_names == ("976906", "f0000_14", "f0001_41")
    for number, name in enumerate(data.client_names):
        for half, owners, x, y in (
            ("train", data.owners, data.train_x, data.train_y),
            ("test", data.test_owners, data.test_x, data.test_y),
        ):
            own = USERS[half][name]
            assert torch.equal(x[owners == number], torch.tensor(own["x"]))
            assert [int(data.label_names[label]) for label in y[owners == number]] == own["y"]


def test_inputs_get_their_shape_and_train() -> None:
    data = LEAF(both(), shape=[1, 3, 4], classes=62)
    assert data.shape == (1, 3, 4)
    assert data.classes == 62
    assert torch.equal(data.train_x.flatten(1), LEAF("leaf").train_x)
    final = Simulation(data, Linear, clients="all", rounds=2).run().final
    assert 0 <= final["test_accuracy_by_client"][0] <= 1


@pytest.mark.parametrize("path", ["leaf/train", "leaf/train/all.json"])
def test_one_half_holds_samples_out(path: str) -> None:
    written(content())
    data = LEAF(path, test_fraction=0.5)
    assert torch.bincount(data.test_owners).tolist() == [2, 4, 3]


def test_users_who_only_test_test_everybody() -> None:
    written(content(users=["f0001_41", "976906"]))
    written(content("test", ["f0000_14"]), "leaf/test/all.json")
    data = LEAF("leaf")
    assert data.test_owners is None
    assert len(data.test_x) == 3


def test_a_user_without_samples_is_left_out() -> None:
    nobody = content(users=[*SIZES]) | {"num_samples": [0, 9, 4]}
    nobody["user_data"] = nobody["user_data"] | {"f0001_41": {"x": [], "y": []}}
    assert LEAF(written(nobody)).client_names == ("976906", "f0000_14")


def user(**changes: Any) -> Callable[[], str]:
    """The file with other samples of its first user."""

    def write() -> str:
        data = content()
        first = data["user_data"]["f0001_41"] | changes
        return written(data | {"user_data": data["user_data"] | {"f0001_41": first}})

    return write


X, Y = (USERS["train"]["f0001_41"][key] for key in ("x", "y"))
BAD: dict[str, tuple[Callable[[], str], dict[str, Any], str]] = {
    "absent": (lambda: "nowhere", {}, "path=nowhere does not exist"),
    "empty folder": (lambda: str(Path("leaf").mkdir() or "leaf"), {}, "leaf has no JSON files"),
    "empty file": (lambda: written(""), {}, "cannot be read as JSON"),
    "cut": (lambda: written(json.dumps(content())[:-9]), {}, "cannot be read as JSON"),
    "bytes": (lambda: str(Path("a.json").write_bytes(b"\xff\xfe") and "a.json"), {}, "cannot be read as JSON"),
    "nested without end": (lambda: written("[" * 100_000), {}, "cannot be read as JSON"),
    "a list": (lambda: written([1, 2]), {}, "this is a list"),
    "other keys": (
        lambda: written({"samples": []}),
        {},
        "a LEAF file holds a list users and an object user_data, not samples",
    ),
    "nobody": (lambda: written(content(users=[])), {}, "no user has samples"),
    "no data of a user": (lambda: written(content(user_data={})), {}, "user 'f0001_41' has no lists x and y"),
    "counts": (lambda: written(content(num_samples=[1])), {}, "num_samples must have a number for each of the 3 users"),
    "another count": (lambda: written(content(num_samples=[6, 9, 5])), {}, "num_samples is 5 for user '976906', who"),
    "unequal": (user(y=Y[:5]), {}, "user 'f0001_41' has 6 inputs and 5 targets"),
    "ragged": (user(x=[*X[:5], X[5][:3]]), {}, "user f0001_41: x is ragged"),
    "another shape": (user(x=[x[:3] for x in X]), {}, "x is ragged: its entries differ in shape ([12] and [3])"),
    "words": (
        user(x=["to be"] * 6),
        {},
        "x holds words such as 'to be'; as text, dataset=leaf reads sequences of equal length",
    ),
    "NaN": (user(x=[*X[:5], [float("nan"), *X[5][1:]]]), {}, "sample 5 of user f0001_41 holds nan in x"),
    "3.7 is no label": (user(y=[*Y[:5], 3.7]), {}, "sample 5 of user f0001_41 has the target 3.7"),
    "no label": (user(y=[*Y[:5], None]), {}, "sample 5 of user f0001_41 has no label"),
    "twice": (
        lambda: written(content()) and written(content(), "leaf/train/b.json"),
        {},
        "also occurs in another file",
    ),
    "test alone": (lambda: written(content(), "leaf/test/a.json"), {}, "has a folder test but no folder train"),
    "a shape": (lambda: written(content()), {"shape": [3, 5]}, "shape=[3, 5] holds 15 numbers, but"),
    "no shape": (lambda: written(content()), {"shape": [0, 5]}, "shape=0 must be a whole number"),
    "label beyond": (lambda: written(content()), {"classes": 2}, "but classes=2 are 0 to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str) -> None:
    make, options, says = BAD[case]
    path = make()
    refused(lambda: LEAF(path, **options), says)


def test_test_samples_of_another_shape() -> None:
    written(content())
    other = {user: {"x": [[1.0]], "y": [0]} for user in SIZES}
    written(content("test") | {"user_data": other, "num_samples": [1, 1, 1]}, "leaf/test/a.json")
    refused(lambda: LEAF("leaf"), "leaf/test: test inputs are [1] float32, training inputs [12] float32")


LINES = {"train": {"HAMLET": "to be or not to be", "OPHELIA": "good my lord"}, "test": {"HAMLET": "to bz or"}}


def sequences(text: str, length: int = 4) -> dict[str, list[str]]:
    """As LEAF's preprocessing of Shakespeare cuts them."""
    return {"x": [text[k : k + length] for k in range(len(text) - length)], "y": list(text[length:])}


def shakespeare() -> str:
    for half, said in LINES.items():
        data = {user: sequences(text) for user, text in said.items()}
        counts = [len(own["y"]) for own in data.values()]
        written({"users": list(data), "num_samples": counts, "user_data": data}, f"leaf/{half}/all.json")
    return "leaf"


def test_sequences_of_characters_are_tokens_of_the_training_alphabet(here):
    data = LEAF(shakespeare())
    text = LINES["train"]["HAMLET"]
    assert data.alphabet == "".join(sorted(set("".join(LINES["train"].values()))))
    assert data.classes == len(data.alphabet) + 1
    assert data.tokens
    assert data.train_x.shape == (len(text) - 4 + 12 - 4, 4)
    spelled = ["".join(data.alphabet[n - 1] for n in row) for row in data.train_x.tolist()]
    hamlet = list(data.client_names).index("HAMLET")
    mine = [n for n, owner in enumerate(data.owners.tolist()) if owner == hamlet]
    assert [spelled[n] for n in mine] == sequences(text)["x"]
    assert [data.alphabet[data.train_y[n] - 1] for n in mine] == sequences(text)["y"]  # blanks among them
    assert (data.test_x == 0).any()
    assert data.test_y[0] == 0


def test_a_network_of_characters_trains_on_them(here):
    data = LEAF(shakespeare())
    model = functools.partial(CharLSTM, embedding=2, hidden=3, layers=1)
    final = Simulation(data, model, clients=2, rounds=1).run().final
    assert np.isfinite(final["train_loss"][0])


@pytest.mark.parametrize("options", [{"shape": [4]}, {"classes": 3}, {"task": "regression"}], ids=str)
def test_what_text_determines_itself_cannot_be_set(options: dict[str, Any], here) -> None:
    with pytest.raises(ConfigError, match="holds text, which determines shape, classes and task"):
        LEAF(shakespeare(), **options)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (["000001.jpg", "000002.jpg"], [0, 1], "read image files with dataset=image_folder"),
        (["to be", "or"], ["o", "n"], "sequences of equal length with a character as target"),
        ([["1", "a", "b", "c", "d", "love it"]] * 2, [0, 4], "Sent140's and Reddit's"),
    ],
)
def test_other_texts_are_refused_in_a_sentence(x, y, says, here):
    one = {"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": x, "y": y}}}
    with pytest.raises(ConfigError, match=says):
        LEAF(written(one))
