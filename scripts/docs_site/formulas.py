"""Typeset the formulas of a page as MathML, which browsers draw by themselves: no script, no network.

A page of docs/ has formulas as LaTeX between dollars, as code hosts show them, and docstrings have them in Unicode,
`x ← x − η_g mean_{i∈A} G_i`, as a terminal shows them. `typeset` finds both in the HTML of a page and leaves code,
headings and titles as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from html import escape, unescape

from latex2mathml.converter import convert
from latex2mathml.exceptions import DoubleSubscriptsError, DoubleSuperscriptsError

SKIPPED = ("code", "pre", "script", "style", "title", "math", "svg", "h1", "h2", "h3", "h4", "h5", "h6")
ARITHMATEX = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.S
)
PIECE = re.compile(r"<!--.*?-->|<(?P<end>/?)(?P<tag>[a-zA-Z][\w-]*)(?:\"[^\"]*\"|'[^']*'|[^>\"'])*>|[^<]+", re.S)

ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar", "\u0305": "bar", "\u0307": "dot", "\u030c": "check"}
GREEK = "αβγδεζηθικλμνξοπρσςτυφχψωΓΔΘΛΞΠΣΥΦΨΩϕϵ"
SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵏⁿᵗ", "0123456789+-knt", strict=True)) | {"ᵀ": r"\top"}
SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ᵢⱼₖₜₙ", "0123456789+-ijktn", strict=True))
RELATIONS = {
    "←": r"\leftarrow",
    "→": r"\rightarrow",
    "↦": r"\mapsto",
    "=": "=",
    "≈": r"\approx",
    "≡": r"\equiv",
    "≠": r"\neq",
    "<": "<",
    ">": ">",
    "≤": r"\leq",
    "≥": r"\geq",
    "∈": r"\in",
    "∉": r"\notin",
    "⊂": r"\subset",
    "⊆": r"\subseteq",
    "∼": r"\sim",
    "~": r"\sim",
    "∝": r"\propto",
    "≪": r"\ll",
    "≫": r"\gg",
    "≽": r"\succeq",
    "∪": r"\cup",
    "∩": r"\cap",
}
OPERATORS = {"+": "+", "−": "-", "·": r"\cdot", "×": r"\times", "±": r"\pm", "∓": r"\mp", "∘": r"\circ", "⊙": r"\odot"}
SYMBOLS = {
    "/": "/",
    "Σ": r"\sum",
    "∑": r"\sum",
    "∏": r"\prod",
    "∫": r"\int",
    "√": r"\surd",
    "½": r"\tfrac{1}{2}",
    "¼": r"\tfrac{1}{4}",
    "∞": r"\infty",
    "∅": r"\emptyset",
    "…": r"\ldots",
    "‖": r"\Vert",
    "|": r"\vert",
    "∂": r"\partial",
    "∇": r"\nabla",
    "′": "'",
    "!": "!",
    "∗": "*",
    "ℓ": r"\ell",
    "𝟙": r"\mathbf{1}",
    "ℝ": r"\mathbb{R}",
}
OPEN = {"(": "(", "[": "[", "{": r"\{", "⌈": r"\lceil", "⌊": r"\lfloor", "⟨": r"\langle"}
CLOSE = {")": ")", "]": "]", "}": r"\}", "⌉": r"\rceil", "⌋": r"\rfloor", "⟩": r"\rangle"}
PAIRS = dict(zip(CLOSE, OPEN, strict=True))
NAMES = "mean|median|max|min|argmin|argmax|sup|inf|exp|log|sign|clip|Proj|prox|Var|Cov|TV|KL|std|tanh|diag|Bernoulli"

PRECOMPOSED = "".join(
    made
    for base in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for accent in ACCENTS
    if len(made := unicodedata.normalize("NFC", base + accent)) == 1
)
ACCENT = "[" + "".join(ACCENTS) + "]"
SIGNS = "".join(
    map(re.escape, [*RELATIONS, *OPERATORS, *(s for s in SYMBOLS if s not in "Σℓ𝟙ℝ∂∇"), *OPEN, *CLOSE, ",", ";"])
)
TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |(?P<name>(?:{NAMES})(?![A-Za-z]))
    |(?P<number>\d+(?:\.\d+)?e[-−]?\d+|\d[\d,]*\d(?:\.\d+)?(?![\w'’])|\d+(?:\.\d+)?(?![\d.]*[A-Za-z]{{2}}))
    |(?P<differential>d(?=[{GREEK}])|d(?=[a-zA-Z](?:\*?/d|[\*/]?d?[{GREEK}])))
    |(?P<letter>(?:[A-Za-z](?![A-Za-z]|['’][a-z])|[{PRECOMPOSED}](?![A-Za-z])|[{GREEK}]|[ℓ𝟙ℝ∂∇]){ACCENT}?)
    |(?P<script>[_^](?:\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|[A-Za-z]{{2,}}|[A-Za-z0-9{GREEK}*†′ℓ]{ACCENT}?|\\\*))
    |(?P<super>[{"".join(SUPER)}]+)
    |(?P<sub>[{"".join(SUB)}]+)
    |(?P<mark>[†‡*](?![*\w]))
    |(?P<sign>[{SIGNS}])
    |(?P<word>[A-Za-z]{{2,}}(?!['’]))""",
    re.X,
)
WORD = re.compile(r"[^\W\d_]+(?:['’.-][^\W\d_]+)*|.", re.S)
LONG = 26  # characters; a longer formula may be broken over lines at relations, plus and minus


@cache
def mathml(latex: str, display: bool = False) -> str:
    """A formula as MathML."""
    made = convert(latex, display="block" if display else "inline")
    return made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def typeset(html: str) -> str:
    """The HTML of a page, its formulas as MathML."""
    html = ARITHMATEX.sub(lambda found: mathml(unescape(found["latex"]), found["kind"] == "["), html)
    inside, made = 0, []
    for piece in PIECE.finditer(html):
        if piece["tag"]:
            if piece["tag"].lower() in SKIPPED and not piece[0].endswith("/>"):
                inside += -1 if piece["end"] else 1
            made.append(piece[0])
        elif piece[0].startswith("<") or inside:
            made.append(piece[0])
        else:
            made.append(of_text(piece[0]))
    return "".join(made)


def of_text(html: str) -> str:
    """Text between two tags, its formulas as MathML."""
    text, made, at = unicodedata.normalize("NFC", unescape(html)), [], 0
    if not any(sign in text for sign in "_^←=≈<≤≥∈∼+−·×∇Σ‖²" + GREEK):
        return html
    for start, end in formulas(text):
        try:
            formula = " ".join(map(mathml, lines(latex(text[start:end]))))
        except (DoubleSubscriptsError, DoubleSuperscriptsError):  # signs that only look like a formula
            continue
        made += [escape(text[at:start], quote=False), formula]
        at = end
    return "".join(made) + escape(text[at:], quote=False) if made else html


def formulas(text: str) -> list[tuple[int, int]]:
    """Where the formulas of a text begin and end."""
    found: list[tuple[int, int]] = []
    run: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None or _is_a_word(token, run, text):
            found += _whole(run)
            run = []
            at = (WORD.match(text, at) if token is None else token).end()  # type: ignore[union-attr]
        else:
            run.append(token)
            at = token.end()
    return [*found, *_whole(run)]


def _is_a_word(token: re.Match[str], run: list[re.Match[str]], text: str) -> bool:
    """Is a letter an article or a pronoun, a function's name part of a sentence?"""
    before = text[: token.start()].rstrip(" ")[-1:]
    after = text[token.end() :].lstrip(" \n")[:1]
    if token.lastgroup == "name":
        follows = text[token.end() : token.end() + 1]
        symbol = after and (not after.isascii() or after in "|(=") and TOKEN.match(after)
        formula = symbol or (follows and follows in f"_({{^{''.join(SUPER)}")
        return not formula and not re.match(r" ?(?:[A-Za-z]_|[A-Za-z]\b(?!['’]))", text[token.end() :])
    if token["word"]:
        return not _in_a_function(run)
    if token[0] in ("a", "A", "I"):
        if text[token.end() : token.end() + 1] in tuple(GREEK):
            return False
        signs = set(RELATIONS) | set(OPERATORS) | set("_^/|‖,")
        continues = after in signs and after != ","
        return not (continues or (run and before in signs) or (before in OPEN and after in CLOSE))
    if token["script"] or token["super"] or token["sub"] or token["mark"]:
        return not run or bool(run[-1]["space"])
    return bool(token["number"] and text[max(0, token.start() - 1) : token.start()].isalpha() and not run)


def _in_a_function(run: list[re.Match[str]]) -> bool:
    """Are we within the brackets of a function, as in P(stays)?"""
    depth = 0
    for number in range(len(run) - 1, 0, -1):
        sign = run[number]["sign"] or ""
        depth += (sign in CLOSE) - (sign in OPEN)
        if depth < 0:
            before = run[number - 1]
            if sign == "(" and (before["letter"] or before["name"] or before["script"]):
                return True
            depth = 0
    return False


def _whole(run: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    """The formulas in a run of tokens: between commas, with brackets that are closed."""
    for part in _closed(run):
        part = _trimmed(part)
        letters = [token for token in part if token["letter"]]
        telling = any(
            token["script"]
            or token["super"]
            or token["sub"]
            or token["differential"]
            or (token["sign"] and token["sign"] in {*RELATIONS, *OPERATORS, "‖", "√"})
            or (token["letter"] and token["letter"][0] in GREEK + "ℓ∂∇")
            for token in part
        )
        identifier = re.fullmatch(r"\w+_[A-Za-z]{3,}", "".join(token[0] for token in part), re.A)  # x_test
        if letters and telling and not identifier:
            yield part[0].start(), part[-1].end()


def _closed(run: list[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Parts of a run whose brackets are closed, cut at commas outside of brackets and at brackets that are not."""
    stack: list[int] = []
    loose = set()
    for number, token in enumerate(run):
        if token["sign"] and token["sign"] in OPEN:
            stack.append(number)
        elif token["sign"] and token["sign"] in CLOSE:
            if stack and run[stack[-1]]["sign"] == PAIRS[token["sign"]]:
                stack.pop()
            else:
                loose.add(number)
    loose.update(stack)
    depth = 0
    part: list[re.Match[str]] = []
    for number, token in enumerate(run):
        sign = token["sign"] or ""
        if number not in loose:
            depth += (sign in OPEN) - (sign in CLOSE)
        if number in loose or (sign in (",", ";") and depth == 0):
            yield part
            part = []
        else:
            part.append(token)
    yield part


def _trimmed(part: list[re.Match[str]]) -> list[re.Match[str]]:
    """Without spaces and signs that belong to the sentence."""

    def stray(token: re.Match[str], last: bool) -> bool:
        sign = token["sign"] or ""
        bar = sign == "|" and sum(one["sign"] == "|" for one in part) % 2 == 1
        return bool(token["space"]) or bar or sign in (",", "/", "…", "!") or (last and sign in ("+", "−", "·", "×"))

    part = list(part)
    while part and stray(part[-1], True):
        part.pop()
    while part and stray(part[0], False):
        part.pop(0)
    whole = part and part[0]["sign"] in OPEN and part[-1]["sign"] == CLOSE_OF.get(part[0]["sign"])
    if whole and len(list(_closed(part[1:-1]))) == 1:  # a remark in brackets
        return _trimmed(part[1:-1])
    return part


CLOSE_OF = {opened: closed for closed, opened in PAIRS.items()}


@cache
def latex(formula: str) -> str:
    """A formula of Unicode signs in LaTeX."""
    formula = unicodedata.normalize("NFC", formula)
    made, at = [], 0
    while at < len(formula):
        token = TOKEN.match(formula, at)
        if token is None:
            word = WORD.match(formula, at)
            assert word is not None
            made.append(rf"\mathrm{{{word[0]}}}" if word[0].isalpha() else word[0])
            at = word.end()
            continue
        made.append(_token(token))
        at = token.end()
    return _with_scripts_together(made)


def _token(token: re.Match[str]) -> str:
    if token["space"]:
        return " "
    if token["name"]:
        return rf"\operatorname{{{token['name']}}}"
    if token["number"]:
        return _number(token["number"])
    if token["differential"]:
        return r"\mathrm{d}"
    if token["letter"]:
        return _letter(token["letter"])
    if token["word"]:
        return rf"\mathrm{{{token['word']}}}"
    if token["script"]:
        return _script(token["script"])
    return _sign(token)


def _number(number: str) -> str:
    mantissa, _, exponent = number.partition("e")
    power = rf" \cdot 10^{{{exponent.replace('−', '-')}}}" if exponent else ""
    return mantissa.replace(",", "{,}") + power


def _script(script: str) -> str:
    """An exponent or index that is written with ^ or _."""
    inner = script[1:].removeprefix("\\")
    if inner.startswith("{"):
        inner = inner[1:-1]
    if re.fullmatch(r"[A-Z]{2,}|[A-Za-z]{3,}", inner):  # a word, as in θ^PS
        inner = rf"\mathrm{{{inner}}}"
    elif inner.isalpha():
        inner = latex(" ".join(inner))
    else:
        inner = latex(inner.replace("*", "∗"))
    return f"{script[0]}{{{inner}}}"


def _sign(token: re.Match[str]) -> str:
    """Whatever is one sign of Unicode: raised or lowered, a mark, a relation, an operator."""
    if token["super"]:
        return f"^{{{' '.join(SUPER[sign] for sign in token['super'])}}}"
    if token["sub"]:
        return f"_{{{' '.join(SUB[sign] for sign in token['sub'])}}}"
    if token["mark"]:
        return {"†": r"^{\dagger}", "‡": r"^{\ddagger}", "*": "^{*}"}[token["mark"]]
    sign = token["sign"]
    if sign in RELATIONS:
        return f" {RELATIONS[sign]} "
    known = OPERATORS | SYMBOLS | OPEN | CLOSE
    return f" {known[sign]} " if sign in known else sign


def _letter(letter: str) -> str:
    parts = unicodedata.normalize("NFD", letter)
    base = SYMBOLS.get(parts[0], parts[0])
    for accent in parts[1:]:
        base = rf"\{ACCENTS[accent]}{{{base}}}" if accent in ACCENTS else base
    return f"{base} " if re.search(r"\\[a-z]+$", base) else base


def _with_scripts_together(made: list[str]) -> str:
    """Two superscripts of one letter, x^t and †, are one."""
    text = re.sub(r"(?<!\d)1 +\\\{", r"\\mathbf{1} \\{", "".join(made))  # an indicator
    text = re.sub(r"\^\{([^{}]*)\}((?:_\{[^{}]*\})?)\^\{([^{}]*)\}", r"^{\1 \3}\2", text)
    return re.sub(r"_\{([^{}]*)\}((?:\^\{[^{}]*\})?)_\{([^{}]*)\}", r"_{\1 \3}\2", text).strip()


def lines(formula: str) -> list[str]:
    """A long formula in parts between which a line may end: after relations, before plus and minus."""
    if len(re.sub(r"\\\w+|[{}]", ".", formula)) < LONG:
        return [formula]
    parts, depth, at = [], 0, 0
    for found in re.finditer(r"\\[A-Za-z]+|\\.|.", formula):
        sign = found[0]
        depth += (sign in ("{", "(", "[", r"\{", r"\lceil", r"\lfloor", r"\langle")) - (
            sign in ("}", ")", "]", r"\}", r"\rceil", r"\rfloor", r"\rangle")
        )
        if depth == 0 and sign in set(RELATIONS.values()) - {"<", ">", r"\in"} and found.end() - at > 3:
            parts.append(formula[at : found.end()] + " {}")
            at = found.end()
        elif depth == 0 and sign in ("+", "-") and found.start() - at > 8:
            parts.append(formula[at : found.start()])
            at = found.start()
    parts = [part for part in [*parts, formula[at:]] if part.strip()]
    return ["{} " + part if part.startswith(("+", "-")) and number else part for number, part in enumerate(parts)]
