"""Your own texts: tokens by a loop, templates, both tasks from the command line, and completions by greedy decoding."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fedsim
from fedsim import ConfigError, EvaluationOptions, Simulation
from fedsim.data.datasets import TextTable
from fedsim.data.datasets.own.text_table import END, NUM_SPECIAL_TOKENS, PADDING, UNKNOWN
from fedsim.data.datasets.tokens import split_tokens
from fedsim.data.partition import Natural
from fedsim.local import Adam
from fedsim.models import CharLSTM, TextClassifier, Transformer

SUMS = {"a": [0, 1, 1, 2, 10], "b": [3, 2, 1, 2, 4], "sum": [3, 3, 2, 4, 14], "who": [*"xxyyy"]}


def sums(**options: Any) -> TextTable:
    arguments = {"text": "{a} plus {b} is", "target": "sum", "task": "completion", "length": 6, "test_fraction": 0}
    return TextTable(SUMS, **(arguments | options))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text("ab, .C", min_size=1, max_size=12).filter(str.strip), min_size=2, max_size=9),
    length=st.integers(2, 7),
    size=st.none() | st.integers(1, 4),
    unit=st.sampled_from(["words", "characters"]),
)
def test_texts_to_classify_are_their_first_tokens_and_an_end(
    texts: list[str], length: int, size: int | None, unit: str
) -> None:
    labels = [str(number % 2) for number in range(len(texts))]
    data = TextTable({"t": texts, "y": labels}, "t", "y", length=length, unit=unit, vocabulary=size, test_fraction=0)
    texts = [text.strip() for text in texts]
    shown = [split_tokens(text, unit)[: length - 1] for text in texts]
    counts: dict[str, int] = {}
    for word in (word for tokens in [split_tokens(text, unit) for text in texts] for word in tokens):
        counts.setdefault(word, 0)
    for word in (word for tokens in shown for word in tokens):
        counts[word] += 1
    frequent = sorted((word for word in counts if counts[word]), key=lambda word: -counts[word])[:size]
    assert data.vocabulary == tuple(word for word in counts if word in frequent)
    for row, words in zip(data.train_x.tolist(), shown, strict=True):
        expected = [
            NUM_SPECIAL_TOKENS + data.vocabulary.index(word) if word in data.vocabulary else UNKNOWN for word in words
        ]
        assert row == [*expected, END, *[PADDING] * (length - len(words) - 1)]
    assert torch.equal(data.encode({"t": texts}), data.train_x)
    assert data.label_names == ("0", "1")


def test_targets_of_completions_are_the_next_tokens_of_the_answer_alone() -> None:
    data = sums()
    assert data.vocabulary == ("0", "plus", "3", "is", "1", "2", "10", "4", "14")
    assert data.train_x[0].tolist() == [3, 4, 5, 6, 5, PADDING]  # 0 plus 3 is 3
    assert data.train_y[0].tolist() == [-100, -100, -100, 5, END, -100]
    assert data.train_y.dtype == torch.int64
    assert data.classes == NUM_SPECIAL_TOKENS + 9
    assert data.decode_tokens(data.train_y[4][3:].tolist()) == "14"
    assert data.encode({"a": [7], "b": [3]}).tolist() == [[UNKNOWN, 4, 5, 6, PADDING, PADDING]]


def test_long_prompts_keep_their_end_and_leave_room_for_the_longest_answer() -> None:
    data = sums(length=3)  # of which an answer and its end take two, the last as a target only
    assert data.longest_target == 2
    assert data.vocabulary == ("3", "is", "1", "2", "4", "14")
    assert data.train_x[0].tolist() == [3, 4, 3]  # 3 is 3
    assert data.train_y[0].tolist() == [-100, 3, END]
    assert data.encode({"a": [0], "b": [3]}).tolist() == [[3, 4, PADDING]]
    assert sums(length=2).train_x[0].tolist() == [4, 3]
    with pytest.raises(ConfigError, match=r"length=2 leaves no room for prompts beside a target of 2 words; raise it"):
        sums(length=2, target="{sum} !")


def test_words_of_test_rows_alone_are_unknown() -> None:
    data = TextTable(SUMS | {"half": ["train"] * 4 + ["test"]}, "{a} plus {b} is", "sum", "completion", split="half")
    assert data.test_x is not None
    assert data.test_y is not None
    assert "14" not in data.vocabulary
    four = NUM_SPECIAL_TOKENS + data.vocabulary.index("4")
    assert data.test_x[0, :5].tolist() == [UNKNOWN, 4, four, 6, UNKNOWN]
    assert data.test_y[0, 3:5].tolist() == [UNKNOWN, END]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "{a} plus {c} is"}, r"dataset\.text=c is not a column of dataset\.path.*it has a, b, sum, who"),
        ({"text": "{a.__class__}"}, r"dataset\.text=a\.__class__ is not a column"),
        ({"text": "{a!r} is"}, r"dataset\.text='\{a!r\} is' may hold nothing but names of columns in braces"),
        ({"text": "{a:>9} is"}, r"may hold nothing but names of columns in braces"),
        ({"text": "{} is"}, r"may hold nothing but names of columns in braces"),
        ({"text": "a {{}}"}, r"dataset\.text='a \{\{\}\}' names no column in braces"),
        ({"text": "{a plus"}, r"dataset\.text='\{a plus' is not a template"),
        ({"target": "total"}, r"dataset\.target=total is not a column"),
        ({"task": "regression"}, r"task='regression'"),
        ({"unit": "bytes"}, r"unit='bytes'"),
        (
            {"client": "who", "split": "who"},
            r"client and split are who, who; a column can have only one of these roles",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sums(**options)


def test_a_row_without_text_is_named() -> None:
    with pytest.raises(ConfigError, match=r"row 1 has no text in column 'b'; fill it in, or remove the row"):
        TextTable({"a": ["1", "2"], "b": ["3", " "], "sum": ["4", "5"]}, "{a} {b}", "sum", "completion")
    with pytest.raises(ConfigError, match=r"row 0 has no value in column 'y', the target; remove the row"):
        TextTable({"a": ["1", "2"], "y": ["", "5"]}, "a", "y")
    words = TextTable({"a": ["NA", "none"], "y": ["?", "null"]}, "a", "y", "completion", test_fraction=0)
    assert words.vocabulary == ("na", "none", "?", "null")


def test_a_classifier_of_texts_does_not_see_padding() -> None:
    torch.manual_seed(0)
    model = TextClassifier((6,), classes=3, num_tokens=9, width=8, heads=2).eval()
    text = torch.tensor([[4, 5, 2, 0, 0, 0], [7, 8, 5, 4, 3, 2]])
    output = model(text)
    assert torch.allclose(model(text[:1, :3]), output[:1], atol=1e-6)
    with torch.no_grad():
        model.token.weight[PADDING] = 9.0
    assert torch.allclose(model(text), output, atol=1e-6)
    assert model(torch.zeros(2, 6, dtype=torch.int64)).isfinite().all()
    bag = TextClassifier((6,), classes=3, num_tokens=9, width=8, layers=0).eval()
    assert torch.allclose(bag(text.flip(1)), bag(text), atol=1e-6)
    by_hand = bag.head(
        torch.stack([bag.norm(bag.token(torch.tensor(words))).mean(0) for words in ([4, 5, 2], text[1].tolist())])
    )
    assert torch.allclose(bag(text), by_hand, atol=1e-6)


def test_a_classifier_of_texts_needs_tokens() -> None:
    data = fedsim.data.datasets.Digits()
    with pytest.raises(ConfigError, match=r"model TextClassifier takes `num_tokens`, but the inputs .* are no tokens"):
        Simulation(data, TextClassifier, clients=2, rounds=1)


def run_command(words: list[str]) -> str:
    """What the command wrote on standard error."""
    finished = subprocess.run([sys.executable, "-m", "fedsim", *words], check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_completion_is_exact_where_greedy_decoding_returns_the_answer(tmp_path: Path) -> None:
    """And what is predicted is what a loop over plain forward passes appends."""
    draw = random.Random(1)
    pairs = [(draw.randrange(4), draw.randrange(4)) for _ in range(60)]
    rows = [{"a": a, "b": b, "answer": f"{a + b} or {b + a}", "who": f"c{n % 3}"} for n, (a, b) in enumerate(pairs)]
    write_rows(tmp_path / "rows.csv", rows)
    words = [
        "dataset=text_table", f"dataset.path={tmp_path / 'rows.csv'}", "dataset.text='{a} + {b} ='",
        "dataset.target=answer", "dataset.task=completion", "dataset.length=9", "dataset.client=who",
        "partition=natural", "clients=all", "availability=full", "model=transformer", "model.width=16",
        "local=adam", "lr=0.02", "rounds=4", "metrics=[exact_match,perplexity]", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    assert "performance drop" not in run_command(words)
    run = fedsim.load(tmp_path / "run")
    data = run.dataset()
    assert isinstance(data, TextTable)
    completions = run.complete({"a": [row["a"] for row in rows], "b": [row["b"] for row in rows]})
    assert data.test_x is not None
    assert data.test_y is not None
    module, hits = run.module(), 0
    for x, y in zip(data.test_x, data.test_y, strict=True):
        first = int((y != -100).nonzero()[0, 0])
        prompt, answer = x[: first + 1].long().tolist(), y[y != -100].tolist()
        tokens = list(prompt)
        while len(tokens) < len(prompt) + data.longest_target and (len(tokens) == len(prompt) or tokens[-1] != END):
            tokens.append(int(module(torch.tensor([tokens]))[0, -1].argmax()))
        a, b = (data.vocabulary[prompt[place] - NUM_SPECIAL_TOKENS] for place in (0, 2))
        row = next(number for number, row in enumerate(rows) if (str(row["a"]), str(row["b"])) == (a, b))
        assert completions[row] == data.decode_tokens(tokens[len(prompt) :])
        hits += completions[row] == data.decode_tokens(answer)
    assert run.rows[-1]["test_exact_match"] == pytest.approx(hits / len(data.test_x))
    assert hits  # some are right after four rounds


def test_texts_are_classified_from_the_command_line(tmp_path: Path) -> None:
    draw = random.Random(2)
    words = ["good", "fine", "great", "bad", "poor", "awful"]
    rows = []
    for number in range(90):
        label = number % 2
        text = " ".join(draw.choices(words[:3] if label else words[3:], k=1 + number % 5)) + " film"
        rows.append({"review": text, "liked": ["no", "yes"][label], "who": f"c{number % 4}"})
    write_rows(tmp_path / "reviews.csv", rows)
    run_command([
        "dataset=text_table", f"dataset.path={tmp_path / 'reviews.csv'}", "dataset.text=review", "dataset.target=liked",
        "dataset.length=8", "dataset.client=who", "partition=natural", "clients=all", "availability=full",
        "model=text_classifier", "model.width=8", "model.layers=1", "local=adam", "lr=0.02", "rounds=6",
        f"out={tmp_path / 'run'}",
    ])  # fmt: skip
    run = fedsim.load(tmp_path / "run")
    assert run.rows[-1]["test_accuracy"] > 0.9
    data = run.dataset()
    scores = run.predict(data.encode({"review": ["great film", "an awful film"]}))
    assert [data.label_names[label] for label in scores.argmax(1).tolist()] == ["yes", "no"]
    with pytest.raises(ConfigError, match=r"holds no texts to complete; use dataset=text_table"):
        run.complete({"review": ["great film"]})


@pytest.mark.parametrize("model", [Transformer, CharLSTM])
def test_the_loss_of_completions_is_the_mean_over_the_answer(model: Any) -> None:
    data = sums(client="who")
    simulation = Simulation(
        data, model, clients="all", partition=Natural(), local=Adam(lr=0.01), rounds=1, evaluation=EvaluationOptions()
    )
    state = simulation.initial_state()
    model_row = state.model[0]
    output = simulation.model.evaluate(model_row, {"x": data.train_x.long()})
    by_hand = torch.stack([
        F.cross_entropy(output[n][y != -100], y[y != -100]) for n, y in enumerate(data.train_y)
    ])  # fmt: skip
    first = simulation.run().history[0]
    clients = [by_hand[:2].mean(), by_hand[2:].mean()]
    assert first["train_loss"] == pytest.approx(float(sum(clients) / 2), rel=1e-5)
