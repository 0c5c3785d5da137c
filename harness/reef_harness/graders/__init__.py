"""Graders: text in, a verdict out."""

from reef_harness.graders.base import Grader, Outcome, Verdict
from reef_harness.graders.final import FinalGrader

__all__ = ["FinalGrader", "Grader", "Outcome", "Verdict"]
