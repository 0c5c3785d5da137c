"""Test-time compute: more tokens for one answer, counted."""

from reef_harness.compute.asker import Asker, Budget, Sample
from reef_harness.compute.beam import Beam, Partial, beam_search
from reef_harness.compute.best_of import best_of
from reef_harness.compute.consistency import self_consistency
from reef_harness.compute.outcome import Candidate, Outcome, Spent
from reef_harness.compute.revision import Changes, changes, revise
from reef_harness.compute.routing import knee, route, share_out
from reef_harness.compute.run import Row, rows_table, run_each, seed_of, summarize
from reef_harness.compute.scores import (
    SequenceScore,
    by_judge,
    by_logprob_mean,
    by_logprob_sum,
    by_verifier,
    sequence_score,
)
from reef_harness.compute.votes import Votes

__all__ = [
    "Asker",
    "Beam",
    "Budget",
    "Candidate",
    "Changes",
    "Outcome",
    "Partial",
    "Row",
    "Sample",
    "SequenceScore",
    "Spent",
    "Votes",
    "beam_search",
    "best_of",
    "by_judge",
    "by_logprob_mean",
    "by_logprob_sum",
    "by_verifier",
    "changes",
    "knee",
    "revise",
    "route",
    "rows_table",
    "run_each",
    "seed_of",
    "self_consistency",
    "sequence_score",
    "share_out",
    "summarize",
]
