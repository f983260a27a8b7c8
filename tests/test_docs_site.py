"""The site of the documentation builds without a warning, has a page for every package, and needs no network."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

for needed in ("mkdocs", "material", "mkdocstrings", "griffe", "latex2mathml"):
    pytest.importorskip(needed, reason="the site needs the extra docs")

ROOT = Path(__file__).parents[1]
LINKS, DOCSTRINGS, FORMULAS = (
    runpy.run_path(str(ROOT / "scripts" / "docs_site" / f"{name}.py")) for name in ("links", "docstrings", "formulas")
)
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//")


@pytest.mark.slow
def test_it_builds_and_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr  # a warning is an error: mkdocs.yml says `strict`
    for package in (path.parent.relative_to(ROOT) for path in (ROOT / "fedsim").rglob("__init__.py")):
        name = ".".join(package.parts)
        page = tmp_path / "api" / ("index.html" if name == "fedsim" else f"{name}.html")
        assert f">{name}" in page.read_text(encoding="utf-8")
    strategies = (tmp_path / "api" / "fedsim.strategies.html").read_text(encoding="utf-8")
    assert strategies.count('id="fedsim.strategies.FedAWE"') == 1
    assert 'id="fedsim.strategies.FedAWE.initial"' not in strategies  # says nothing that Strategy's does not
    for page in tmp_path.rglob("*.html"):
        assert not LOADED.search(page.read_text(encoding="utf-8")), page


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](composing.md#sweeps)", "[a](composing.md#sweeps)"),
        ("$E[x](../experiments/README.md)$", "$E[x](../experiments/README.md)$"),
        ("[two\nlines](../experiments/README.md)", "[two\nlines](experiments/README.md)"),
        ("![p](../experiments/quickstart/results/curves.png)", "![p](experiments/quickstart/results/curves.png)"),
        ("[the table](../README.md#speed)", "[the table](overview.md#speed)"),
        ("[`rule`](../mkdocs.yml)", "[`rule`](source/mkdocs.yml.md)"),
        ("[all](../fedsim/strategies)", "[all](api/fedsim.strategies.md)"),
        ("[a folder](../tests), [nothing](gone.md)", "a folder, nothing"),
        ("[w](https://hydra.cc) [b](#below)", "[w](https://hydra.cc) [b](#below)"),
        ("`[c](gone.md)`\n\n```\n[d](gone.md)\n```", "`[c](gone.md)`\n\n```\n[d](gone.md)\n```"),
        ("<!-- not executed: why -->\n```bash\nx\n```", "```bash\nx\n```"),
        ("<!-- file: a/b.py -->\n```python\nx\n```", '```python title="a/b.py"\nx\n```'),
    ],
)
def test_links_of_a_page_in_the_site(written: str, shown: str) -> None:
    assert LINKS["rewritten"](written, "docs/index.md") == shown


def test_docstrings_are_sections_with_a_line_for_each_name() -> None:
    plain = DOCSTRINGS["plain"]
    assert plain("Attributes:\n\na: one,\n    two.\nb: c.") == "Attributes:\n    a: one,\n        two.\n    b: c."
    assert plain("Attributes (all [m]):\n\na: b.") == "All [m].\n\nAttributes:\n    a: b."
    assert plain("W.\n\nArgs:\n    a, b: one,\n        two.") == (
        "W.\n\nArgs:\n    a: one,\n        two.\n    b: one,\n        two."
    )
    assert plain("∇_θ R, not x_i") == r"∇\_θ R, not x_i"


def test_formulas_of_docstrings_are_found_between_words() -> None:
    text = (
        "A client of n moves: x ← x − η_g mean_{i∈A} G_i, with P(stays) ≥ ½ (Li et al. 2020), in 3 of 4 rounds; θ^PS."
    )
    found = [text[start:end] for start, end in FORMULAS["formulas"](text)]
    assert found == ["x ← x − η_g mean_{i∈A} G_i", "P(stays) ≥ ½", "θ^PS"]


@pytest.mark.parametrize(
    "text", ["I took a look at A, a client's n of 5.", "test_x and x_test", "seeds [R, m] of 2,000", "mean of the max"]
)
def test_sentences_without_formulas_have_none(text: str) -> None:
    assert FORMULAS["formulas"](text) == []


@pytest.mark.parametrize(
    ("formula", "latex"),
    [
        ("c_i⁺ = c_i − c", "c_{i}^{+} = c_{i} - c"),
        ("x_i^t†", r"x_{i}^{t \dagger}"),
        ("z̄ ≤ (1 + d)^{−1/2}", r"\bar{z} \leq ( 1 + d ) ^{- 1 / 2}"),
        ("‖ĝ‖² + 1{i∈A}", r"\Vert \hat{g} \Vert ^{2} + \mathbf{1} \{ i \in A \}"),
        ("W_ij x_j", "W_{i j} x_{j}"),
        ("λ = 5e-3", r"λ = 5 \cdot 10^{-3}"),
    ],
)
def test_a_formula_in_latex(formula: str, latex: str) -> None:
    assert " ".join(FORMULAS["latex"](formula).split()) == latex


def test_text_is_typeset_and_code_is_not() -> None:
    made = FORMULAS["typeset"]("<h2>x_i ← 1</h2><p>so x_i ← 1 &amp; <code>x_i ← 1</code> &lt; it</p>")
    assert made.count("<math") == 1
    assert made.startswith("<h2>x_i ← 1</h2><p>so <math")
    assert made.endswith("&amp; <code>x_i ← 1</code> &lt; it</p>")
    of_latex = FORMULAS["typeset"](r'<p><span class="arithmatex">\(z^{-2}\)</span></p>')
    assert "<msup>" in of_latex
    assert "arithmatex" not in of_latex


def test_the_formulas_of_all_algorithms_are_typeset() -> None:
    """Signs that only formulas have are left in no sentence, but for those that stand next to words."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    definitions = re.findall(r"^### (\S+)\n\n(.*?)^Sends:", page, re.M | re.S)
    assert len(definitions) > 80
    with_formula = [name for name, said in definitions if "←" in said]
    assert len(with_formula) > 40
    for _, said in definitions:
        for start, end in FORMULAS["formulas"](said):
            for part in FORMULAS["lines"](FORMULAS["latex"](said[start:end])):
                ElementTree.fromstring(FORMULAS["mathml"](part))
    left = [
        re.sub("<math.*?</math>", "", FORMULAS["of_text"](re.sub("`[^`]*`", "", said))).count("←")
        for _, said in definitions
    ]
    assert sum(left) <= 2
