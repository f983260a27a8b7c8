"""Comparisons of a recipe: what is tested of a paper's statement, as two sides of numbers and a relation between them.

Its verdict rests on a 95 % interval over seeds of the difference of the sides. Held: the interval lies on the side that
was stated. Contradicted: on the other one. Level: it contains zero, and no difference that matters. Not shown: else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.reproduce.intervals import MeanDifference, NoIntervalError, mean_difference
from fedsim.studies.reproduce.number import LabelsByAxis, MeasuredNumber

RELATIONS = ("below", "above", "near")
CONTRADICTED_VERDICT, NOT_RUN_VERDICT, NOT_SHOWN_VERDICT, LEVEL_VERDICT, HELD_VERDICT = VERDICTS_WORST_FIRST = (
    "contradicted",
    "not run",
    "not shown",
    "level",
    "held",
)
EVIDENCE_PATTERN = re.compile(r"tests/[\w/]+\.py::test_\w+|\w+/\w+")  # path of a test, or name of a recipe
MAX_EVIDENCE_LINES = 4  # lines of a verdict's evidence

LabelSubstitutes = Mapping[
    str, tuple[frozenset[str], frozenset[str]]
]  # axis → labels of this scale alone, of others alone


@dataclass
class Comparison:
    """A comparison: `of` is below, above or near `than`, wherever the other axes agree.

    Attributes:
        we_test: what is compared, in our words.
        of: the places of the numbers on the left side.
        relation: 'below' | 'above' | 'near'.
        than: the numbers they are compared with, a number, or 'paper' for what the paper printed.
        statement: the statement of the paper's ledger that it decides; or
        ours: whether it is a control of our own.
        times, plus: factor and summand applied to the right side.
        within: 'near': largest absolute difference.
        matters: the smallest difference that would matter; without it the verdict 'level' is not possible.
        exact: whether the numbers are deterministic, so that no interval is needed.
        choice: the choice, not printed in the paper, that these runs make.
        errors: smallest number of standard errors of the difference for 'contradicted'.
        surely: smallest number of standard errors of the difference for 'held'.
        paired: whether both sides must have the same seeds, if known. Sides with the same seeds are always paired.
        fitted: whether it compares numbers with fitted constants on at least one side; other comparisons exclude them.
        reason: why it does not hold, in a sentence.
        shown_by: what shows the reason: tests/FILE.py::TEST, or a recipe PAPER/NAME.
        where: the places to which it is restricted.
        measure: the measure that is compared; by default the recipe's first.
        than_measure: another measure of the same runs as the right side, instead of `than`.
        scales: the scales to which it is restricted; the end of training has no meaning after three rounds.
    """

    we_test: str
    of: LabelsByAxis
    relation: str
    than: LabelsByAxis | float | str
    statement: str = ""
    ours: bool = False
    times: float = 1.0
    plus: float = 0.0
    within: float = 0.0
    matters: float | None = None
    exact: bool = False
    choice: str = ""
    errors: float = 0.0
    surely: float = 0.0
    paired: bool = False
    fitted: bool = False
    reason: str = ""
    shown_by: str = ""
    where: LabelsByAxis = field(default_factory=dict)
    measure: str | None = None
    than_measure: str | None = None
    scales: list[str] = field(default_factory=lambda: ["cpu", "paper"])

    @staticmethod
    def read(content: Mapping[str, Any]) -> Comparison:
        """Create a comparison from a recipe's content, in which the relation is called `is`."""
        fields = dict(content)
        right_side = fields.get("than", {})
        if "than" not in fields and "than_measure" not in fields:
            raise KeyError("than")
        fields["relation"] = fields.pop("is")
        fields["of"] = labels_by_axis(fields.get("of"))
        fields["where"] = labels_by_axis(fields.get("where"))
        fields["than"] = labels_by_axis(right_side) if isinstance(right_side, Mapping) else right_side
        return Comparison(**fields)

    def check(self, recipe: str, axes: Iterable[str], measures: Iterable[str], fitted: bool = False) -> None:
        """Refuse a comparison of things the recipe does not have; `fitted`: the recipe has fitted labels."""
        prefix = f"recipe {recipe}: comparisons"
        checks.check_choice(f"{prefix}: is", self.relation, RELATIONS)
        for measure in (self.measure, self.than_measure):
            if measure is not None:
                checks.check_choice(f"{prefix}: measure", measure, measures)
        if isinstance(self.than, str) and self.than != "paper":
            raise ConfigError(f"{prefix}: than={self.than!r} must be a number, places on the axes, or 'paper'")
        for position in (self.of, self.where, self.than if isinstance(self.than, dict) else {}):
            for axis in position:
                checks.check_choice(f"{prefix}: axis", axis, axes)
        self._check_axes(prefix)
        self._check_statistical_options(prefix)
        self._check_statement_or_ours(prefix)
        if self.fitted and not fitted:
            raise ConfigError(f"{prefix}: fitted: true, but the recipe names no fitted labels; add them under fitted")
        if bool(self.reason) != bool(self.shown_by):
            present_field, missing_field = ("reason", "shown_by") if self.reason else ("shown_by", "reason")
            raise ConfigError(f"{prefix}: {present_field} needs {missing_field} beside it: {self.we_test!r}")
        if self.shown_by and not EVIDENCE_PATTERN.fullmatch(self.shown_by):
            raise ConfigError(
                f"{prefix}: shown_by={self.shown_by!r} must be tests/FILE.py::TEST or PAPER/NAME of a recipe"
            )

    def _check_axes(self, prefix: str) -> None:
        """Refuse an axis that only the left side names, which would compare runs at different places."""
        if not isinstance(self.than, dict) or self.than_measure is not None:
            return
        for axis in self.of:
            if axis not in self.than and axis not in self.where:
                raise ConfigError(
                    f"{prefix}: of names the axis {axis!r}, and neither than nor where does, so that runs at different"
                    f" places would be compared; name it under than, or under where: {self.we_test!r}"
                )

    def _check_statement_or_ours(self, prefix: str) -> None:
        if bool(self.statement) == self.ours:
            raise ConfigError(f"{prefix}: give either statement: ID or ours: true: {self.we_test!r}")
        if self.fitted and self.statement:
            raise ConfigError(
                f"{prefix}: fitted constants decide no statement; a fitted comparison is ours: true: {self.we_test!r}"
            )

    def _check_statistical_options(self, prefix: str) -> None:
        for key in ("within", "errors", "surely"):
            checks.check_not_negative(f"{prefix}: {key}", getattr(self, key))
        if self.matters is not None:
            checks.check_positive(f"{prefix}: matters", self.matters)
        if self.errors and self.surely:
            raise ConfigError(f"{prefix}: errors={self.errors} and surely={self.surely} contradict; choose one")
        if self.paired and not isinstance(self.than, dict):
            raise ConfigError(f"{prefix}: paired: true needs runs on both sides, not than={self.than}")

    def compared_sides(
        self, numbers: list[MeasuredNumber], than_numbers: list[MeasuredNumber] | None = None
    ) -> list[ComparedSides]:
        """Return the pairs of sides that are compared; `than_numbers` are the numbers of `than_measure`."""
        return [
            sides
            for left_number in numbers
            if left_number.matches_axis_labels(self.of) and left_number.matches_axis_labels(self.where)
            for sides in self._sides(left_number, numbers, than_numbers)
        ]

    def _sides(
        self, left_number: MeasuredNumber, numbers: list[MeasuredNumber], than_numbers: list[MeasuredNumber] | None
    ) -> list[ComparedSides]:
        if not isinstance(self.than, dict):
            target = left_number.paper_value if self.than == "paper" else float(self.than)
            return (
                [ComparedSides(left_number, target)]
                if target is not None and left_number.is_fitted == self.fitted
                else []
            )
        if than_numbers is not None:
            counterparts = [candidate for candidate in than_numbers if candidate.axis_labels == left_number.axis_labels]
            names = [str(self.than_measure)] * len(counterparts)
        else:
            counterparts = [
                candidate
                for candidate in numbers
                if candidate is not left_number
                and candidate.matches_axis_labels(self.than)
                and all(
                    candidate.axis_labels[axis] == label
                    for axis, label in left_number.axis_labels.items()
                    if axis not in self.than
                )
            ]
            names = [" / ".join(candidate.axis_labels[axis] for axis in self.than) for candidate in counterparts]
        return [
            ComparedSides(left_number, candidate, name)
            for name, candidate in zip(names, counterparts, strict=True)
            if (left_number.is_fitted or candidate.is_fitted) == self.fitted
        ]

    def judge(
        self,
        numbers: list[MeasuredNumber],
        than_numbers: list[MeasuredNumber] | None = None,
        substitutes: LabelSubstitutes | None = None,
    ) -> Judgement:
        """Return the verdict on these numbers; 'not run' if a label that the comparison names has no numbers.

        Args:
            numbers: the numbers of its measure.
            than_numbers: the numbers of `than_measure`.
            substitutes: axis → labels that only this scale has, and labels that only other scales have. A label of the
                other scales may be absent where the comparison names one of this scale for it.
        """
        absent_labels = self._unmatched_axis_labels(numbers, substitutes or {}) if numbers else []
        if absent_labels:
            return Judgement(self, NOT_RUN_VERDICT, f"no results for {', '.join(absent_labels)}")
        return self.judge_sides(self.compared_sides(numbers, than_numbers))

    def _unmatched_axis_labels(self, numbers: list[MeasuredNumber], substitutes: LabelSubstitutes) -> list[str]:
        """Return the labels that the comparison names, no number has, and no label of this scale replaces."""
        sides = (self.of, self.where, self.than if isinstance(self.than, dict) else {})
        labels_by_named_axis: dict[str, list[str]] = {}
        for axis, labels in (item for side in sides for item in side.items()):
            labels_by_named_axis[axis] = list(dict.fromkeys([*labels_by_named_axis.get(axis, []), *labels]))
        absent_labels = []
        for axis, axis_labels in labels_by_named_axis.items():
            labels_here, labels_elsewhere = substitutes.get(axis, (frozenset(), frozenset()))
            replaced_labels = labels_elsewhere.intersection(axis_labels)
            if len(replaced_labels) > len(labels_here.intersection(axis_labels)):
                replaced_labels = frozenset()
            needed_labels = [label for label in axis_labels if label not in replaced_labels]
            absent_labels += [
                label for label in needed_labels if all(n.axis_labels.get(axis) != label for n in numbers)
            ]
        return absent_labels

    def judge_sides(self, sides_of_pairs: list[ComparedSides]) -> Judgement:
        """Return the worst verdict of the pairs of sides; 'held' only if all pairs are."""
        if not sides_of_pairs:
            return Judgement(self, NOT_RUN_VERDICT, "these results have no such runs")
        outcomes = [self.judge_pair(sides) for sides in sides_of_pairs]
        worst_verdict = next(
            verdict for verdict in VERDICTS_WORST_FIRST if any(outcome[0] == verdict for outcome in outcomes)
        )
        evidence = [line for verdict, line, _ in outcomes if verdict == worst_verdict]
        count = sum(verdict == worst_verdict for verdict, _, _ in outcomes)
        suffix = f" … and {len(evidence) - MAX_EVIDENCE_LINES} more" if len(evidence) > MAX_EVIDENCE_LINES else ""
        detail = f"{count} of {len(outcomes)} {worst_verdict}; " + "; ".join(evidence[:MAX_EVIDENCE_LINES]) + suffix
        powers = [smallest_shown for _, _, smallest_shown in outcomes if smallest_shown]
        return Judgement(self, worst_verdict, detail, max(powers) if powers else None)

    def judge_pair(self, sides: ComparedSides) -> tuple[str, str, float]:
        """Return the verdict of a pair, its line of evidence, and the smallest difference that it could have shown."""
        right = sides.transformed_right_side(self.times, self.plus)
        try:
            side_difference = mean_difference(sides.left_number, right, self.exact)
            if self.paired and not side_difference.is_paired and sides.has_known_seeds:
                raise NoIntervalError(f"{sides.left_number.name} and {sides.name} do not share their seeds")
        except NoIntervalError as error:
            return NOT_SHOWN_VERDICT, str(error), 0.0
        verdict = (
            self._nearness_verdict(side_difference)
            if self.relation == "near"
            else self._direction_verdict(side_difference)
        )
        line = (
            f"{sides.left_number.name}: {sides.left_number.mean:.4g} against "
            f"{sides.right_side_text(self.times, self.plus)}"
        )
        return verdict, f"{line}, {difference_text(side_difference)}", side_difference.smallest_detectable_difference

    def _direction_verdict(self, side_difference: MeanDifference) -> str:
        signed_difference = (
            -side_difference.value if self.relation == "below" else side_difference.value
        )  # positive: as stated
        if signed_difference - side_difference.interval_half_width(self.surely) > 0:
            return HELD_VERDICT
        if signed_difference + side_difference.interval_half_width(self.errors) < 0:
            return CONTRADICTED_VERDICT
        if not side_difference.standard_error and not side_difference.value:
            return LEVEL_VERDICT
        size, half_width = abs(side_difference.value), side_difference.interval_half_width()
        return LEVEL_VERDICT if size <= half_width and size + half_width < (self.matters or 0.0) else NOT_SHOWN_VERDICT

    def _nearness_verdict(self, side_difference: MeanDifference) -> str:
        size = abs(side_difference.value)
        if size + side_difference.interval_half_width(self.surely) <= self.within:
            return HELD_VERDICT
        return (
            CONTRADICTED_VERDICT
            if size - side_difference.interval_half_width(self.errors) > self.within
            else NOT_SHOWN_VERDICT
        )


@dataclass(frozen=True)
class ComparedSides:
    """The two sides of a comparison; the right one is a measured number or a constant."""

    left_number: MeasuredNumber
    right_side: MeasuredNumber | float
    name: str = ""

    @property
    def has_known_seeds(self) -> bool:
        """Whether the seeds of both sides are known."""
        return isinstance(self.right_side, MeasuredNumber) and None not in (
            self.left_number.seeds,
            self.right_side.seeds,
        )

    def transformed_right_side(self, times: float, plus: float) -> MeasuredNumber | float:
        """Return the right side after applying factor and summand."""
        if isinstance(self.right_side, MeasuredNumber):
            return MeasuredNumber(
                self.right_side.axis_labels, times * self.right_side.values + plus, seeds=self.right_side.seeds
            )
        return times * self.right_side + plus

    def right_side_text(self, times: float, plus: float) -> str:
        """Return the right side as evidence states it: '75.08 (γ = 0.1)', or '65.08 (75.08 of γ = 0.1, minus 10)'."""
        right = self.transformed_right_side(times, plus)
        if isinstance(right, float) or not isinstance(self.right_side, MeasuredNumber):
            return f"{right:.4g}" + f" ({self.name})" * bool(self.name)
        if (times, plus) == (1.0, 0.0):
            return f"{right.mean:.4g}" + f" ({self.name})" * bool(self.name)
        measured_text = f"{self.right_side.mean:.4g}" + f" of {self.name}" * bool(self.name)
        factor_text = f"{times:g} × " if times != 1.0 else ""
        summand_text = f", {'plus' if plus > 0 else 'minus'} {abs(plus):g}" if plus else ""
        return f"{right.mean:.4g} ({factor_text}{measured_text}{summand_text})"


@dataclass(frozen=True)
class Judgement:
    """The verdict on a comparison.

    Attributes:
        comparison: the comparison.
        verdict: 'held', 'contradicted', 'level', 'not shown', or 'not run' if there was nothing to compare.
        evidence_text: the number of pairs with that verdict, and their differences.
        smallest_detectable_difference: the smallest difference that all pairs would have shown, with 80 % power; None
            without interval.
    """

    comparison: Comparison
    verdict: str
    evidence_text: str
    smallest_detectable_difference: float | None = None


def difference_text(side_difference: MeanDifference) -> str:
    """Format a difference with its interval."""
    if not side_difference.standard_error:
        return f"difference {side_difference.value:.4g}, the same in every seed"
    low, high = (
        side_difference.value - side_difference.interval_half_width(),
        side_difference.value + side_difference.interval_half_width(),
    )
    kind = "paired difference" if side_difference.is_paired else "difference"
    return f"{kind} {side_difference.value:.4g} (95 %: {low:.4g} to {high:.4g})"


def labels_by_axis(labels_of_axes: Mapping[str, Any] | None) -> LabelsByAxis:
    """Return axis → list of labels; a single label may be given without a list."""
    return {
        axis: [str(v) for v in (labels if isinstance(labels, list) else [labels])]
        for axis, labels in (labels_of_axes or {}).items()
    }
