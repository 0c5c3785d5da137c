"""Pairs of a score and whether the answer was right: from a file, or from a bank."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reef_harness.errors import HarnessError
from reef_harness.evaluation.bank import Bank
from reef_harness.evaluation.calibration import Calibration, mean_logprob_chance
from reef_harness.evaluation.table import counted, table

LOGPROB = "logprob"
NEARLY_ALL = 0.9  # of the answers: in one bin they hide what they differ in


@dataclass(frozen=True, slots=True)
class Pairs:
    """Scores, whether each answer was right, and to which item; ``left_out`` answers had no score, or no verdict."""

    scores: tuple[float, ...]
    right: tuple[bool, ...]
    items: tuple[str, ...]
    left_out: int = 0


def read_pairs(path: Path) -> Pairs:
    """Rows ``{score, correct, item?}`` of a JSONL file; one without item is to an item of its own.

    Raises HarnessError for a row that is none.
    """
    scores, right, items = [], [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError(f"got {type(row).__name__}")
                if lacking := [name for name in ("score", "correct") if name not in row]:
                    raise TypeError(f"there is no {' and no '.join(lacking)}")
                score, correct, item = row["score"], row["correct"], row.get("item")
                if isinstance(score, bool) or not isinstance(score, int | float) or not isinstance(correct, bool):
                    raise TypeError("score must be a number and correct true or false")
                scores.append(float(score))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise HarnessError(f"{path}:{number}: expected {{score, correct}}: {error}") from None
            right.append(correct)
            items.append(f"line {number}" if item is None else f"item {item}")
    if not scores:
        raise HarnessError(f"{path} has no rows")
    return Pairs(tuple(scores), tuple(right), tuple(items))


def pairs_of(bank: Bank, name: str, temperature: float, scorer: str, truth: str) -> Pairs:
    """The pairs of a set at a temperature: scores by ``scorer``, a grader (id@version) or "logprob", against ``truth``.

    "logprob" is exp of the mean log-probability of the answer's tokens. Raises HarnessError where nothing has a score.
    """
    right = {verdict.key: verdict.correct for verdict in bank.verdicts(name, truth) if verdict.graded}
    responses = [response for response in bank.responses(name) if response.temperature == temperature]
    if scorer == LOGPROB:
        scored = {
            each.key: mean_logprob_chance(each.logprob_sum, each.completion_tokens)
            for each in responses
            if each.logprob_sum is not None and each.completion_tokens
        }
        if not scored:
            raise HarnessError(f"{bank.path}: {name} was sampled without log-probabilities (evaluate --logprobs)")
    else:
        scored = {each.key: each.score for each in bank.verdicts(name, scorer) if each.score is not None}
    keys = [response.key for response in responses if response.key in right and response.key in scored]
    if not keys:
        raise HarnessError(f"{bank.path}: no answer to {name} has both a score by {scorer} and a verdict by {truth}")
    return Pairs(
        tuple(scored[key] for key in keys),
        tuple(right[key] for key in keys),
        tuple(item for item, *_ in keys),
        len(responses) - len(keys),
    )


def text_of(found: Calibration, pairs: Pairs, title: str, *, equal_counts: bool = False) -> str:
    """The numbers, the table behind the diagram, and what a reader must know."""
    digits = _digits({edge for each in found.bins for edge in (each.low, each.high)})
    rows = [
        (
            f"{each.low:.{digits}f} to {each.high:.{digits}f}",
            str(each.count),
            str(each.items),
            f"{each.mean_score:.{digits}f}",
            f"{each.share_right:.3f} [{each.share_low:.3f}, {each.share_high:.3f}]",
        )
        for each in found.bins
    ]
    remarks = [f"{counted(pairs.left_out, 'answer')} without a score or a verdict: left out."] if pairs.left_out else []
    if not equal_counts and (inside := _in_one_bin(found, pairs)):
        remarks.append(f"{inside} of {found.pairs} answers are in one bin: --equal-counts shows more.")
    within = f" + within bins {found.within:+.4f}" if abs(found.within) >= 5e-5 else ""
    return (
        f"# {title}\n\n"
        f"{found.pairs} answers. Brier score {found.brier:.4f} = reliability {found.reliability:.4f} - resolution "
        f"{found.resolution:.4f} + uncertainty {found.uncertainty:.4f}{within}. "
        f"Expected calibration error {found.calibration_error:.4f}.\n\n"
        + table(("score", "answers", "items", "mean score", "share right"), rows)
        + ("\n" if remarks else "")
        + "".join(f"- {remark}\n" for remark in remarks)
    )


def _digits(edges: Iterable[float]) -> int:
    """As many as tell the edges apart, from 3 to 6."""
    apart = set(edges)
    return next((digits for digits in range(3, 6) if len({f"{edge:.{digits}f}" for edge in apart}) == len(apart)), 6)


def _in_one_bin(found: Calibration, pairs: Pairs) -> int:
    """How many answers the fullest bin has, where these are nearly all and their scores differ; else 0."""
    fullest = max(found.bins, key=lambda each: each.count)
    scores = {score for score in pairs.scores if fullest.low <= score <= fullest.high}
    return fullest.count if fullest.count >= NEARLY_ALL * found.pairs and len(scores) > 1 else 0
