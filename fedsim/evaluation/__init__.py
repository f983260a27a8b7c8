"""Evaluation of the current models: on the test set, and on every client's own data."""

from fedsim.evaluation.columns import COLUMN_DESCRIPTIONS
from fedsim.evaluation.evaluated_models import EvaluatedModels
from fedsim.evaluation.evaluator import Evaluator
from fedsim.evaluation.measured import EvaluationResult
from fedsim.evaluation.options import EvaluationOptions

__all__ = ["COLUMN_DESCRIPTIONS", "EvaluatedModels", "EvaluationOptions", "EvaluationResult", "Evaluator"]
