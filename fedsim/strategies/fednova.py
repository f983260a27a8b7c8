"""FedNova: clients that do unequal work are heard alike (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import replace

from fedsim.core.errors import ConfigError
from fedsim.core.report import Report
from fedsim.local import LocalRule
from fedsim.strategies.base import State
from fedsim.strategies.fedavg import FedAvg


class FedNova(FedAvg):
    """x ← x − η_g mean_{i∈A}(a_i) mean_{i∈A}(G_i / a_i), a_i what client i's steps weigh gradients in sum, means
    weighed by w_i.

    With plain steps a_i is the number of local steps (times their rates, which may move), with local=momentum
    [s − μ (1 − μ^s) / (1 − μ)] / (1 − μ), as in the authors' program. FedAvg converges to the minimum of an objective
    in which clients count as their steps; here they count w_i. No memory; clients send a_i beside the model. FedAvg
    where everybody does the same work.

    Args:
        server_lr, weighting: as `FedAvg`.
    """

    late = True

    def check_local(self, rule: LocalRule) -> None:
        if rule.gradient_weight(0) is None:
            raise ConfigError(
                f"strategy={type(self).__name__} divides by what local steps weigh gradients in sum, which "
                f"local={type(rule).__name__} as configured cannot say; use local=sgd, or local=momentum with "
                "local.state=round"
            )

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort, work = report.cohort, report.weight
        assert work is not None  # see `check_local`
        weights = cohort.weights(self.weighting)
        step = cohort.mean(work, weights)[:, None] * cohort.mean(report.innovation / work[:, None], weights)
        return replace(state, model=state.model - self.server_lr * step)
