"""An empirical audit of ε: how well an adversary distinguishes two federations that differ in one client, the canary.

Many *worlds* are simulated together, one replicate each. Half of them are one federation, half its neighbour under the
relation of the claim. In every world the run's own availability process draws who takes part, and the run's own uplink
stages (clipping, adaptive norms, counts, noise) carry the rows; only local training is left out, since the canary sends
the row that is hardest to hide. From what is released, round by round, the adversary computes a score, and from how
often the score decides wrongly follows a lower bound on ε (Jagielski et al. 2020; Nasr et al. 2023).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory
from fedsim.core.report import Report
from fedsim.uplink.accounting import (
    KNOWN_SAMPLING,
    NEIGHBOURS_ADD_OR_REMOVE,
    NEIGHBOURS_REPLACE_ONE,
    Mechanism,
    Privacy,
    epsilon_of,
    sum_noise_multiplier,
)
from fedsim.uplink.chain import Uplink
from fedsim.uplink.private import Clip, GaussianNoise, TreeNoise

CLIPPED_LENGTH, UNCLIPPED_LENGTH = (
    10.0,
    0.999,
)  # lengths of rows, in units of C: one that is clipped and one that is not
AUDITED_DIMENSIONS = 4  # of a row: the canary's direction, the others' direction, and two that are empty
WORLDS_AT_ONCE = 2000  # number of worlds simulated together

CLOPPER_PEARSON_ASSUMPTION = "Clopper-Pearson, no assumption about the noise"
GAUSSIAN_ASSUMPTION = "assuming a Gaussian trade-off of errors (μ-GDP)"
ONE_ROUND_ASSUMPTION = "one round that the canary is known to take part in (μ-GDP)"


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on ε, and the claimed ε.

    Attributes:
        method: how the bound was computed, and what it assumes.
        claimed: ε.
        bound: the lower bound.
        ceiling: the largest bound that so many worlds can give, where the adversary is never wrong.
    """

    method: str
    claimed: float
    bound: float
    ceiling: float

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.bound > self.claimed


@dataclass(frozen=True)
class PrivacyAuditResult:
    """The result of an audit.

    Attributes:
        claimed, delta: ε and δ after `rounds`.
        rounds: T.
        worlds: how many were simulated.
        confidence: with which all findings hold together.
        findings: bounds. The first ones are about the claim; unless the canary is known to take part in every round,
            the last one is about a single round in which it does.
    """

    claimed: float
    delta: float
    rounds: int
    worlds: int
    confidence: float
    findings: tuple[EpsilonBound, ...]

    @property
    def bound(self) -> float:
        """The largest lower bound on ε after all rounds."""
        return max(finding.bound for finding in self.findings if finding.method != ONE_ROUND_ASSUMPTION)

    @property
    def violated(self) -> bool:
        """Whether some lower bound exceeds its claim."""
        return any(finding.violated for finding in self.findings)


def audit(
    uplink: Uplink,
    availability: Availability,
    claim: Privacy,
    rounds: int,
    worlds: int = 20_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PrivacyAuditResult:
    """Compute lower bounds on ε of these stages after so many rounds.

    Args:
        uplink: the run's stages.
        availability: the run's process, bound to its federation.
        claim: what is claimed after these rounds, with an ε.
        rounds: T.
        worlds: how many are simulated, at least 200.
        confidence: with which all bounds hold together, over the worlds' random numbers.
        seed: the first world's; the others follow.

    Raises:
        ConfigError: nothing is claimed, or the worlds are too few.
    """
    mechanism = claim.mechanism
    if mechanism is None or claim.epsilon is None or claim.delta is None:
        raise ConfigError(f"nothing is claimed that could be audited: {claim.statement}")
    if checks.check_whole_number("--worlds", worlds) < 200:
        raise ConfigError(f"--worlds {worlds} is too few for a bound; give at least 200")
    canary_present = np.arange(worlds) % 2 == 0
    starts = range(0, worlds, WORLDS_AT_ONCE)
    score_blocks = [
        _log_likelihood_ratios(
            uplink,
            availability,
            mechanism,
            rounds,
            seed + np.arange(worlds)[a : a + WORLDS_AT_ONCE],
            canary_present[a : a + WORLDS_AT_ONCE],
        )
        for a in starts
    ]
    ratios, best_single_scores, times = (np.concatenate(blocks) for blocks in zip(*score_blocks, strict=True))
    if mechanism.tree:  # its claim holds for a client that participates once; a random process may select it again
        canary_present, ratios, best_single_scores, times = (
            values[times <= 1] for values in (canary_present, ratios, best_single_scores, times)
        )
    if min(canary_present.sum(), (~canary_present).sum()) < 50:
        raise ConfigError(
            f"--worlds {worlds} is too few: in most of them a client takes part more than once; give more"
        )
    always_participates = mechanism.sampling == KNOWN_SAMPLING and bool((times == rounds).all())
    one_round = not always_participates and not mechanism.tree  # if the canary is rare, most worlds reveal little
    error_probability = (1 - confidence) / (1 + (mechanism.sampling == KNOWN_SAMPLING) + one_round)  # of each finding
    plain_bound = epsilon_lower_bound(ratios[canary_present], ratios[~canary_present], claim.delta, error_probability)
    findings = [EpsilonBound(CLOPPER_PEARSON_ASSUMPTION, claim.epsilon, *plain_bound)]
    if mechanism.sampling == KNOWN_SAMPLING:
        bound = gaussian_epsilon_lower_bound(
            ratios[canary_present], ratios[~canary_present], claim.delta, error_probability
        )
        findings.append(EpsilonBound(GAUSSIAN_ASSUMPTION, claim.epsilon, *bound))
    if one_round:
        observed = ~np.isnan(best_single_scores)
        round_epsilon = epsilon_of(replace(mechanism, sampling=KNOWN_SAMPLING), claim.delta, 1)
        bound = gaussian_epsilon_lower_bound(
            best_single_scores[canary_present & observed],
            best_single_scores[~canary_present & observed],
            claim.delta,
            error_probability,
        )
        findings.append(EpsilonBound(ONE_ROUND_ASSUMPTION, round_epsilon, *bound))
    return PrivacyAuditResult(claim.epsilon, claim.delta, rounds, worlds, confidence, tuple(findings))


def _log_likelihood_ratios(
    uplink: Uplink,
    availability: Availability,
    mechanism: Mechanism,
    rounds: int,
    seeds: np.ndarray,
    canary_present: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [W], the log-likelihood ratio of the two neighbouring federations in each world, as the adversary computes
    it.

    The second array is that of the first round in which the canary is known to take part, NaN where there is none; the
    third one is the number of these rounds.
    """
    canary = _most_frequent_participant(availability, rounds)
    federation, process = _auditing_federation(availability, seeds)
    chain, memory = copy.deepcopy(uplink), Memory()
    chain.setup(federation, process)
    chain.add_stage_memory(memory, federation, torch.zeros(len(seeds), AUDITED_DIMENSIONS, dtype=federation.dtype))
    adversary = _AuditAdversary(mechanism, chain, len(seeds), rounds)
    for t in range(rounds):
        counts, probabilities = np.array(process.counts(t)), process.probabilities(t)
        takes_part, q = counts[:, canary] > 0, probabilities[:, canary]
        if mechanism.relation == NEIGHBOURS_ADD_OR_REMOVE:
            counts[~canary_present, canary] = 0
        cohort = federation.make_cohort(counts, probabilities, t)
        norms_before = _adaptive_norms(chain, memory, federation)
        sign = 1.0 if t % 2 == 0 or mechanism.tree else -1.0  # so that repeated noise cancels
        rows = _sent_rows(cohort, norms_before[-1][1], canary, canary_present, mechanism, sign)
        placeholder = rows[:, 0]
        report = Report(
            cohort,
            torch.zeros_like(rows),
            {"params": -rows},
            placeholder,
            placeholder,
            placeholder,
            np.ones(len(cohort)),
        )
        received = chain(report, memory).innovation
        if mechanism.by_row:
            released_sum = torch.zeros(len(seeds), dtype=rows.dtype)
            canary_mask = (cohort.client_index == canary) & (cohort.multiplicity > 0)
            released_sum[cohort.replicate_index[canary_mask]] = received[canary_mask, 0]
        else:
            released_sum = cohort.sum(received)[:, 0]
        total = sign * (released_sum / norms_before[-1][1]).double().numpy()
        adversary.observe_round(
            total, _inferred_noisy_counts(chain, memory, norms_before), takes_part, q, cohort.is_nonempty.numpy()
        )
    return adversary.score(), adversary.first_round_scores, adversary.times


def _most_frequent_participant(availability: Availability, rounds: int) -> int:
    """Return the client that takes part most often in expectation."""
    return int(sum(availability.probabilities(t)[0] for t in range(rounds)).argmax())


def _auditing_federation(availability: Availability, seeds: np.ndarray) -> tuple[Federation, Availability]:
    """Return a federation with a replicate for each world, all like the first replicate, and the process bound to
    it."""
    run, m = availability.federation, availability.population.clients
    assert run is not None
    fractions = run.class_fractions
    federation = Federation(
        tuple(int(seed) for seed in seeds),
        m,
        np.tile(run.num_samples[:m], len(seeds)),
        None if fractions is None else np.repeat(fractions[:1], len(seeds), axis=0),
        dtype=run.dtype,
        client_shares=run.data_fractions[:m],
        weighting=run.weighting,
        client_names=run.client_names,
        num_newcomers=run.num_newcomers,
    )
    names = availability.population.names_by_replicate
    process = copy.copy(availability)
    process.federation = None  # it refers to all data of the run, which need no copy
    process = copy.deepcopy(process)
    process.bind(federation, None if names is None else (names[0],) * len(seeds))
    return federation, process


def _adaptive_clip_stages(chain: Uplink) -> Iterator[tuple[int, Clip]]:
    """Return the stages up to the noise whose clipping norm follows a count."""
    for number, stage in enumerate(chain.stages):
        if isinstance(stage, Clip) and stage.quantile is not None:
            yield number, stage
        if isinstance(stage, (GaussianNoise, TreeNoise)):
            return


def _adaptive_norms(chain: Uplink, memory: Memory, federation: Federation) -> list[tuple[int, Tensor]]:
    """Return number and current norm [W] of the adaptive stages, and last that of the stage with the noise."""
    adaptive = [(number, memory.server[f"uplink {number} norm"].clone()) for number, _ in _adaptive_clip_stages(chain)]
    number, stage = next((k, s) for k, s in enumerate(chain.stages) if isinstance(s, (GaussianNoise, TreeNoise)))
    if adaptive and adaptive[-1][0] == number:
        return [*adaptive, adaptive[-1]]
    return [*adaptive, (number, torch.full((federation.num_replicates,), stage.norm, dtype=federation.dtype))]


def _inferred_noisy_counts(chain: Uplink, memory: Memory, norms_before: list[tuple[int, Tensor]]) -> list[np.ndarray]:
    """Return [W] each: the noisy counts of the round, inferred from how the norm changed."""
    noisy_counts = []
    for (number, stage), (_, old_norm) in zip(_adaptive_clip_stages(chain), norms_before, strict=False):
        new_norm = memory.server[f"uplink {number} norm"]
        assert stage.quantile is not None
        share = stage.quantile - torch.log(new_norm.double() / old_norm.double()) / stage.rate
        noisy_counts.append((share * stage.expected.double()).numpy())
    return noisy_counts


def _sent_rows(
    cohort: Cohort, norm: Tensor, canary: int, present: np.ndarray, mechanism: Mechanism, sign: float
) -> Tensor:
    """Return [n, COLUMNS], the rows that all clients send.

    The others send long rows in a direction of their own: they are clipped, so that the count of rows within the norm
    is the canary's alone. The canary's two rows are as far apart as clipping allows, in the sum and in the count.
    """
    norms = cohort.broadcast(norm)
    rows = torch.zeros(len(cohort), AUDITED_DIMENSIONS, dtype=norm.dtype)
    canary_mask, canary_present = cohort.client_index == canary, torch.as_tensor(present)[cohort.replicate_index]
    rows[:, 1] = torch.where(canary_mask, 0.0, CLIPPED_LENGTH * norms)
    if mechanism.relation == NEIGHBOURS_ADD_OR_REMOVE:
        lengths = torch.where(canary_present, UNCLIPPED_LENGTH, 0.0)
    elif mechanism.relation == NEIGHBOURS_REPLACE_ONE:
        lengths = torch.where(canary_present, UNCLIPPED_LENGTH, -CLIPPED_LENGTH)
    else:
        lengths = torch.where(canary_present, CLIPPED_LENGTH, 0.0)
    rows[:, 0] = torch.where(canary_mask, sign * lengths * norms, 0.0)
    return rows


class _AuditAdversary:
    """Sums, round by round, the log-likelihood ratio of the two neighbouring federations.

    It knows everything but the canary's row, the noise and, where sampling is secret, who takes part.

    Args:
        mechanism: relation and sampling.
        chain: the stages, whose settings say how much noise there should be.
        worlds: W.
        rounds: T.

    Attributes:
        first_round_scores: [W] the ratio of the first round in which the canary takes part; NaN before.
        times: [W] in how many rounds it has taken part.
    """

    def __init__(self, mechanism: Mechanism, chain: Uplink, worlds: int, rounds: int) -> None:
        stage = next(s for s in chain.stages if isinstance(s, (GaussianNoise, TreeNoise)))
        self.mechanism, self.z = mechanism, sum_noise_multiplier(stage)
        self.deviations = [s.count_noise for _, s in _adaptive_clip_stages(chain)]
        self.sum, self.first_round_scores = np.zeros(worlds), np.full(worlds, np.nan)
        self.released, self.means = np.zeros((worlds, rounds)), np.zeros((worlds, rounds))  # of a tree
        self.nonempty, self.times = np.zeros(worlds, dtype=int), np.zeros(worlds, dtype=int)

    def observe_round(
        self, total: np.ndarray, counts: list[np.ndarray], takes_part: np.ndarray, q: np.ndarray, nonempty: np.ndarray
    ) -> None:
        """Add one round.

        Args:
            total: [W] the released sum (or the canary's row) in the canary's direction, over C.
            counts: [W] each released count.
            takes_part: [W] whether the canary does.
            q: [W] its probability.
            nonempty: [W] whether anybody does.
        """

        def likelihood_ratio(mean: float, counted: float) -> np.ndarray:
            """Return the likelihood of a canary that changes sum and counts by so much, relative to no canary."""
            log_ratio = np.zeros_like(total) if self.mechanism.tree else (total * mean - mean**2 / 2) / self.z**2
            for count, deviation in zip(counts, self.deviations, strict=True):
                log_ratio = log_ratio + (count * counted - counted**2 / 2) / deviation**2
            return log_ratio

        if self.mechanism.relation == NEIGHBOURS_ADD_OR_REMOVE:
            present_ratio, absent_ratio = likelihood_ratio(1, 1), np.zeros_like(total)
        elif self.mechanism.relation == NEIGHBOURS_REPLACE_ONE:
            present_ratio, absent_ratio = likelihood_ratio(1, 1), likelihood_ratio(-1, 0)
        else:
            present_ratio, absent_ratio = likelihood_ratio(1, 0), likelihood_ratio(0, 1)
        self.times += takes_part
        is_first_round = takes_part & np.isnan(self.first_round_scores)
        self.first_round_scores[is_first_round] = (present_ratio - absent_ratio)[is_first_round]
        if self.mechanism.sampling == KNOWN_SAMPLING:
            self.sum += np.where(takes_part, present_ratio - absent_ratio, 0.0)
        else:
            with np.errstate(divide="ignore"):
                log_absent, log_present = np.log1p(-q), np.log(q)
            self.sum += np.logaddexp(log_absent, log_present + present_ratio) - np.logaddexp(
                log_absent, log_present + absent_ratio
            )
        game_indices = np.flatnonzero(nonempty)  # empty rounds have no noise, and a tree skips them
        self.released[game_indices, self.nonempty[game_indices]] = total[game_indices]
        self.means[game_indices, self.nonempty[game_indices]] = takes_part[game_indices]
        self.nonempty[game_indices] += 1

    def score(self) -> np.ndarray:
        """Return [W], the ratio of all rounds; 0 if it is not a number."""
        ratios = self.sum.copy()
        if self.mechanism.tree:
            for length in np.unique(self.nonempty):
                game_indices = self.nonempty == length
                shift, y = self.means[game_indices, :length], self.released[game_indices, :length]
                precision = np.linalg.inv(self.z**2 * _tree_noise_covariance(int(length)))
                ratios[game_indices] += ((shift @ precision) * (y - shift / 2)).sum(1)  # Δᵀ Σ⁻¹ (y − Δ/2)
        return np.nan_to_num(ratios)


def _tree_noise_covariance(rounds: int) -> np.ndarray:
    """[T, T] of the increments of a tree's noise: after k rounds it has a node for every one-bit of k."""
    nodes = [{(level, k >> level) for level in range(k.bit_length()) if k >> level & 1} for k in range(rounds + 1)]
    names = {name: column for column, name in enumerate(sorted(set().union(*nodes)))}
    sums = np.zeros((rounds + 1, max(1, len(names))))
    for k, node_set in enumerate(nodes):
        sums[k, [names[name] for name in node_set]] = 1.0
    steps = np.diff(sums, axis=0)
    return np.asarray(steps @ steps.T)


def clopper_pearson_upper_bound(num_hits: int, trials: int, error_probability: float) -> float:
    """Upper end of Clopper and Pearson's one-sided interval for a probability, exceeded with "
    "probability `error_probability`."""
    from scipy.stats import beta

    return 1.0 if num_hits >= trials else float(beta.ppf(1 - error_probability, num_hits + 1, trials - num_hits))


def epsilon_lower_bound(
    first: np.ndarray, second: np.ndarray, delta: float, error_probability: float
) -> tuple[float, float]:
    """ε ≥ log((P₁(S) − δ) / P₂(S)) for S = {score > t}, or {score < t} with the neighbours exchanged; and its ceiling.

    One half of the worlds chooses direction and t, the other half gives the bound.

    Args:
        first, second: [n] scores of worlds with either neighbour, larger with the first one.
        delta: δ.
        error_probability: probability that the bound is too large, at most.
    """

    def epsilon_lower_bound(first_scores: np.ndarray, second_scores: np.ndarray, t: float) -> float:
        hit_probability = (
            1
            - clopper_pearson_upper_bound(int((first_scores <= t).sum()), len(first_scores), error_probability / 2)
            - delta
        )
        return (
            math.log(
                hit_probability
                / clopper_pearson_upper_bound(int((second_scores > t).sum()), len(second_scores), error_probability / 2)
            )
            if hit_probability > 0
            else -math.inf
        )

    best_split, best = (first, second, 0.0), -math.inf
    for first_scores, second_scores in ((first, second), (-second, -first)):
        candidate_thresholds = np.concatenate([first_scores[::2], second_scores[::2]])
        for t in np.quantile(
            candidate_thresholds, np.concatenate([np.linspace(0.02, 0.98, 49), [0.985, 0.99, 0.995, 0.998]])
        ):
            if (value := epsilon_lower_bound(first_scores[::2], second_scores[::2], float(t))) > best:
                best_split, best = (first_scores, second_scores, float(t)), value
    first_scores, second_scores, t = best_split
    bound_without_errors = clopper_pearson_upper_bound(0, len(second_scores[1::2]), error_probability / 2)
    return max(0.0, epsilon_lower_bound(first_scores[1::2], second_scores[1::2], t)), max(
        0.0, math.log((1 - bound_without_errors) / bound_without_errors)
    )


def gaussian_epsilon_lower_bound(
    first_scores: np.ndarray, second_scores: np.ndarray, delta: float, error_probability: float
) -> tuple[float, float]:
    """ε at δ of μ-GDP with μ ≥ Φ⁻¹(1 − α) − Φ⁻¹(β), the errors of deciding by the sign of the score; and its ceiling.

    Args:
        first_scores, second_scores: [n] log-likelihood ratios of worlds with either neighbour.
        delta: δ.
        error_probability: probability that the bound is too large, at most, if the trade-off of errors is a Gaussian's.
    """
    from dp_accounting import get_epsilon_gaussian
    from scipy.stats import norm

    def epsilon_lower_bound(false_positives: int, false_negatives: int) -> float:
        alpha = clopper_pearson_upper_bound(false_positives, len(second_scores), error_probability / 2)
        beta = clopper_pearson_upper_bound(false_negatives, len(first_scores), error_probability / 2)
        mu = float(norm.isf(alpha) - norm.ppf(beta))
        return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0

    if not len(first_scores) or not len(second_scores):
        return 0.0, 0.0
    return epsilon_lower_bound(int((second_scores > 0).sum()), int((first_scores <= 0).sum())), epsilon_lower_bound(
        0, 0
    )
