"""The columns of metrics.csv: what each number of an evaluation is.

Means over clients weigh them as the strategy's objective does: alike, or by their data where it is weighting=data; so
do the optimum and the reference points. A client's samples weigh alike, but for the importance weights of a shift. Test
metrics weigh samples alike, but for those by client, which weigh their natural owners alike. Columns of validation
samples and of clients' own models (`fedsim.personal`) weigh clients alike in any case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MODELS = {"global": "the server's model", "client_mean": "the mean of all clients' models"}  # what can be evaluated
PLACE = {"round": "completed rounds; 0 is the initial model", "seed": "seed of the replicate"}
MEASURED = {
    "test_loss": "mean loss of the evaluated model on the test set",
    "test_accuracy": "fraction of the test set classified correctly",
    "test_accuracy_by_client": "mean of the accuracies on what was held out of each client",
    "test_accuracy_by_client_worst10": "mean of the lowest tenth of the accuracies on what was held out of each client",
    "test_loss_by_client": "mean of the mean losses on what was held out of each client",
    "test_loss_by_client_worst10": "mean of the highest tenth of the losses on what was held out of each client",
    "validation_loss": "mean over clients of the loss on the client's own validation samples",
    "validation_loss_worst10": "its mean over the tenth of the clients where it is highest",
    "validation_accuracy": "mean over clients of the accuracy on the client's own validation samples",
    "validation_accuracy_worst10": "its mean over the tenth of the clients where it is lowest",
    "train_loss": "mean over clients of the mean loss on (a subsample of) the client's own, shifted, data",
    "train_accuracy": "mean over clients of the accuracy on (a subsample of) the client's own data",
    "client_accuracy_worst10": "mean of the lowest tenth of the clients' accuracies on (a subsample of) their own "
    "training data",
    "distance_to_optimum": "Euclidean distance of the evaluated model to the closed-form optimum, ridge included",
    "performative_loss": "train_loss by another name: the loss of the evaluated model on data that answer it",
    "performative_risk": "performative_loss and the ridge λ/2 ‖θ‖²: what θ^PO minimises",
    "decoupled_loss": "loss of the evaluated model on the clients' data as they answered the server's last deployment: "
    "its model before the last round, or what shift.inertia or shift.redraw make of its models",
    "distance_to_ps": "Euclidean distance of the evaluated model to the performatively stable point",
    "distance_to_po": "Euclidean distance of the evaluated model to the performatively optimal point",
    "distance_to_nash": "Euclidean distance of the evaluated model, all players' decisions, to their Nash equilibrium",
}
WORK = {
    "active_clients": "clients that took part in the last round",
    "mean_active_clients": "the same, averaged over the rounds since the previous row",
    "bytes_down": "bytes that the server sent to clients in the last round",
    "bytes_up": "bytes that clients sent to the server in the last round",
    "total_bytes_down": "bytes that the server has sent to clients so far",
    "total_bytes_up": "bytes that clients have sent to the server so far",
    "samples": "training samples this replicate has processed so far",
    "seconds": "wall time of training and evaluation so far, resumed parts included",
}
TIME = {  # where there is a clock
    "virtual_seconds": "virtual seconds so far, by the run's clock",
    "late_clients": "clients that were sent the model in the last round and do not count in it",
}


def also(model: str, columns: Iterable[str]) -> dict[str, str]:
    """The columns of a model that is evaluated beside the first one: column → its name for this model."""
    return {name: f"{model}_{name}" for name in columns}


COLUMNS = PLACE | MEASURED
for _model, _what in MODELS.items():
    COLUMNS |= {name: f"{MEASURED[of]}; here of {_what}" for of, name in also(_model, MEASURED).items()}
COLUMNS |= WORK | TIME


RISING = (
    "accuracy",
    "f1",
    "auc",
    "jain",
    "precision",
    "recall",
    "iou",
    "r2",
    "utility",
)  # in the names of metrics of which more is better; of others less is
DIRECTION = re.compile("; (higher|lower) is better$")  # in the meaning of a metric that a user adds
UNDIRECTED = "; neither way is known to be better"
# In the names of those that say how clients differ.
SPREADS = ("median", "worst", "best", "variance", "jain", "absent", "unseen")


def fraction(metric: str) -> bool:
    """Is it a fraction that people read in per cent?"""
    return "accuracy" in metric and not metric.endswith(("variance", "jain"))


def rises(metric: str, meanings: Mapping[str, str] | None = None) -> bool:
    """Is more of it better? Its meaning says so of a metric that a user adds, where that is known; else its name."""
    if match := DIRECTION.search((meanings or {}).get(metric, "")):
        return match[1] == "higher"
    return any(word in metric.lower() for word in RISING) and not metric.endswith(("variance", "_cv"))


def validation_metric(columns: Iterable[str]) -> str | None:
    """The column by which a model may be chosen: the mean of the server's model on validation samples, its accuracy
    before its loss, that of clients' own models where there is no other; None where there are no such samples."""
    candidates = [name for name in columns if "validation_" in name and not any(word in name for word in SPREADS)]
    return min(
        candidates, key=lambda name: (not name.startswith(("global", "validation")), not rises(name)), default=None
    )
