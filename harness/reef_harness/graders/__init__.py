"""Graders: text in, a verdict out."""

from reef_harness.graders.base import BadGold, Grader, Outcome, Verdict
from reef_harness.graders.boxed import BoxedGrader
from reef_harness.graders.choice import ChoiceGrader
from reef_harness.graders.final import FinalGrader
from reef_harness.graders.named import grader_of
from reef_harness.graders.number import NumberGrader

__all__ = [
    "BadGold",
    "BoxedGrader",
    "ChoiceGrader",
    "FinalGrader",
    "Grader",
    "NumberGrader",
    "Outcome",
    "Verdict",
    "grader_of",
]
