"""The columns of metrics.csv that clients' own models add, and the numbers in them."""

from __future__ import annotations

import numpy as np

MODELS = {
    "global": "the server's model",
    "localized": "what the client makes of its start row in the local steps of the next round, thrown away afterwards",
    "personal": "the client's personal model: of its local rule, or else the model the strategy keeps for it",
}
MEASURES = {
    "validation_loss": "mean over clients of the loss on the client's own validation samples",
    "validation_loss_median": "its median over clients",
    "validation_loss_worst10": "its mean over the tenth of the clients where it is largest",
    "validation_accuracy": "mean over clients of the accuracy on the client's own validation samples",
    "validation_accuracy_median": "its median over clients",
    "validation_accuracy_worst10": "its mean over the tenth of the clients where it is lowest",
    "training_loss": "mean over clients of the loss on (a subsample of) the client's own training samples",
}
VALIDATED = "validated_clients"

PERSONAL_COLUMNS = {
    f"{model}_{measure}": f"{meaning}, of {which}"
    for model, which in MODELS.items()
    for measure, meaning in MEASURES.items()
} | {VALIDATED: "clients in the means over clients of validation: online ones only where personal.over says so"}


def summarise(values: np.ndarray, measure: str) -> dict[str, float]:
    """Mean, median and worst tenth over the clients [n] whose value is a number; NaN where there are none."""
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        return dict.fromkeys((measure, f"{measure}_median", f"{measure}_worst10"), float("nan"))
    tenth = max(1, len(values) // 10)
    worst = values[:tenth] if measure.endswith("accuracy") else values[-tenth:]
    return {
        measure: float(values.mean()),
        f"{measure}_median": float(np.median(values)),
        f"{measure}_worst10": float(worst.mean()),
    }


def measures(labelled: bool) -> list[str]:
    """The measures of each model: spread over clients is that of the accuracy where there is one, else of the loss."""
    spread = "accuracy" if labelled else "loss"
    return [m for m in MEASURES if m in ("validation_loss", "training_loss") or m.startswith(f"validation_{spread}")]
