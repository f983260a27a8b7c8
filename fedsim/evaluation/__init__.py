"""Evaluation of the current models: on the test set, and on every client's own data."""

from fedsim.evaluation.columns import COLUMNS
from fedsim.evaluation.evaluated_models import EvaluatedModels
from fedsim.evaluation.evaluator import Evaluator
from fedsim.evaluation.measured import Measured
from fedsim.evaluation.options import EvaluationOptions

__all__ = ["COLUMNS", "EvaluatedModels", "EvaluationOptions", "Evaluator", "Measured"]
