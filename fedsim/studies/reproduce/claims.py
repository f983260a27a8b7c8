"""What a paper says about its numbers, as a comparison that our numbers pass or fail.

A claim that fails is refuted where the recipe says why, in a sentence that a test or another recipe shows, and open
where it does not. What decides may be a statistic: standard errors of the difference over seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.reproduce.number import Number, Undecided, Where, standard_error

RELATIONS = ("below", "above", "near")
HELD, REFUTED, OPEN = VERDICTS = ("held", "refuted", "open")
SHOWN_BY = re.compile(r"tests/[\w/]+\.py::test_\w+|\w+/\w+")  # a test, or a recipe


@dataclass
class Claim:
    """`of` is below, above or near `than`, wherever the other axes agree.

    Attributes:
        claim: what the paper says, in a sentence.
        of: the numbers it speaks of.
        relation: 'below' | 'above' | 'near'.
        than: the numbers they are compared with, a number, or 'paper' for what the paper printed.
        times, plus: applied to the right side.
        within: 'near': largest absolute difference.
        errors: slack of so many standard errors of the difference: 'near' adds them to `within`.
        surely: instead of slack, the relation must hold by at least so many standard errors of the difference.
        paired: the standard error is that of the differences by seed.
        fitted: it speaks of numbers with fitted constants, at least on one side; other claims never see these.
        reason: why it does not hold, in a sentence.
        shown_by: what shows the reason: tests/FILE.py::TEST, or a recipe PAPER/NAME.
        where: only there.
        measure: whose numbers; the recipe's first unless said.
        than_measure: instead of `than`: another measure of the same runs.
        scales: only there; a claim about the end of training has no meaning after three rounds.
    """

    claim: str
    of: Where
    relation: str
    than: Where | float | str
    times: float = 1.0
    plus: float = 0.0
    within: float = 0.0
    errors: float = 0.0
    surely: float = 0.0
    paired: bool = False
    fitted: bool = False
    reason: str = ""
    shown_by: str = ""
    where: Where = field(default_factory=dict)
    measure: str | None = None
    than_measure: str | None = None
    scales: list[str] = field(default_factory=lambda: ["cpu", "paper"])

    @staticmethod
    def read(content: Mapping[str, Any]) -> Claim:
        """From a recipe, where the relation is called `is`."""
        fields = dict(content)
        than = fields.get("than", {})
        if "than" not in fields and "than_measure" not in fields:
            raise KeyError("than")
        fields["relation"] = fields.pop("is")
        fields["of"] = where_of(fields.get("of"))
        fields["where"] = where_of(fields.get("where"))
        fields["than"] = where_of(than) if isinstance(than, Mapping) else than
        return Claim(**fields)

    def check(self, recipe: str, axes: Iterable[str], measures: Iterable[str], fitted: bool = False) -> None:
        """Refuse a claim about things the recipe does not have; `fitted`: it has fitted labels."""
        prefix = f"recipe {recipe}: claims"
        checks.choice(f"{prefix}: is", self.relation, RELATIONS)
        for measure in (self.measure, self.than_measure):
            if measure is not None:
                checks.choice(f"{prefix}: measure", measure, measures)
        if isinstance(self.than, str) and self.than != "paper":
            raise ConfigError(f"{prefix}: than={self.than!r} must be a number, places on the axes, or 'paper'")
        for position in (self.of, self.where, self.than if isinstance(self.than, dict) else {}):
            for axis in position:
                checks.choice(f"{prefix}: axis", axis, axes)
        self._check_statistics(prefix)
        if self.fitted and not fitted:
            raise ConfigError(f"{prefix}: fitted: true, but the recipe names no fitted labels; add them under fitted")
        if bool(self.reason) != bool(self.shown_by):
            present_field, missing_field = ("reason", "shown_by") if self.reason else ("shown_by", "reason")
            raise ConfigError(f"{prefix}: {present_field} needs {missing_field} beside it: {self.claim!r}")
        if self.shown_by and not SHOWN_BY.fullmatch(self.shown_by):
            raise ConfigError(
                f"{prefix}: shown_by={self.shown_by!r} must be tests/FILE.py::TEST or PAPER/NAME of a recipe"
            )

    def _check_statistics(self, label: str) -> None:
        for key in ("within", "errors", "surely"):
            checks.not_negative(f"{label}: {key}", getattr(self, key))
        if self.errors and self.surely:
            raise ConfigError(
                f"{label}: errors={self.errors} gives slack and surely={self.surely} takes it; choose one"
            )
        if self.paired and not (self.errors or self.surely):
            raise ConfigError(f"{label}: paired: true needs a number of standard errors: errors or surely")
        if self.paired and not isinstance(self.than, dict):
            raise ConfigError(f"{label}: paired: true needs runs on both sides, not than={self.than}")

    def judge(self, numbers: list[Number], candidates: list[Number] | None = None) -> Verdict:
        """Compare the numbers among themselves, or with `candidates`, those of `than_measure`; held if all hold."""
        lines, outcomes = [], []
        try:
            for number in numbers:
                if number.matches(self.of) and number.matches(self.where):
                    for right in self._right(number, numbers, candidates):
                        holds, line = self._compare(number, right)
                        outcomes.append(holds)
                        lines.append(line)
        except Undecided as why:
            return self._verdict(None, str(why))
        if not outcomes:
            return self._verdict(None, "nothing to compare")
        failed = [line for line in lines if line.startswith("✗")]
        report_lines = failed or lines
        suffix = f" … and {len(report_lines) - 4} more" if len(report_lines) > 4 else ""
        return self._verdict(
            all(outcomes), f"{sum(outcomes)} of {len(outcomes)}; " + "; ".join(report_lines[:4]) + suffix
        )

    def _verdict(self, holds: bool | None, detail: str) -> Verdict:
        return Verdict(self.claim, holds, detail, self.reason, self.shown_by, self.fitted)

    def _right(self, number: Number, numbers: list[Number], candidates: list[Number] | None) -> list[Right]:
        """Everything the number is compared with."""
        if not isinstance(self.than, dict):
            target = number.paper if self.than == "paper" else float(self.than)
            comparable = target is not None and number.fitted == self.fitted
            return [Right("", self.times * target + self.plus)] if comparable and target is not None else []
        if candidates is not None:
            counterparts = [candidate for candidate in candidates if candidate.at == number.at]
            names = [str(self.than_measure)] * len(counterparts)
        else:
            free = set(self.than) | set(self.of)
            counterparts = [
                candidate
                for candidate in numbers
                if candidate is not number
                and candidate.matches(self.than)
                and all(candidate.at[axis] == label for axis, label in number.at.items() if axis not in free)
            ]
            names = [" / ".join(candidate.at[axis] for axis in self.than) for candidate in counterparts]
        sides = [
            (name, Number(candidate.at, self.times * candidate.values + self.plus, seeds=candidate.seeds))
            for name, candidate in zip(names, counterparts, strict=True)
            if (number.fitted or candidate.fitted) == self.fitted
        ]
        return [Right(f" ({name})", side.mean, side) for name, side in sides]

    def _compare(self, number: Number, right: Right) -> tuple[bool, str]:
        """Does it hold, and the line that says so."""
        counted = self.errors or self.surely
        error = standard_error(number, right.number, self.paired) if counted else 0.0
        room = (self.errors - self.surely) * error
        difference = number.mean - right.mean
        if math.isnan(number.mean) or math.isnan(right.mean):
            raise Undecided(f"{number.name}{right.name} is not a number")
        if self.relation == "near":
            holds = abs(difference) <= self.within + room
        else:
            holds = (difference if self.relation == "below" else -difference) < room
        sign = {"below": "<", "above": ">", "near": "≈"}[self.relation]
        suffix = f", {abs(difference) / error:.3g} standard errors apart" if error > 0 else ""
        return (
            holds,
            f"{'' if holds else '✗ '}{number.name}: {number.mean:.4g} {sign} {right.mean:.4g}{right.name}{suffix}",
        )


@dataclass
class Right:
    """The right side of a comparison: how it is called, its mean, and its values where it was measured."""

    name: str
    mean: float
    number: Number | None = None


@dataclass
class Verdict:
    """Attributes:

    claim: what was claimed.
    holds: did the comparison hold? None where there was nothing to compare, or too few seeds to.
    detail: the comparisons; the failed ones where there are any.
    reason, shown_by: why it does not hold, and what shows that.
    fitted: does it speak of fitted constants?
    """

    claim: str
    holds: bool | None
    detail: str
    reason: str = ""
    shown_by: str = ""
    fitted: bool = False

    @property
    def word(self) -> str:
        """'held', 'refuted' where it fails for a reason, else 'open'."""
        if self.holds:
            return HELD
        return REFUTED if self.holds is False and self.reason else OPEN


def where_of(labels_by_axis: Mapping[str, Any] | None) -> Where:
    """axis → labels; a single label may stand without a list."""
    return {
        axis: [str(v) for v in (labels if isinstance(labels, list) else [labels])]
        for axis, labels in (labels_by_axis or {}).items()
    }
