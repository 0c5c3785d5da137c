"""Trajectories: turns that continue one another become training sequences, each sampled token in exactly one.

A report may reference one turn, a chain or a tree of turns. Every branch gives a sequence: the prompt and the sampled
ids of its last turn, which hold all turns before it. A turn that branches share trains in the first of them, in the
order of the report's references. Turns that are not referenced, and those that another branch trains, are context.

    a ── b ── c     references a, b, c, d:    a's prompt a ... b ... c     trains a, b and c
          └── d                               a's prompt a ... b ... d     trains d

A sample has one temperature, so turns of a branch that were sampled at different ones give a sequence for each, up to
the last turn of that temperature. What was rewritten, dropped or compacted between turns was recorded as a new branch
without a parent (see `receipts.record`), and so is a sequence of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select

from reef.errors import DamagedError
from reef.ledger.ancestors import PAGE, parents_of
from reef.ledger.receipts import UNREADABLE, sampling_from_json
from reef.ledger.schema import receipts, requests
from reef.types import Receipt, Sample, Turn

Turns = tuple[str, ...]  # receipts that train in one sequence, oldest first; the last one holds the whole of it


def plan(connection: Connection, references: Mapping[str, Sequence[str]]) -> dict[str, list[Turns]]:
    """The sequences of each report, from the receipts that it references (report id -> receipt ids).

    Raises:
        DamagedError: receipts continue one another in a circle, or their sampling cannot be read.
    """
    several = [receipt_id for named in references.values() if len(named) > 1 for receipt_id in named]
    parents = parents_of(connection, several)
    temperatures = _temperatures(connection, several)
    return {
        report_id: divide(named, parents, temperatures) if len(named) > 1 else [tuple(named)]
        for report_id, named in references.items()
    }


def divide(
    references: Sequence[str], parents: Mapping[str, str | None], temperatures: Mapping[str, float]
) -> list[Turns]:
    """Every reference in exactly one sequence, by the rules in the module's docstring; linear in the turns there are.

    Args:
        references: the receipts of one report, each once.
        parents: of the references and all their ancestors.
        temperatures: of the references.

    Raises:
        DamagedError: the references continue one another in a circle.
    """
    above = _nearest(references, parents)
    inner = set(above.values())
    taken: set[str] = set()
    found: list[Turns] = []
    for last in (receipt_id for receipt_id in references if receipt_id not in inner):
        by_temperature: dict[float, list[str]] = {}
        turn: str | None = last
        while turn is not None and turn not in taken:  # the turns above one that is taken are taken too
            taken.add(turn)
            by_temperature.setdefault(temperatures[turn], []).append(turn)
            turn = above[turn]
        found += [tuple(reversed(turns)) for turns in by_temperature.values()]
    if lost := [receipt_id for receipt_id in references if receipt_id not in taken]:
        raise DamagedError(lost[0], "its turns continue one another in a circle")
    return found


@dataclass(frozen=True, slots=True)
class Grade:
    """What a report says besides its score, and when it came. The fields outlive the deletion of its free text."""

    truncated: bool = False
    accepted_at: float = 0.0  # seconds since the epoch
    scores: Mapping[str, float] = field(default_factory=dict)  # of single turns, by receipt
    components: Mapping[str, float] = field(default_factory=dict)  # of the score, by name

    @classmethod
    def of(cls, body: Mapping[str, Any], accepted_at: float) -> "Grade":
        """From a report's stored body."""
        references = body.get("references", [])
        scores = body.get("reference_scores") or [None] * len(references)
        return cls(
            truncated=bool(body.get("truncated")),
            accepted_at=accepted_at,
            scores={name: score for name, score in zip(references, scores, strict=True) if score is not None},
            components=dict(body.get("rewards") or {}),
        )


def sample(rows: Sequence[Row[Any]], found: Mapping[str, Receipt], grade: Grade, lags: Mapping[str, int]) -> Sample:
    """One sequence from its rows of `batch_samples`, oldest turn first.

    Args:
        found: their receipts.
        grade: of their report.
        lags: by release, the policy updates between it and the one that is trained.

    Raises:
        DamagedError: the last turn's ids do not hold those of another.
    """
    members = [found[row.receipt_id] for row in rows]
    last, row = members[-1], rows[-1]
    tokens = np.concatenate([last.prompt_ids, last.generation.output_ids])
    mask = np.zeros(len(tokens), dtype=np.bool_)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    turns = []
    for receipt in members:
        ids, start = receipt.generation.output_ids, len(receipt.prompt_ids)
        end = start + len(ids)
        if not np.array_equal(tokens[start:end], ids):
            raise DamagedError(receipt.id, f"receipt {last.id}, trained with it as a later turn, does not continue it")
        mask[start:end] = True
        logprobs[start:end] = receipt.generation.logprobs
        turns.append(Turn(receipt.id, start, end, grade.scores.get(receipt.id, 0.0)))
    return Sample(
        report_id=row.report_id,
        receipt_id=last.id,
        group=row.group_key,
        reward=row.reward,
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        temperature=last.sampling.temperature,
        trains=row.trains,
        truncated=grade.truncated or last.generation.finish_reason == "length",
        turns=tuple(turns),
        lag=max((lags[span.release_id] for receipt in members for span in receipt.generation.spans), default=0),
        accepted_at=grade.accepted_at,
        components=grade.components,
    )


def _nearest(references: Sequence[str], parents: Mapping[str, str | None]) -> dict[str, str | None]:
    """Of each reference the next turn above it that is referenced too; None: there is none."""
    named = set(references)
    known: dict[str, str | None] = {}  # of every turn seen so far: itself where it is named, else the next above
    found: dict[str, str | None] = {}
    for receipt_id in references:
        passed = []
        turn = parents.get(receipt_id)
        while turn is not None and turn not in named and turn not in known:
            passed.append(turn)
            known[turn] = None  # so that a circle, which only damage makes, ends
            turn = parents.get(turn)
        nearest = turn if turn is None or turn in named else known[turn]
        known.update(dict.fromkeys(passed, nearest))
        found[receipt_id] = nearest
    return found


def _temperatures(connection: Connection, receipt_ids: Sequence[str]) -> dict[str, float]:
    query = select(receipts.c.id, requests.c.sampling).join(requests, requests.c.id == receipts.c.request_id)
    found: dict[str, float] = {}
    for start in range(0, len(receipt_ids), PAGE):
        for row in connection.execute(query.where(receipts.c.id.in_(receipt_ids[start : start + PAGE]))):
            try:
                found[row.id] = sampling_from_json(row.sampling).temperature
            except UNREADABLE as error:
                raise DamagedError(row.id, f"its sampling: {error}") from error
    return found
