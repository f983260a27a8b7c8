"""Scores of clients' own models: losses and accuracies on each client's samples, columns and summaries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.core.federation import Cohort
from fedsim.data.samples import ClientData, ClientSamples
from fedsim.evaluation import Evaluator, registry
from fedsim.evaluation.columns import descriptions
from fedsim.evaluation.metrics import UserMetrics, target_of
from fedsim.models.calling import Inputs
from fedsim.models.losses import correct_share, weighted_mean

MODEL_DESCRIPTIONS = registry.PERSONAL_MODELS
MEASURE_DESCRIPTIONS = descriptions(registry.PERSONAL_MEASURES)
VALIDATED_CLIENTS_COLUMN = registry.VALIDATED_CLIENTS_METRIC.column
PERSONAL_COLUMNS = descriptions(registry.PERSONAL_MODEL_METRICS)

WeightedRows = list[tuple[Tensor, Tensor]]  # shares [n] and rows [n, d]: the rows' outputs are summed by these shares
ScoresByName = dict[str, Tensor]  # 'validation_loss', 'training_loss' and, with labels, 'validation_accuracy': [n] each

SAMPLES_PER_FORWARD_PASS = 4000  # samples of one forward pass


class ClientScorer:
    """Scores one predictor per client, on its own validation and training samples, which react to it under a shift.

    Args:
        evaluator: of the run.
        validation: the validation samples; None for a stream, which draws the same for both.
        train_samples: largest number of training samples per client.

    Attributes:
        names: of the scores.
    """

    def __init__(self, evaluator: Evaluator, validation: ClientData | None, train_samples: int) -> None:
        self.evaluator, dtype = evaluator, evaluator.model.dtype
        self.training = ClientSamples(evaluator.data, train_samples, dtype)
        self.validation = self.training if validation is None else ClientSamples(validation, None, dtype)
        self.metric_by_measure = {f"validation_{metric.column}": metric for metric in evaluator.metrics.metrics}
        self.names = ["validation_loss", "training_loss"] + ["validation_accuracy"] * evaluator.labelled
        self.names += self.metric_by_measure

    def __call__(self, predictor: WeightedRows, cohort: Cohort, deployed: Tensor, t: int = 0) -> ScoresByName:
        """Scores of the cohort's predictors, NaN for a client without samples; `deployed` [n, d] shifts the data if
        `shift.deploy` is 'round'; t is the round whose law the samples have, if the data drift.
        """
        loss, accuracy, added_metrics = self._scores_on(
            self.validation, predictor, cohort, deployed, t, self.evaluator.metrics
        )
        same_samples = self.validation is self.training
        training = loss if same_samples else self._scores_on(self.training, predictor, cohort, deployed, t)[0]
        scores = {"validation_loss": loss, "training_loss": training} | dict(
            zip(self.metric_by_measure, added_metrics, strict=True)
        )
        return scores if accuracy is None else scores | {"validation_accuracy": accuracy}

    def validation_losses(self, rows: Tensor, cohort: Cohort, t: int) -> Tensor:
        """[n] the losses of rows [n, d] on validation samples in round t, which react to them; NaN for a client without
        samples."""
        return self._scores_on(self.validation, [(torch.ones_like(rows[:, 0]), rows)], cohort, rows, t)[0]

    def _scores_on(
        self,
        samples: ClientSamples,
        predictor: WeightedRows,
        cohort: Cohort,
        deployed: Tensor,
        t: int,
        metrics: UserMetrics | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Mean loss [n], accuracy [n] and metrics [K, n] on these samples."""
        none = deployed.new_zeros(len(metrics.names) if metrics else 0, 0)
        if not len(cohort):  # a rank may have no rows
            no_values = deployed.new_zeros(0)
            return no_values, no_values if self.evaluator.labelled else None, none
        losses, correct, added_metrics = [], [], []
        step = max(1, SAMPLES_PER_FORWARD_PASS // max(samples.width, 1))
        for first_row in range(0, len(cohort), step):
            row_selection = slice(first_row, first_row + step)
            block = [(share[row_selection], rows[row_selection]) for share, rows in predictor]
            batch = self._shifted_batch(
                samples.batch(cohort.virtual_client_index[row_selection], t), block, deployed[row_selection]
            )
            output = self._predictor_output(block, self.evaluator.model.call.inputs(batch), batch["weight"])
            weight, model = batch["weight"], self.evaluator.model
            by_sample = {name: value for name, value in batch.items() if value.dim() > 1}
            per_sample = model.client_sample_losses(output, by_sample, weight)
            losses.append(weighted_mean(torch.where(weight > 0, per_sample, 0), weight))
            if self.evaluator.labelled:
                correct.append(weighted_mean(correct_share(model.scores(output, 2), batch["y"], 2), weight))
            if metrics:
                added_metrics.append(metrics.client_metrics(output, target_of(batch), weight))
        return (
            torch.cat(losses),
            torch.cat(correct) if correct else None,
            torch.cat(added_metrics, 1) if added_metrics else none,
        )

    def _shifted_batch(self, batch: dict[str, Tensor], predictor: WeightedRows, deployed: Tensor) -> dict[str, Tensor]:
        """The samples, shifted by the predictors or the server's models."""
        shift = self.evaluator.shift
        if not shift.active:
            return batch
        mixed = torch.stack([share[:, None] * rows for share, rows in predictor]).sum(0)
        return shift.respond_differentiably_all(batch, mixed if shift.deploy == "step" else deployed)

    def _predictor_output(self, predictor: WeightedRows, x: Inputs, weight: Tensor) -> Tensor:
        """[n, q, …] the predictors' outputs for inputs [n, q, …]; `weight` [n, q] is 0 for padding."""
        outputs = [self.evaluator.predict(rows, x, has_shared_inputs=False, weight=weight) for _, rows in predictor]
        shares = [share.reshape(-1, *[1] * (o.dim() - 1)) for o, (share, _) in zip(outputs, predictor, strict=True)]
        output = sum(o * share for o, share in zip(outputs, shares, strict=True))
        assert isinstance(output, Tensor)
        return output


def summarise_over_clients(values: np.ndarray, measure: str, better_direction: str | None = None) -> dict[str, float]:
    """Mean, median and worst tenth over the clients [n] whose value is not NaN; NaN if there are none.
    `better_direction` is 'higher' or 'lower'; by default that of accuracies and losses.
    """
    higher_is_better = measure.endswith("accuracy") if better_direction is None else better_direction == "higher"
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        return dict.fromkeys((measure, f"{measure}_median", f"{measure}_worst10"), float("nan"))
    worst_count = max(1, len(values) // 10)
    worst_values = values[:worst_count] if higher_is_better else values[-worst_count:]
    return {
        measure: float(values.mean()),
        f"{measure}_median": float(np.median(values)),
        f"{measure}_worst10": float(worst_values.mean()),
    }


def personal_measure_names(labelled: bool) -> list[str]:
    """The measures of each model: the spread over clients is that of the accuracy if available, else of the loss."""
    spread = "accuracy" if labelled else "loss"
    return [
        m
        for m in MEASURE_DESCRIPTIONS
        if m in ("validation_loss", "training_loss") or m.startswith(f"validation_{spread}")
    ]
