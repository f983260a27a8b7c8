"""Any text file as a federation: every character in its place, speakers as clients, both language models learn it."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedsim import ConfigError, EvaluationOptions, Simulation
from fedsim.data.datasets import Text
from fedsim.local import SGD, Adam
from fedsim.models import CharLSTM, Transformer

PLAY = """The Tragedy of the Test.

ACT I.

BRUTUS.
Speak, speak!
I listen to you.

First Citizen:
You are all resolved: rather to die
than to famish?
Resolved:

All:
Resolved.

  CASSIUS, his friend:
Aye, aye.
BRUTUS.
Then I shall listen still.
"""


def written(folder: Path, text: str) -> str:
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return str(folder / "text.txt")


def decoded(data: Text, tokens: torch.Tensor) -> str:
    return "".join("\0" if token == 0 else data.alphabet[token - 1] for token in tokens.flatten().tolist())


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\r\ufeff"), min_size=20, max_size=400),
    length=st.integers(1, 9),
    clients=st.integers(1, 4),
    fraction=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_sequences_are_the_text_and_targets_what_follows(
    text: str, length: int, clients: int, fraction: float, tmp_path: Path
) -> None:
    """By a loop over characters: blocks, then the last share held out, then sequences side by side."""
    bounds = [len(text) * i // clients for i in range(clients + 1)]
    parts: tuple[list[tuple[int, str, str]], ...] = ([], [])
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        cut = b - int((b - a) * fraction)
        for of, (first, last) in zip(parts, ((a, cut), (cut, b)), strict=True):
            while first + length < last:
                of.append((i, text[first : first + length], text[first + 1 : first + length + 1]))
                first += length
    path = written(tmp_path, text)
    if {i for i, *_ in parts[0]} != set(range(clients)) or (fraction and not parts[1]) or not text.strip():
        with pytest.raises(ConfigError):
            Text(path, length, clients=clients, test_fraction=fraction)
        return
    data = Text(path, length, clients=clients, test_fraction=fraction)
    assert data.alphabet == "".join(sorted({c for _, x, y in parts[0] for c in x + y}))
    assert data.classes == len(data.alphabet) + 1
    assert data.tokens
    found = ((data.train_x, data.train_y, data.owners), (data.test_x, data.test_y, data.test_owners))
    for (x, y, owners), of in zip(found, parts, strict=True):
        assert (x is None) == (not of)
        for k, (i, inputs, targets) in enumerate(of):
            hidden = str.maketrans(dict.fromkeys({*inputs, *targets} - set(data.alphabet), "\0"))
            assert (int(owners[k]), decoded(data, x[k]), decoded(data, y[k])) == (
                i,
                inputs.translate(hidden),
                targets.translate(hidden),
            )


def test_characters_that_training_has_not_seen_are_one_token(tmp_path: Path) -> None:
    data = Text(written(tmp_path, "abab" * 5 + "aéb€"), 3, clients=1, test_fraction=4 / 24)
    assert data.alphabet == "ab"
    assert data.test_x.tolist() == [[1, 0, 2]]
    assert data.test_y.tolist() == [[0, 2, 0]]
    assert (data.train_y > 0).all()


def test_many_characters_are_kept_as_small_as_they_go_and_never_as_pixels(tmp_path: Path) -> None:
    for many, kind in ((127, torch.int8), (128, torch.int16)):
        text = "".join(map(chr, range(0x4E00, 0x4E00 + many)))
        assert Text(written(tmp_path, text), 1, clients=1, test_fraction=0).train_x.dtype == kind


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.sampled_from(["To", "be", "or", "not", "don't", "be,", "12", "é!", "–"]), min_size=8, max_size=80
    ),
    length=st.integers(1, 4),
    clients=st.integers(1, 3),
    size=st.sampled_from([None, 1, 3]),
)
@example(words=["be", "be", "or", "To", "not", "To", "be", "To"], length=2, clients=2, size=3)
def test_words_in_their_places(words: list[str], length: int, clients: int, size: int | None, tmp_path: Path) -> None:
    """By a loop over words: punctuation marks are words, case is ignored, and rare words are one token."""
    path = written(tmp_path, "  ".join(words) + "\n")
    tokens = []
    for word in words:
        stem = word.lower().rstrip(",!")
        tokens += [stem, *word[len(stem) :]]
    bounds = [len(tokens) * i // clients for i in range(clients + 1)]
    blocks = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    if any(len(block) <= length for block in blocks):
        with pytest.raises(ConfigError, match=r"is too long for clients=\d: of \d+ words"):
            Text(path, length, clients=clients, test_fraction=0, unit="words", vocabulary=size)
        return
    data = Text(path, length, clients=clients, test_fraction=0, unit="words", vocabulary=size)
    sequences = []
    for i, block in enumerate(blocks):
        for first in range(0, len(block) - length, length):
            sequences.append((i, block[first : first + length], block[first + 1 : first + length + 1]))
    used = [word for block in blocks for word in block[: (len(block) - 1) // length * length + 1]]
    by_frequency = sorted(Counter(used).items(), key=lambda entry: (-entry[1], tokens.index(entry[0])))
    kept = {word for word, _ in by_frequency[:size]}  # equally frequent ones by their first place in the text
    assert set(data.vocabulary) == kept
    assert data.classes == len(kept) + 1
    known = {word: number for number, word in enumerate(data.vocabulary, start=1)}
    assert list(known) == sorted(kept, key=tokens.index)
    expected = [(i, [known.get(w, 0) for w in x], [known.get(w, 0) for w in y]) for i, x, y in sequences]
    found = zip(data.owners.tolist(), data.train_x.tolist(), data.train_y.tolist(), strict=True)
    assert [tuple(one) for one in found] == expected


def test_perplexity_of_words_is_that_of_the_uniform_model(tmp_path: Path) -> None:
    """A model with weights of zero gives each of the classes the same probability."""
    data = Text(written(tmp_path, PLAY), 4, clients=2, unit="words")

    def uniform(classes: int) -> CharLSTM:
        module = CharLSTM(classes, hidden=4, every=True)
        torch.nn.init.zeros_(module.head.weight)
        torch.nn.init.zeros_(module.head.bias)
        return module

    evaluation = EvaluationOptions(metrics=["perplexity"])
    run = Simulation(data, uniform, clients=2, local=SGD(lr=0.0001, steps=1), rounds=1, evaluation=evaluation).run()
    assert run.history[0]["test_perplexity"] == pytest.approx(data.classes, rel=1e-4)


def test_speakers_of_a_play_are_clients_who_say_most_first(tmp_path: Path) -> None:
    path = written(tmp_path, PLAY)
    data = Text(path, 1, by="speaker", test_fraction=0)
    assert data.client_names == ("First Citizen", "BRUTUS", "All", "CASSIUS, his friend")
    said = [
        decoded(data, torch.cat([data.train_x[own][:1, 0], data.train_y[own][:, 0]]))
        for own in data.owners == data.owners.unique()[:, None]
    ]
    assert said == [
        "You are all resolved: rather to die\nthan to famish?\nResolved:",
        "Speak, speak!\nI listen to you.\nThen I shall listen still.",
        "Resolved.",
        "Aye, aye.",
    ]
    assert Text(path, 10, by="speaker", clients=2, test_fraction=0).client_names == ("First Citizen", "BRUTUS")


def test_another_layout_is_a_regular_expression(tmp_path: Path) -> None:
    path = written(tmp_path, "<ann> hello there\n<bob> hi\n<ann> bye\n")
    data = Text(path, 2, by="speaker", speaker=r"^<(\w+)> ", test_fraction=0)
    assert data.client_names == ("ann",)
    assert decoded(data, data.train_x) == "hello there\nbye"[:14]


@pytest.mark.parametrize(
    ("text", "given", "sentence"),
    [
        (None, {}, r"path=.*text\.txt cannot be read \(No such file or directory\); give a text file"),
        ("", {}, r"path=.*text\.txt is empty"),
        (" \n", {}, r"path=.*text\.txt is empty"),
        (b"\xff\xfe\x00", {}, r"path=.*text\.txt is not UTF-8 text"),
        ("short", {}, r"length=80 is too long for clients=2: of 5 characters, each client has 2 to train on"),
        (PLAY, {"length": 0}, r"length=0 must be a whole number"),
        (PLAY, {"length": 40, "test_fraction": 0.1}, r"test_fraction=0\.1 holds out too little"),
        (PLAY, {"unit": "syllables"}, r"unit='syllables' is unknown; choose one of characters, words"),
        (PLAY, {"vocabulary": 0}, r"vocabulary=0 must be a whole number"),
        (PLAY, {"unit": "words"}, r"length=80 is too long for clients=2: of 58 words, each client has 24 to train on"),
        (PLAY, {"test_fraction": 1.0}, r"test_fraction=1 leaves no training text"),
        (PLAY, {"by": "role"}, r"by='role' is unknown; choose one of blocks, speaker"),
        (PLAY, {"speaker": "^(.)"}, r"speaker='\^\(\.\)' needs by=speaker"),
        (PLAY, {"clients": "all"}, r"clients=all needs by=speaker"),
        (PLAY, {"by": "speaker"}, r"clients=2, but of the 4 speakers in .* only 0 have enough text"),
        (PLAY, {"by": "speaker", "clients": None}, r"length=80 exceeds the text of every speaker in .*;"),
        (PLAY, {"by": "speaker", "speaker": "("}, r"speaker='\(' is not a regular expression"),
        (PLAY, {"by": "speaker", "speaker": "^BRUTUS"}, r"speaker='\^BRUTUS' has no group"),
        (PLAY, {"by": "speaker", "speaker": "^(BRUTUS)."}, r"finds only one speaker, BRUTUS, in .*; describe the"),
        ("Nobody speaks here.", {"by": "speaker"}, r"finds no speaker in .*or set by=blocks"),
    ],
)  # fmt: skip
def test_what_is_no_federation_of_texts_is_refused(
    text: str | bytes | None, given: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=sentence):
        Text(str(path), **{"clients": 2} | given)


MODELS = {
    "char_lstm": functools.partial(CharLSTM, hidden=32, layers=1),
    "transformer": functools.partial(Transformer, width=32, heads=2, layers=1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_both_language_models_learn_what_follows(name: str, tmp_path: Path) -> None:
    """Letters of a word follow one another, words do not: guessing the most frequent character is not enough."""
    draw = random.Random(0)
    text = " ".join(draw.choice(("federation", "of", "clients", "that", "come")) for _ in range(700))
    data = Text(written(tmp_path, text), 16, clients=4)
    local = Adam(lr=0.02, steps=20, batch_size=8)
    result = Simulation(
        data, MODELS[name], clients=4, local=local, rounds=2, evaluation=EvaluationOptions(every=2)
    ).run()
    commonest = Counter(text).most_common(1)[0][1] / len(text)
    last = result.history[-1]
    assert last["test_accuracy"] > commonest + 0.4
    assert last["test_accuracy"] == pytest.approx(last["test_accuracy_by_client"], abs=0.05)


def test_a_model_that_predicts_one_character_is_told_so(tmp_path: Path) -> None:
    data = Text(written(tmp_path, "to be or not to be, that is the question" * 5), 8, clients=2)
    with pytest.raises(ConfigError, match=r"model returns shape \[2, 15\] for 2 inputs.*expected \[2, 8, 15\]"):
        Simulation(data, functools.partial(CharLSTM, hidden=4, every=False), clients=2)
