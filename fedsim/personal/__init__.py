"""How good a client's own predictor is: three models for each client, judged on its own validation samples."""

from fedsim.personal.columns import PERSONAL_COLUMNS
from fedsim.personal.evaluator import PersonalEvaluator
from fedsim.personal.newcomers import Newcomers
from fedsim.personal.options import Personal

__all__ = ["PERSONAL_COLUMNS", "Newcomers", "Personal", "PersonalEvaluator"]
