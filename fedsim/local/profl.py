"""ProFL: performative gradients from noisy, contaminated data (profl Alg. 1)."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.constraints import Count, IntegerAtLeast, NonNegative, OneOf, Positive, PositiveFraction
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.local.history import ESTIMATES, MODELS, STEPS
from fedsim.local.performative import LocalStepSamples, PoFL
from fedsim.local.robust_gradient import GradientOutlierFilter
from fedsim.local.rule import Carry
from fedsim.local.sample_size import AdaptiveSampleSize

SAMPLE_DEALS = ("everybody", "one")
DERIVATIVE_KEY, SERVER_DERIVATIVE_KEY, SERVER_HAS_DERIVATIVE_KEY = "derivative", "server_derivative", "server_knows"
SAMPLE_SIZE_KEY, SAMPLES_USED_KEY, PAST_DERIVATIVE_KEY, PAST_MODEL_KEY = (
    "sample_size",
    "samples_used",
    "past_derivative",
    "past_model",
)


class ProFL(PoFL):
    """PoFL on the samples that Robust Gradient keeps: L̂₁, L̂₂ and f̂ are all made of those.

    Robust Gradient cannot tell a long clean tail from outliers. Where gradients have one, as in regression, L̂₂ suffers,
    which lives on the largest losses: on clean house prices (γ = 1.5, n = 500) θ ends at 0.565, not at θ^PO = 0.584.

    Args:
        robust: apply Robust Gradient; without it all samples count.
        bins, sparse, settled: see `GradientOutlierFilter`.
        server_derivative: the server estimates df/dθ after every round from those that took part and can, and everybody
            uses that one in the next rounds. It may reach a client before its own first H steps are over. Memory: two
            [p, d] matrices per client.
        server_method: 'mean': the mean of the clients' df/dθ; 'regression': eq. 6 on the clients' mean f̂ and mean θ of
            their last H steps, where the errors of f̂ average out before they are divided by Δθ. The paper does not say.
        adaptive_samples: a client uses only as many of the samples drawn as `AdaptiveSampleSize` asks for, and
            `max_samples` in its first steps. Memory: two [p, d] matrices and a model per client.
        max_samples: cap; batches are drawn at this size. None takes `batch_size`.
        tolerance, failure, curvature: see `AdaptiveSampleSize`.
        **options: of PoFL.
    """

    effective_if = (
        EffectiveIf("bins", lambda component, run: component.robust, "{at}.robust=true", attribute="filter.bins"),
        EffectiveIf("sparse", lambda component, run: component.robust, "{at}.robust=true", attribute="filter.sparse"),
        EffectiveIf("settled", lambda component, run: component.robust, "{at}.robust=true", attribute="filter.settled"),
        EffectiveIf("server_method", lambda component, run: component.server_derivative, "{at}.server_derivative=true"),
        EffectiveIf(
            "tolerance",
            lambda component, run: component.adaptive,
            "{at}.adaptive_samples=true",
            attribute="sample_size.tolerance",
        ),
        EffectiveIf(
            "failure",
            lambda component, run: component.adaptive,
            "{at}.adaptive_samples=true",
            attribute="sample_size.failure",
        ),
        EffectiveIf(
            "curvature",
            lambda component, run: component.adaptive,
            "{at}.adaptive_samples=true",
            attribute="sample_size.curvature",
        ),
    )

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        robust: bool = True,
        bins: Annotated[int, IntegerAtLeast(2)] = 10,
        sparse: PositiveFraction = 0.0025,
        settled: PositiveFraction = 0.1,
        server_derivative: bool = False,
        server_method: Annotated[str, OneOf("mean", "regression")] = "mean",
        adaptive_samples: bool = False,
        max_samples: Count | None = None,
        tolerance: Positive = 0.1,
        failure: PositiveFraction = 0.05,
        curvature: NonNegative | None = None,
        **options: Any,
    ) -> None:
        if max_samples is not None and not adaptive_samples:
            raise ConfigError(
                f"{{max_samples}}={max_samples} needs {{adaptive_samples}}=true; else set batch_size",
                mentions=("max_samples", "adaptive_samples"),
            )
        if max_samples is not None:
            options["batch_size"] = max_samples
        super().__init__(**options)
        self.robust, self.filter = robust, GradientOutlierFilter(bins, sparse, settled)
        self.server_derivative, self.adaptive = server_derivative, adaptive_samples
        self.server_method = server_method
        if server_derivative and server_method == "regression" and self.history.length < 2:
            raise ConfigError(
                "{server_method}=regression needs {history} of at least 2: one difference",
                mentions=("server_method", "history"),
            )
        cap = self.work.batch_size
        if adaptive_samples and cap is None:
            raise ConfigError(
                "{max_samples}=null and batch_size=null leave no cap; give one of them", mentions=("max_samples",)
            )
        self.sample_size = AdaptiveSampleSize(cap or 1, tolerance, failure, curvature)

    def memory(self, federation: Federation, dimension: int) -> Carry:
        zero_matrix = functools.partial(federation.zeros, self.estimator.size, dimension)
        memory = super().memory(federation, dimension)
        if self.server_derivative or self.adaptive:
            memory |= {DERIVATIVE_KEY: zero_matrix()}
        if self.server_derivative:
            memory |= {
                SERVER_DERIVATIVE_KEY: zero_matrix(),
                SERVER_HAS_DERIVATIVE_KEY: federation.zeros(dtype=torch.bool),
            }
        if self.adaptive:
            count = federation.zeros(dtype=torch.int64)
            memory |= {SAMPLE_SIZE_KEY: count + self.sample_size.cap, SAMPLES_USED_KEY: count}
            memory |= {PAST_DERIVATIVE_KEY: zero_matrix(), PAST_MODEL_KEY: federation.zeros(dimension)}
        return memory

    def select(self, carry: Carry, gradients: Tensor, weight: Tensor) -> Tensor:
        real_mask = weight > 0
        if self.adaptive:
            real_mask = real_mask & (
                torch.arange(weight.shape[1], device=weight.device) < carry[SAMPLE_SIZE_KEY][:, None]
            )
        return (self.filter(gradients, real_mask) if self.robust else real_mask).to(weight.dtype) * weight

    def shift_gradient(self, carry: Carry, draw: LocalStepSamples, moment_gradient: Tensor) -> tuple[Carry, Tensor]:
        if DERIVATIVE_KEY not in carry:
            return super().shift_gradient(carry, draw, moment_gradient)
        slope = self.history.derivative(carry, draw.theta, draw.f)
        carry = carry | {DERIVATIVE_KEY: slope}
        if self.server_derivative:
            slope = torch.where(carry[SERVER_HAS_DERIVATIVE_KEY][:, None, None], carry[SERVER_DERIVATIVE_KEY], slope)
        return carry, (slope.mT @ moment_gradient[:, :, None]).squeeze(2)

    def update_learned_state(self, carry: Carry, sample_draw: LocalStepSamples, lr: Tensor) -> Carry:
        if not self.adaptive:
            return carry
        real_mask = (
            sample_draw.batch["weight"] > 0
            if "weight" in sample_draw.batch
            else torch.ones_like(sample_draw.weight, dtype=torch.bool)
        )
        samples_used = torch.minimum(real_mask.sum(1), carry[SAMPLE_SIZE_KEY])
        derivative_matrix, theta, history_length = carry[DERIVATIVE_KEY], sample_draw.theta, self.history.length
        distance = (theta - carry[PAST_MODEL_KEY]).norm(dim=1)
        relative_change = (derivative_matrix - carry[PAST_DERIVATIVE_KEY]).norm(dim=(1, 2)) / distance.clamp(
            min=torch.finfo(distance.dtype).tiny
        )
        curvature = self.sample_size.curvature
        relative_change = (
            torch.where(carry[STEPS] >= 2 * history_length, relative_change, 0.0)
            if curvature is None
            else torch.full_like(relative_change, curvature)
        )
        n = self.sample_size(
            history_length,
            lr,
            sample_draw.loss,
            sample_draw.gradient,
            derivative_matrix,
            carry[MODELS] - theta[:, None],
            self.estimator.variance(sample_draw.batch, sample_draw.weight, sample_draw.f),
            relative_change,
            min_samples=self.estimator.size + 1,
        )
        anchor = (carry[STEPS] >= history_length) & (carry[STEPS] % history_length == 0)
        return carry | {
            SAMPLE_SIZE_KEY: torch.where(self.history.is_full(carry), n, self.sample_size.cap),
            SAMPLES_USED_KEY: carry[SAMPLES_USED_KEY] + samples_used,
            PAST_DERIVATIVE_KEY: torch.where(anchor[:, None, None], derivative_matrix, carry[PAST_DERIVATIVE_KEY]),
            PAST_MODEL_KEY: torch.where(anchor[:, None], theta, carry[PAST_MODEL_KEY]),
        }

    def after_round(self, memory: dict[str, Tensor], cohort: Cohort) -> None:
        if not self.server_derivative:
            return
        carry = {name: cohort.gather(memory[name]) for name in (STEPS, MODELS, ESTIMATES, DERIVATIVE_KEY)}
        if self.server_method == "mean":
            ready_mask = (carry[STEPS] > self.history.min_history_length(carry[MODELS].shape[2])).to(
                cohort.multiplicity.dtype
            )
            mean_derivative = cohort.mean(carry[DERIVATIVE_KEY], ready_mask)
        else:
            ready_mask = self.history.is_full(carry).to(cohort.multiplicity.dtype)
            models, estimates = (cohort.mean(values, ready_mask) for values in self.history.recent_steps(carry))
            mean_derivative = self.history.regression(models, estimates)
        any_ready = cohort.sum(ready_mask) > 0
        server_derivatives = memory[SERVER_DERIVATIVE_KEY].unflatten(0, (len(mean_derivative), -1))
        mean_derivative, update_mask = (
            mean_derivative.to(server_derivatives.device)[:, None],
            any_ready.to(server_derivatives.device)[:, None, None, None],
        )
        server_derivatives.copy_(torch.where(update_mask, mean_derivative, server_derivatives))
        memory[SERVER_HAS_DERIVATIVE_KEY] |= cohort.federation.broadcast(any_ready)

    def extra_transmitted_numbers(self, dimension: int) -> tuple[int, int]:
        if not self.server_derivative:
            return 0, 0
        p, steps = self.estimator.size, self.history.length
        return p * dimension, p * dimension if self.server_method == "mean" else steps * (p + dimension)

    def samples_used(self, planned_samples: np.ndarray, carry_before: Carry, carry_after: Carry) -> np.ndarray:
        return (
            (carry_after[SAMPLES_USED_KEY] - carry_before[SAMPLES_USED_KEY]).cpu().numpy()
            if self.adaptive
            else planned_samples
        )


class PG(PoFL):
    """Performative gradient descent on the mixture (Izzo et al. 2021): the centralised baseline of profl Table 1.

    It is PoFL with one client that holds everybody's data (`fedsim.data.datasets.pooled`): a single f̂, σ² and df/dθ for
    the mixture. Where the sensitivities of the clients differ, it need not end at θ^PO; for Gaussian means under the
    `location` shift it ends at θ^PS. Partition and availability do not apply, and `batch_size` is that of the pooled
    batch.

    Args:
        deals: whose samples a step draws: 'everybody', in equal shares; 'one': all are those of one client, drawn at
            random for every step. The latter needs a stream, where a sample has a client.
        **options: of PoFL.
    """

    pooled = True

    def __init__(self, deals: Annotated[str, OneOf(*SAMPLE_DEALS)] = "everybody", **options: Any) -> None:
        super().__init__(**options)
        self.one_at_a_time = deals == "one"
