"""Evaluation: numbers about releases that can be trusted."""

from reef_harness.evaluation.evaluate import Answer, Evaluation, evaluate
from reef_harness.evaluation.intervals import wilson

__all__ = ["Answer", "Evaluation", "evaluate", "wilson"]
