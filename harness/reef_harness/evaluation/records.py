"""Answers as they came, a JSON line each: kept first, then graded, and graded again without sampling again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Response:
    """One answer to one item, or the error in its place (then ``text`` and what is known of it are None).

    ``sample`` counts the answers to one item from 0; ``logprob_sum`` is over ``completion_tokens`` sampled tokens, None
    where it was not asked for.
    """

    item: str
    sample: int
    seed: int
    temperature: float
    release: str | None = None
    receipt: str | None = None
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprob_sum: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Graded:
    """A response's verdict, without the response: a line of a grader's file beside the responses."""

    item: str
    sample: int
    outcome: str
    score: float | None
    reason_code: str
    format_valid: bool
    grader: str
    version: str
    detail: str = ""
