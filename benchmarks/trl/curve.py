"""Held-out accuracy over wall clock, from weights on disk: measured after the run, for both sides by the same code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from recipes.arithmetic.pretrain import grade, sample
from recipes.arithmetic.task import held_out_set

STEPS_OF_A_PROBLEM = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights that a run made. `seconds` and `rollouts` count from its first rollout."""

    step: int
    seconds: float
    rollouts: int
    path: Path


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot's held-out accuracy."""

    step: int
    seconds: float
    rollouts: int
    accuracy: float


Curve = list[Point]
"""In order of time; the first point is the untrained model, at 0 seconds."""


def measure(model: Path, snapshots: Sequence[Snapshot], num_problems: int) -> Curve:
    """One answer at temperature 1 to each of the same problems, by the model and by every snapshot."""
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return [
        Point(s.step, s.seconds, s.rollouts, accuracy(s.path, tokenizer, num_problems))
        for s in (Snapshot(0, 0.0, 0, model), *snapshots)
    ]


def accuracy(path: Path, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> float:
    """Share of held-out problems that the weights at `path` answer right; the same weights give the same share."""
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    problems = held_out_set(STEPS_OF_A_PROBLEM, num_problems)
    torch.manual_seed(0)
    answers = sample(model, tokenizer, problems, 1)
    verdicts = [grade(problem, answer[0]) for problem, answer in zip(problems, answers, strict=True)]
    return sum(verdict.correct for verdict in verdicts) / num_problems


def reaches(curve: Curve, gain: float) -> Point | None:
    """The first point that is better than the untrained model by `gain`."""
    return next((point for point in curve if point.accuracy >= curve[0].accuracy + gain), None)


def at(curve: Curve, seconds: float) -> Point | None:
    """The last point by then; None where the run had ended before."""
    if curve[-1].seconds < seconds:
        return None
    return [point for point in curve if point.seconds <= seconds][-1]
