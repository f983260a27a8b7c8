"""Evaluation of clients' own models: three models per client, scored on its own validation samples."""

from fedsim.evaluation.personal.evaluator import PersonalEvaluator
from fedsim.evaluation.personal.newcomers import NewcomerEvaluator
from fedsim.evaluation.personal.options import Personal
from fedsim.evaluation.personal.scores import PERSONAL_COLUMNS

__all__ = ["PERSONAL_COLUMNS", "NewcomerEvaluator", "Personal", "PersonalEvaluator"]
