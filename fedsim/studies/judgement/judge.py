"""Judges a strategy beside references: all are tuned alike, then compared on cells and seeds that no tuning saw."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fedsim
from fedsim.app.config import groups
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_fraction, is_higher_better
from fedsim.evaluation.registry import describe
from fedsim.studies.judgement.tries import record, tries
from fedsim.studies.judgement.verdict import MECHANISM, NOT_SHOWN, SEED, TUNING, Evidence, confidence_of, verdict
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.choice import ChoiceRule
from fedsim.studies.tuning.federations import advance, federations_of, measured
from fedsim.studies.tuning.schedule import Halving
from fedsim.studies.tuning.space import Interval, Trial, as_override, overrides_of, parse
from fedsim.studies.tuning.tune import Outcome, tune

log = logging.getLogger(__name__)

SETTING = (
    "dataset=digits", "model=linear", "clients=20", "local_steps=5", "batch_size=10", "partition.alpha=0.3",
    "partition.validation=0.2", "availability/base=class_correlated", "availability.base.high=0.8",
    "availability.base.low=0.1", "device=cpu",
)  # fmt: skip
TUNING_CELLS = (("availability=stationary",), ("availability=sine",))
HELD_OUT_CELLS = (
    ("availability=markov",),
    ("availability=sine", "partition.alpha=0.1"),
    ("availability=stationary", "local_steps=10"),
)
TUNING_SEEDS = (0, 1, 2)
HELD_OUT_SEEDS = tuple(range(100, 124))
RATES, SERVER_RATES = "0.03,0.1,0.3,1.0,3.0", "0.3,1.0,3.0"
ALONE_RATES = "log(0.01,10,15)"  # as many trials for a challenger without a server's rate
REFERENCE_KNOBS = ("local.clip=null,1.0,3.0", "local.weight_decay=0.0,0.001,0.01")  # if the challenger has more knobs
FINALISTS = 6
MARGIN = 0.005  # of accuracies: half a percentage point
ROUNDS = (30, 60, 100, 150, 200)  # the numbers of rounds among which a budget chooses
TUNING_AND_TEST_METRICS = ("validation_accuracy", "test_accuracy")  # of tuning, of the comparison


@dataclass(frozen=True)
class Contest:
    """How strategies are compared.

    Attributes:
        setting: overrides of all runs.
        tuning_cells, held_out_cells: environments, as overrides.
        tuning_seeds, held_out_seeds: replicates.
        rounds: of each run.
        knobs: further knobs of the challenger, as for `fedsim tune`, at most two; each reference gets as many of
            `REFERENCE_KNOBS`.
        margin: the smallest difference that matters.
        metrics: by which trials are chosen, and by which strategies are compared.
    """

    setting: tuple[str, ...] = SETTING
    tuning_cells: tuple[tuple[str, ...], ...] = TUNING_CELLS
    held_out_cells: tuple[tuple[str, ...], ...] = HELD_OUT_CELLS
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    held_out_seeds: tuple[int, ...] = HELD_OUT_SEEDS
    rounds: int = 100
    knobs: tuple[str, ...] = ()
    margin: float = MARGIN
    metrics: tuple[str, str] = TUNING_AND_TEST_METRICS

    def __post_init__(self) -> None:
        if set(self.tuning_seeds) & set(self.held_out_seeds):
            raise ConfigError("tuning and held-out seeds must differ")
        if shared := set(self.tuning_cells) & set(self.held_out_cells):
            raise ConfigError(f"{' '.join(next(iter(shared)))} is a cell of tuning and a held-out one")
        if len(self.knobs) > len(REFERENCE_KNOBS):
            raise ConfigError(f"{len(self.knobs)} knobs beside the rates; give at most {len(REFERENCE_KNOBS)}")
        checks.whole_number("rounds", self.rounds)
        checks.not_negative("margin", self.margin)


@dataclass(frozen=True)
class Contender:
    """A strategy.

    Attributes:
        name: a choice of the group strategy, or the dotted path of a class.
        overrides: that choose it.
        knobs: what is tuned.
        default: its settings where nothing is tuned.
        source: digest of its class's source.
    """

    name: str
    overrides: tuple[str, ...]
    knobs: tuple[str, ...]
    default: Trial
    source: str


def contender(name: str, knobs: Sequence[str] = ()) -> Contender:
    """A strategy by its choice or class, with the knobs of its rates and further ones.

    A class without server_lr gets as many values of the local rate as the others have pairs of rates.

    Raises:
        ConfigError: there is no such strategy.
    """
    overrides: tuple[str, ...]
    if "." not in name:
        checks.choice("strategy", name, groups()["strategy"])
        from fedsim.app.config import choice_target

        cls, overrides = _class(choice_target("strategy", name)), (f"strategy={name}",)
    else:
        cls, overrides = _class(name), ("strategy=custom", f"strategy._target_={name}")
    has_rate = "server_lr" in inspect.signature(cls).parameters
    if "." in name:  # strategy=custom has no keys of its own
        strategy_knobs = [knob for knob in parse(knobs)[1] if knob.key.startswith("strategy.")] if knobs else []
        firsts = [
            as_override(knob.key, knob.low if isinstance(knob, Interval) else knob.values[0]) for knob in strategy_knobs
        ]
        overrides = (*overrides, *(f"++{text}" for text in (*["strategy.server_lr=1.0"] * has_rate, *firsts)))
    rates = (f"lr={RATES}", f"strategy.server_lr={SERVER_RATES}") if has_rate else (f"lr={ALONE_RATES}",)
    default = (("lr", 0.1), ("strategy.server_lr", 1.0)) if has_rate else (("lr", 0.1),)
    source = hashlib.sha256(inspect.getsource(inspect.getmodule(cls) or cls).encode()).hexdigest()[:10]
    return Contender(name, overrides, (*rates, *knobs), default, source)


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        strategy_class: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported ({error}); give a class as PACKAGE.MODULE.CLASS") from error
    if not inspect.isclass(strategy_class):
        raise ConfigError(f"{path} is no class; give a class as PACKAGE.MODULE.CLASS")
    return strategy_class


@dataclass
class Judgement:
    """What was found.

    Attributes:
        challenger: its name.
        verdict: 'mechanism', 'tuning', 'seed' or 'not shown'.
        sentence: the verdict in words, with intervals.
        number: of this try in the ledger.
        evidence: reference → differences.
        chosen: contender → overrides that tuning chose.
        contest: how it was compared.
        seconds: that it took, without what earlier judgements had left.
    """

    challenger: str
    verdict: str
    sentence: str
    number: int
    evidence: dict[str, Evidence]
    chosen: dict[str, str]
    contest: Contest
    seconds: float = 0.0
    intervals: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "challenger": self.challenger, "verdict": self.verdict, "sentence": self.sentence, "try": self.number,
            "confidence": confidence_of(self.number), "chosen": self.chosen, "intervals": self.intervals,
            "differences": {
                name: {key: values.tolist() for key, values in vars(of).items()} for name, of in self.evidence.items()
            },
            "contest": vars(self.contest), "seconds": round(self.seconds, 1), "fedsim": fedsim.__version__,
        }  # fmt: skip


def judge(
    challenger: str, against: Sequence[str] = ("fedavg",), contest: Contest | None = None, out: str | Path = "judge",
    ledger: str | Path | None = None,
) -> Judgement:  # fmt: skip
    """Judge a strategy.

    Args:
        challenger: a choice of the group strategy, or the dotted path of a class.
        against: references, likewise.
        contest: how they are compared; None: the default.
        out: folder of the runs; what is finished there is not run again.
        ledger: file that counts the tries; None: ledger.jsonl in `out`.

    Raises:
        ConfigError: a strategy does not exist or cannot be run.
    """
    begin, contest, folder = time.monotonic(), contest or Contest(), Path(out)
    checks.choice("against", against[0] if against else "", [*groups()["strategy"], *(n for n in against if "." in n)])
    reference_knobs = REFERENCE_KNOBS[: len(contest.knobs)]
    contenders = [contender(challenger, contest.knobs), *(contender(name, reference_knobs) for name in against)]
    path = folder / "ledger.jsonl" if ledger is None else Path(ledger)
    key = hashlib.sha256(json.dumps([challenger, contenders[0].source, contenders[0].knobs]).encode()).hexdigest()[:16]
    number = tries(path, key)
    values = [_Measured.of(candidate, contest, folder, candidate is not contenders[0]) for candidate in contenders]
    evidence = {name: values[0].against(of) for name, of in zip(against, values[1:], strict=True)}
    decided = verdict(list(evidence.values()), contest.margin, number)
    chosen = {
        candidate.name: overrides_of(of.outcome.choice.trial) for candidate, of in zip(contenders, values, strict=True)
    }
    judgement = Judgement(challenger, decided, "", number, evidence, chosen, contest, time.monotonic() - begin)
    confidence = confidence_of(number)
    judgement.intervals = {
        name: {k: [float(v.mean()), *PairedDifference(v, confidence).interval] for k, v in vars(of).items()}
        for name, of in evidence.items()
    }
    judgement.sentence = sentence(judgement)
    record(path, {"key": key, "challenger": challenger, "verdict": decided, "try": number})
    return judgement


@dataclass
class _Measured:
    """What was measured of one contender.

    Attributes:
        outcome: of its tuning.
        held_out: trial → [R] means over the held-out cells; of a reference, that of all finalists.
        default, tuned_default: of a reference with default settings: [R] held out, and [n] on the cells of tuning.
        sign: turns a difference into an advantage.
    """

    outcome: Outcome
    held_out: Mapping[Trial, np.ndarray]
    default: np.ndarray
    tuned_default: np.ndarray
    sign: float

    @classmethod
    def of(cls, candidate: Contender, contest: Contest, folder: Path, reference: bool) -> _Measured:
        fixed = (*contest.setting, *candidate.overrides, f"rounds={contest.rounds}")
        choosing, comparing = contest.metrics
        halving = Halving(finalists=FINALISTS)
        # the source is part of the folder's name: a class that was edited is run again
        runs = folder / f"{candidate.name}-{candidate.source}"
        outcome = tune(
            (*fixed, *candidate.knobs), contest.tuning_seeds, choosing, halving, rule=ChoiceRule("best"), out=runs,
            extensions=2, cells=contest.tuning_cells,
        )  # fmt: skip
        quiet = (*fixed, f"eval_every={contest.rounds}")
        sign = 1.0 if is_higher_better(comparing) else -1.0

        def final(trials: Sequence[Trial], cells: Any, seeds: Sequence[int], metric: str) -> dict[Trial, np.ndarray]:
            return final_values(trials, quiet, cells, seeds, metric, runs / "compared")

        default = _complete(candidate.default, outcome)
        trials = list(dict.fromkeys([outcome.choice.trial, *outcome.tuning.finalists, default]))
        if not reference:
            trials = [outcome.choice.trial]
        values = final(trials, contest.held_out_cells, contest.held_out_seeds, comparing)
        held_out = {t: v.reshape(len(contest.held_out_cells), -1).mean(0) for t, v in values.items()}
        if not reference:
            return cls(outcome, held_out, np.zeros(0), np.zeros(0), sign)
        tuned = final([default], contest.tuning_cells, contest.tuning_seeds, choosing)
        tried = {trial: values for trial, values in held_out.items() if trial in outcome.tuning.finalists}
        return cls(outcome, tried, held_out[default], tuned[default], sign)

    def against(self, reference: _Measured) -> Evidence:
        """Differences by seed, positive where this one is better."""
        chosen = self.held_out[self.outcome.choice.trial]
        finite = {t: v for t, v in reference.held_out.items() if np.isfinite(v).all()}
        best = max(finite.values(), key=lambda values: self.sign * values.mean())
        tuned = self.outcome.choice.values
        return Evidence(
            self.sign * (chosen - best),
            self.sign * (chosen - reference.held_out[reference.outcome.choice.trial]),
            self.sign * (chosen - reference.default),
            self.sign * (tuned - reference.outcome.choice.values),
            self.sign * (tuned - reference.tuned_default),
        )


def _complete(default: Trial, outcome: Outcome) -> Trial:
    """Default settings, with the chosen values of knobs that have none."""
    settings = dict(default)
    return tuple((key, settings.get(key, value)) for key, value in outcome.choice.trial)


def final_values(
    trials: Sequence[Trial], overrides: Sequence[str], cells: Sequence[Sequence[str]], seeds: Sequence[int],
    metric: str, folder: Path,
) -> dict[Trial, np.ndarray]:  # fmt: skip
    """Trial → [cells · R] a metric after the last round."""
    by_cell = [federations_of(trials, (*overrides, *cell), seeds, folder) for cell in cells]
    federations = [of for federations in by_cell for of in federations]
    rounds = int(federations[0].config.rounds)
    advance(federations, rounds, (), True)
    of_cells = [measured(group, metric, rounds) for group in by_cell]
    return {trial: np.concatenate([numbers[trial] for numbers in of_cells]) for trial in trials}


def rounds_within(seconds: float, challenger: str, against: Sequence[str], contest: Contest) -> int:
    """The most rounds, among `ROUNDS`, with which judging takes about so many seconds, estimated from runs of a tuning
    federation of the challenger with few rounds."""
    candidate = contender(challenger, contest.knobs)
    trial, times = candidate.default, []
    for rounds in (3, 9):
        begin = time.monotonic()
        overrides = (
            *contest.setting,
            *candidate.overrides,
            f"rounds={rounds}",
            f"eval_every={rounds}",
            "trainer.trial=false",
        )
        with tempfile.TemporaryDirectory() as folder:
            final_values([trial], overrides, contest.tuning_cells[:1], range(60), contest.metrics[0], Path(folder))
        times.append(time.monotonic() - begin)
    per_round = max(times[1] - times[0], 1e-3) / 6 / 60  # of one replicate
    trials = 15 * math.prod(max(1, text.count(",") + 1) for text in contest.knobs)
    halved = trials * len(contest.tuning_cells) * len(contest.tuning_seeds) * 0.5
    held_out = (FINALISTS + 1) * len(contest.held_out_cells) * len(contest.held_out_seeds)
    challenger_alone = len(contest.held_out_cells) * len(contest.held_out_seeds)
    replicates = (1 + len(against)) * halved + len(against) * held_out + challenger_alone
    start = 4.0 * (1 + len(against)) * (len(contest.tuning_cells) + len(contest.held_out_cells))
    affordable = [rounds for rounds in ROUNDS if start + rounds * replicates * per_round <= seconds]
    return max(affordable, default=ROUNDS[0])


def sentence(judgement: Judgement) -> str:
    """The verdict in one sentence, with the intervals that it rests on."""
    scale = 100.0 if is_fraction(judgement.contest.metrics[1]) else 1.0
    unit = " percentage points" if scale > 1 else ""
    label = describe(judgement.contest.metrics[1]).label
    key = {MECHANISM: "held_out_best", TUNING: "held_out_best", SEED: "held_out_chosen", NOT_SHOWN: "held_out_best"}
    meaning = {
        MECHANISM: "is better than the best tuned setting of each reference",
        TUNING: "is better than references with default or chosen settings, but not than the best of their finalists",
        SEED: "is better on the cells and seeds of tuning, but not on held-out ones",
        NOT_SHOWN: "has no advantage that is shown",
    }
    differences = []
    for name, intervals in judgement.intervals.items():
        mean, low, high = (scale * value for value in intervals[key[judgement.verdict]])
        differences.append(f"{name} {mean:+.2f} [{low:.2f}, {high:.2f}]")
    of = "best finalists" if key[judgement.verdict] == "held_out_best" else "chosen settings"
    return (
        f"{judgement.verdict}: {judgement.challenger} {meaning[judgement.verdict]}; held-out {label}, challenger less "
        f"{of} of {', '.join(differences)}{unit} ({100 * confidence_of(judgement.number):.4g} % intervals, try "
        f"{judgement.number})."
    )
