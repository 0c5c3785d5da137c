"""Pairs of a score and whether the answer was right: from a file, or from a bank."""

import json
from dataclasses import dataclass
from pathlib import Path

from reef_harness.errors import HarnessError
from reef_harness.evaluation.bank import Bank
from reef_harness.evaluation.calibration import Calibration, mean_logprob_chance
from reef_harness.evaluation.table import table

LOGPROB = "logprob"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Scores, and whether each answer was right; ``left_out`` answers had no score, or no verdict.

    ``several``: there are several answers to an item, which are not independent.
    """

    scores: tuple[float, ...]
    right: tuple[bool, ...]
    left_out: int = 0
    several: bool = False


def read_pairs(path: Path) -> Pairs:
    """Rows ``{score, correct}`` of a JSONL file. Raises HarnessError for a row that is none."""
    scores, right = [], []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                score, correct = row["score"], row["correct"]
                if isinstance(score, bool) or not isinstance(score, int | float) or not isinstance(correct, bool):
                    raise TypeError("score must be a number and correct true or false")
            except (ValueError, KeyError, TypeError) as error:
                raise HarnessError(f"{path}:{number}: expected {{score, correct}}: {error}") from None
            scores.append(float(score))
            right.append(correct)
    if not scores:
        raise HarnessError(f"{path} has no rows")
    return Pairs(tuple(scores), tuple(right))


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
    several = len({item for item, *_ in keys}) < len(keys)
    return Pairs(
        tuple(scored[key] for key in keys), tuple(right[key] for key in keys), len(responses) - len(keys), several
    )


def text_of(found: Calibration, pairs: Pairs, title: str) -> str:
    """The numbers, the table behind the diagram, and what a reader must know."""
    rows = [
        (
            f"{each.low:.3f} to {each.high:.3f}",
            str(each.count),
            f"{each.mean_score:.3f}",
            f"{each.share_right:.3f} [{each.share_low:.3f}, {each.share_high:.3f}]",
        )
        for each in found.bins
    ]
    within = f" + within bins {found.within:+.4f}" if abs(found.within) >= 5e-5 else ""
    return (
        f"# {title}\n\n"
        f"{found.pairs} answers. Brier score {found.brier:.4f} = reliability {found.reliability:.4f} - resolution "
        f"{found.resolution:.4f} + uncertainty {found.uncertainty:.4f}{within}. "
        f"Expected calibration error {found.calibration_error:.4f}.\n\n"
        + table(("score", "answers", "mean score", "share right"), rows)
        + "".join(f"\n- {remark}\n" for remark in _remarks(pairs))
    )


def _remarks(pairs: Pairs) -> list[str]:
    found = []
    if pairs.left_out:
        found.append(f"{pairs.left_out} answers have no score or no verdict: left out.")
    if pairs.several:
        found.append("Several answers are to one item; the intervals take them as independent, so they are too narrow.")
    return found
