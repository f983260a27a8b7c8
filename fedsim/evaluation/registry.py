"""The vocabulary of metrics: each quantity has one entry that defines all its names. The key is the column of
metrics.csv. Pictures and LaTeX tables show the label, TensorBoard the tag (a group before the column), metrics.csv and
the reference page the description. `describe` also accepts derived columns: those of a further model
(`client_mean_test_loss`), of a spread over clients (`test_accuracy_by_client_jain`) and of a user's metric
(`test_f1_score`). Means over clients have the weights of the strategy's objective: equal, or proportional to data with
weighting=data; this also holds for the optimum and the reference points. A client's samples have equal weights, except
for importance weights of a shift. Test metrics weight samples equally, except for those by client, which weight natural
clients equally. Columns of validation samples and of clients' own models (`fedsim.evaluation.personal`) always weight
clients equally.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedsim.evaluation.spread import TENTH_PERCENT, WORST_OR_BEST_PATTERN

HIGHER, LOWER = "higher", "lower"
EVALUATED_MODEL_DESCRIPTIONS = {
    "global": "the server's model",
    "client_mean": "the mean of all clients' models",
    "calibrated": "the server's model with a calibrated last layer (CCVR)",
}  # models that can be evaluated
PERSONAL_MODELS = {
    "global": "the server's model",
    "localized": "the client's start row after the local (or plain) steps of the next round, discarded afterwards",
    "personal": "the client's personal model: that of its local rule, or else the one that the strategy stores",
}
MODEL_LABELS = {
    "global": "server's model",
    "client_mean": "mean of all clients' models",
    "calibrated": "server's model, calibrated",
    "localized": "localized models",
    "personal": "personal models",
}
NEWCOMER_PREFIX = "newcomers "  # prefix of a metric of newcomers
DIRECTION_PATTERN = re.compile("; (higher|lower) is better$")  # in the description of a user's metric
UNKNOWN_DIRECTION_TEXT = "; whether higher or lower is better is not known"
# In the names of users' metrics without description: higher is better; for all others, lower is.
HIGHER_IS_BETTER_WORDS = ("accuracy", "f1", "auc", "jain", "precision", "recall", "iou", "r2", "utility")


@dataclass(frozen=True)
class MetricDescription:
    """The names and the description of a metric.

    Attributes:
        column: its key in metrics.csv, on the command line, in `Run.frame` and in Weights & Biases, MLflow and trackio.
        label: its name in pictures, reports and LaTeX tables.
        description: one sentence, also in the header of metrics.csv.
        group: group of TensorBoard tags; '' if no curve is drawn.
        better: 'higher' or 'lower'; None if unknown.
        unit: unit in figures and tables: '%', 's', 'bytes'; '' for a plain number.
    """

    column: str
    label: str
    description: str
    group: str = ""
    better: str | None = None
    unit: str = ""

    @property
    def tag(self) -> str | None:
        """The TensorBoard tag; None if no curve is drawn."""
        return f"{self.group}/{self.column}" if self.group else None

    @property
    def heading(self) -> str:
        """The label with its unit, on an axis and above a column."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _loss_description(column: str, label: str, description: str) -> MetricDescription:
    return MetricDescription(column, label, description, "loss", LOWER)


def _accuracy_description(column: str, label: str, description: str) -> MetricDescription:
    return MetricDescription(column, label, description, "accuracy", HIGHER, "%")


def _distance_description(column: str, label: str, description: str) -> MetricDescription:
    return MetricDescription(column, label, description, "distance", LOWER)


def _metric_by_column(*metrics: MetricDescription) -> dict[str, MetricDescription]:
    return {metric.column: metric for metric in metrics}


OVER_CLIENTS, WORST_DECILE_LABEL = ", mean over clients", "worst tenth of clients"  # in labels
PROGRESS_COLUMNS = _metric_by_column(
    MetricDescription("round", "round", "completed rounds; 0 is the initial model"),
    MetricDescription("seed", "seed", "seed of the replicate"),
)
MODEL_METRICS = _metric_by_column(
    _loss_description(
        "test_loss",
        "test loss",
        "mean loss of the evaluated model on the test set, whose samples do not react to the model",
    ),
    _accuracy_description(
        "test_accuracy",
        "test accuracy",
        "fraction of the test set classified correctly; its samples do not react to the model",
    ),
    _accuracy_description(
        "test_accuracy_by_client",
        "test accuracy, mean over clients",
        "mean over clients of the accuracy on the client's own held-out test samples",
    ),
    _accuracy_description(
        "test_accuracy_by_client_worst10",
        f"test accuracy, {WORST_DECILE_LABEL}",
        "its mean over the tenth of the clients with the lowest accuracies",
    ),
    _loss_description(
        "test_loss_by_client",
        "test loss, mean over clients",
        "mean over clients of the mean loss on the client's own held-out test samples",
    ),
    _loss_description(
        "test_loss_by_client_worst10",
        f"test loss, {WORST_DECILE_LABEL}",
        "its mean over the tenth of the clients with the highest losses",
    ),
    _loss_description(
        "validation_loss",
        "validation loss, mean over clients",
        "mean over clients of the loss on the client's own validation samples",
    ),
    _loss_description(
        "validation_loss_worst10",
        f"validation loss, {WORST_DECILE_LABEL}",
        "its mean over the tenth of the clients with the highest losses",
    ),
    _accuracy_description(
        "validation_accuracy",
        "validation accuracy, mean over clients",
        "mean over clients of the accuracy on the client's own, shifted, validation samples",
    ),
    _accuracy_description(
        "validation_accuracy_worst10",
        f"validation accuracy, {WORST_DECILE_LABEL}",
        "its mean over the tenth of the clients with the lowest accuracies",
    ),
    _loss_description(
        "train_loss",
        "training loss, mean over clients",
        "mean over clients of the mean loss on (a subsample of) the client's own, shifted, data",
    ),
    _accuracy_description(
        "train_accuracy",
        "training accuracy, mean over clients",
        "mean over clients of the accuracy on (a subsample of) the client's own, shifted, data",
    ),
    _accuracy_description(
        "client_accuracy_worst10",
        f"training accuracy, {WORST_DECILE_LABEL}",
        "mean of the lowest tenth of the clients' accuracies on (a subsample of) their own training data",
    ),
    _distance_description(
        "distance_to_optimum",
        "distance to the optimum",
        "Euclidean distance of the evaluated model to the closed-form optimum, ridge included",
    ),
    _loss_description(
        "performative_loss",
        "performative loss",
        "equal to train_loss: the loss of the evaluated model on the data that it induces",
    ),
    _loss_description(
        "performative_risk",
        "performative risk",
        "performative_loss plus the ridge penalty λ/2 ‖θ‖²; θ^PO minimises it",
    ),
    _loss_description(
        "decoupled_loss",
        "decoupled loss",
        "loss of the evaluated model on data induced by the last deployed model: the server's model before the last "
        "round, or the model determined by shift.inertia or shift.redraw",
    ),
    _distance_description(
        "distance_to_ps",
        "distance to θ^PS",
        "Euclidean distance of the evaluated model to the performatively stable point",
    ),
    _distance_description(
        "distance_to_po",
        "distance to θ^PO",
        "Euclidean distance of the evaluated model to the performatively optimal point",
    ),
    _distance_description(
        "tracking_error",
        "tracking error",
        "Euclidean distance of the evaluated model to the minimiser of the risk on the data of the current round, or "
        "with a shift to the performatively stable point of these data, if the data drift",
    ),
    _distance_description(
        "distance_to_nash",
        "distance to the Nash equilibrium",
        "Euclidean distance of the evaluated model, all players' decisions, to their Nash equilibrium",
    ),
)
DISTANCE_COLUMNS = (
    "distance_to_optimum",
    "distance_to_ps",
    "distance_to_po",
    "tracking_error",
    "distance_to_nash",
)  # on logarithmic axes
OVER_TIME = _metric_by_column(  # sums over rounds, of data that drift
    _loss_description(
        "dynamic_regret",
        "dynamic regret",
        "sum over rounds of the (performative) risk of the evaluated model on the data of the round minus the lowest "
        "risk on these data; a round that is not evaluated counts like the next one that is",
    ),
)
REGRET = "dynamic_regret"
WORK_COLUMNS = _metric_by_column(
    MetricDescription(
        "active_clients",
        "participating clients",
        "number of clients that participated in the last round",
        "participation",
    ),
    MetricDescription(
        "mean_active_clients",
        "participating clients, mean over rounds",
        "the same, averaged over the rounds since the previous row",
        "participation",
    ),
    MetricDescription(
        "bytes_down",
        "sent to clients in a round",
        "bytes that the server sent to clients in the last round",
        "bytes",
        LOWER,
        "bytes",
    ),
    MetricDescription(
        "bytes_up",
        "sent to the server in a round",
        "bytes that clients sent to the server in the last round",
        "bytes",
        LOWER,
        "bytes",
    ),
    MetricDescription(
        "total_bytes_down",
        "sent to clients",
        "bytes that the server has sent to clients so far",
        "bytes",
        LOWER,
        "bytes",
    ),
    MetricDescription(
        "total_bytes_up",
        "sent to the server",
        "bytes that clients have sent to the server so far",
        "bytes",
        LOWER,
        "bytes",
    ),
    MetricDescription("samples", "training samples", "training samples this replicate has processed so far"),
    MetricDescription(
        "seconds", "wall time", "wall time of training and evaluation so far, resumed parts included", "", LOWER, "s"
    ),
)
CLOCK_COLUMNS = _metric_by_column(  # with a clock
    MetricDescription(
        "virtual_seconds", "virtual seconds", "virtual seconds so far, by the run's clock", "time", LOWER
    ),
    MetricDescription(
        "late_clients",
        "late clients",
        "clients that received the model in the last round but were not included in its aggregation",
        "participation",
        LOWER,
    ),
    MetricDescription(
        "joules",
        "energy",
        "energy that the clients spent on local steps and transfers so far, by the power of their devices",
        "time",
        LOWER,
        "J",
    ),
    MetricDescription(
        "update_staleness",
        "staleness of updates",
        "server updates between the start of a client and the use of its update: mean over the updates used since the "
        "last evaluation, in asynchronous runs of clock=events",
        "participation",
        LOWER,
        "rounds",
    ),
)
STALENESS_COLUMN, ENERGY_COLUMN = "update_staleness", "joules"
DIAGNOSTICS = _metric_by_column(  # requested by `diagnostics`
    MetricDescription(
        "performative_power",
        "performative power",
        "how far the evaluated model moves the clients' data: mean over clients of the mean distance between a sample "
        "under this model and under the zero model",
        "diagnostics",
    ),
    MetricDescription(
        "stability_gap",
        "stability gap",
        "distance of the evaluated model to the minimiser on the data that it induces; 0 at θ^PS",
        "diagnostics",
        LOWER,
    ),
    MetricDescription(
        "client_drift",
        "client drift",
        "distance between a client's model after local training and the server's model at the start of the round: "
        "mean over the clients that participated in the last round",
        "diagnostics",
    ),
    MetricDescription(
        "present_clients",
        "clients present",
        "number of clients that have joined and have not left for good",
        "diagnostics",
    ),
    MetricDescription(
        "staleness_mean",
        "staleness, mean over clients",
        "rounds since a client last participated (since round 0 for clients that have not participated): mean over "
        "clients",
        "diagnostics",
        LOWER,
        "rounds",
    ),
    MetricDescription(
        "staleness_max",
        "staleness, largest of a client",
        "the same for the client with the longest absence",
        "diagnostics",
        LOWER,
        "rounds",
    ),
    MetricDescription(
        "availability_normalised_utility",
        "availability-normalised utility",
        "mean over clients of the decrease of the loss on (a subsample of) the client's own, shifted, data since "
        "round 0, divided by the number of rounds in which the client was available",
        "diagnostics",
        HIGHER,
    ),
    MetricDescription(
        "availability_normalised_utility_cv",
        "availability-normalised utility, coefficient of variation over clients",
        "its coefficient of variation over clients: standard deviation divided by the mean",
        "diagnostics",
        LOWER,
    ),
)
PERSONAL_MEASURES = _metric_by_column(  # of each of PERSONAL_MODELS
    MODEL_METRICS["validation_loss"],
    _loss_description("validation_loss_median", "validation loss, median over clients", "its median over clients"),
    MODEL_METRICS["validation_loss_worst10"],
    MODEL_METRICS["validation_accuracy"],
    _accuracy_description(
        "validation_accuracy_median", "validation accuracy, median over clients", "its median over clients"
    ),
    MODEL_METRICS["validation_accuracy_worst10"],
    _loss_description(
        "training_loss",
        "training loss, unweighted mean over clients",
        "mean over clients of the loss on (a subsample of) the client's own training samples",
    ),
)
VALIDATED_CLIENTS_METRIC = MetricDescription(
    "validated_clients",
    "validated clients",
    "number of clients in the means over clients of validation scores: only participants of the last round if "
    "personal.over=online, only those that no attack makes Byzantine if personal.over=honest",
    "participation",
)


def columns_of_other_model(model: str, columns: Iterable[str]) -> dict[str, str]:
    """The columns of an additional evaluated model: column → its name for this model."""
    return {name: f"{model}_{name}" for name in columns}


def _model_metric_descriptions(
    model: str, models: Mapping[str, str], metrics: Mapping[str, MetricDescription]
) -> dict[str, MetricDescription]:
    """The metrics of a further model, by their columns."""
    personal = model in PERSONAL_MODELS and model not in EVALUATED_MODEL_DESCRIPTIONS
    return {
        column: dataclasses.replace(
            metrics[base_column],
            column=column,
            label=f"{metrics[base_column].label.removesuffix(OVER_CLIENTS if personal else '')}, {MODEL_LABELS[model]}",
            description=f"{metrics[base_column].description}, of {models[model]}",
        )
        for base_column, column in columns_of_other_model(model, metrics).items()
    }


EVALUATED_MODEL_METRICS = MODEL_METRICS | {
    name: column
    for model in EVALUATED_MODEL_DESCRIPTIONS
    for name, column in _model_metric_descriptions(model, EVALUATED_MODEL_DESCRIPTIONS, MODEL_METRICS).items()
}
PERSONAL_MODEL_METRICS = {
    name: column
    for model in PERSONAL_MODELS
    for name, column in _model_metric_descriptions(model, PERSONAL_MODELS, PERSONAL_MEASURES).items()
} | _metric_by_column(VALIDATED_CLIENTS_METRIC)
METRICS = (
    PROGRESS_COLUMNS
    | EVALUATED_MODEL_METRICS
    | OVER_TIME
    | PERSONAL_MODEL_METRICS
    | WORK_COLUMNS
    | CLOCK_COLUMNS
    | DIAGNOSTICS
)

_MODEL_PREFIX_PATTERN = re.compile(rf"(?:({'|'.join(MODEL_LABELS)})_)?(.+)")
_SPREAD_PATTERN = re.compile(
    rf"(?:test_(\w+)_by_client|(validation)_(\w+)|(client)_(\w+))_(variance|jain|absent|unseen|present|departed|median|{WORST_OR_BEST_PATTERN.pattern})"
)
_USER_METRIC_PATTERN = re.compile(r"(test|train|validation)_(\w+)")  # columns of users' metrics
_SPREAD_LABELS = {
    "variance": "variance over clients",
    "jain": "Jain's index over clients",
    "absent": "clients absent in the last round",
    "unseen": "clients that never participated",
    "present": "clients present",
    "departed": "clients that have left",
    "median": "median over clients",
    f"worst{TENTH_PERCENT}": WORST_DECILE_LABEL,
    f"best{TENTH_PERCENT}": WORST_DECILE_LABEL.replace("worst", "best"),
}


def describe_metric(column: str, column_descriptions: Mapping[str, str] | None = None) -> MetricDescription:
    """The entry of a column, of 'newcomers COLUMN', and of 'personal_… or localized_…'.

    Args:
        column: as in metrics.csv.
        column_descriptions: descriptions of a run's columns (`fedsim.studies.results.runs.Run.meanings`), which define
            users' metrics and their direction.
    """
    column_descriptions = column_descriptions or {}
    if column.startswith(NEWCOMER_PREFIX):
        entry = describe_metric(column.removeprefix(NEWCOMER_PREFIX), column_descriptions)
        return dataclasses.replace(entry, column=column, label=f"{entry.label}, newcomers")
    names = column.split(" or ")
    if len(names) > 1:
        entry = describe_metric(re.sub("^(personal|localized)_", "", names[0]), column_descriptions)
        label = f"{entry.label.removesuffix(OVER_CLIENTS)}, clients' own models"
        return dataclasses.replace(entry, column=column, label=label)
    if column in METRICS:
        return METRICS[column]
    entry = _derived_metric_description(column)
    column_description = column_descriptions.get(column, "")
    if direction := DIRECTION_PATTERN.search(column_description):
        entry = dataclasses.replace(entry, better=direction[1])
    elif column_description.endswith(UNKNOWN_DIRECTION_TEXT):
        entry = dataclasses.replace(entry, better=None)
    return dataclasses.replace(entry, description=column_description or entry.description)


def _derived_metric_description(column: str) -> MetricDescription:
    """The entry of a further model, of a spread over clients, or of a user's metric."""
    match = _MODEL_PREFIX_PATTERN.fullmatch(column)
    model, name = match.groups() if match else (None, column)
    better_direction, unit = HIGHER if _rises_by_name(column) else LOWER, "%" if _is_share_by_name(column) else ""
    entry = MetricDescription(column, name.replace("_", " "), "", "metrics", better_direction, unit)
    if name in DIAGNOSTICS:
        entry = dataclasses.replace(DIAGNOSTICS[name], column=column)
    elif spread := _SPREAD_PATTERN.fullmatch(name):
        of_test, _, of_validation, _, of_training, kind, share, per_cent = spread.groups()
        samples = "test" if of_test else "validation" if of_validation else "training"
        quantity = of_test or of_validation or of_training
        client_share = _SPREAD_LABELS.get(kind) or f"{share} {per_cent} % of clients"
        entry = dataclasses.replace(
            entry,
            label=f"{samples} {quantity.replace('_', ' ')}, {client_share}",
            group="diagnostics" if quantity in ("loss", "accuracy") else quantity,
        )
    elif user_metric_match := _USER_METRIC_PATTERN.fullmatch(name):
        samples = "training" if user_metric_match[1] == "train" else user_metric_match[1]
        entry = dataclasses.replace(
            entry, label=f"{samples} {user_metric_match[2].replace('_', ' ')}", group=user_metric_match[2]
        )
    return dataclasses.replace(entry, label=f"{entry.label}, {MODEL_LABELS[model]}") if model else entry


def _rises_by_name(column: str) -> bool:
    return any(name_part in column.lower() for name_part in HIGHER_IS_BETTER_WORDS) and not column.endswith(
        ("variance", "_cv")
    )


def _is_share_by_name(column: str) -> bool:
    return "accuracy" in column and not column.endswith(("variance", "jain"))
