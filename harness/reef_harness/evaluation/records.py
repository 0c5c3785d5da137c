"""Answers as they came, a JSON line each: kept first, then graded, and graded again without sampling again."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from reef_harness.errors import HarnessError

Key = tuple[str, float, int]  # item, temperature, sample


@dataclass(frozen=True, slots=True)
class Response:
    """One answer to one item, or the error in its place (then ``text`` is None, or the part that came).

    ``sample`` counts the answers to one item at one temperature from 0; temperature 0 is greedy. ``logprob_sum`` is
    over ``completion_tokens`` sampled tokens, None where it was not asked for.
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

    @property
    def is_answer(self) -> bool:
        """Whether there is a whole text that can be graded."""
        return self.error is None and self.text is not None

    @property
    def key(self) -> Key:
        """Which answer it is: a later line with the same key takes the place of an earlier one."""
        return (self.item, self.temperature, self.sample)


@dataclass(frozen=True, slots=True)
class Graded:
    """A response's verdict, without the response: a line of a grader's file beside the responses.

    ``answer`` is what the grader read, in a form in which equal answers are equal text; None: it reads none, or the
    response was cut.
    """

    item: str
    sample: int
    temperature: float
    outcome: str
    score: float | None
    reason_code: str
    format_valid: bool
    grader: str
    version: str
    detail: str = ""
    answer: str | None = None

    @property
    def key(self) -> Key:
        """The key of the response."""
        return (self.item, self.temperature, self.sample)

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.outcome == "correct"

    @property
    def graded(self) -> bool:
        """Whether the answer was judged: a verdict of review or error is none."""
        return self.score is not None


Record = TypeVar("Record", Response, Graded)


class RecordFile:
    """Appends records to a JSONL file, each written when :meth:`add` returns. Use as ``with RecordFile(path) as file``.

    A last line that a crash cut off is removed first.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, record: Response | Graded) -> None:
        """Append one record."""
        self._file.write(_line(record))
        self._file.flush()


def read_responses(path: Path) -> list[Response]:
    """The responses of a file, in order; of several with one key the last. No file: none. Raises HarnessError."""
    return _read(path, Response)


def read_graded(path: Path) -> list[Graded]:
    """The verdicts of a file, in order. No file: none. Raises HarnessError for a line that is none."""
    return _read(path, Graded)


def write_graded(path: Path, graded: Iterable[Graded]) -> None:
    """Write a file of verdicts anew: it is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text("".join(_line(record) for record in graded), encoding="utf-8")
    unfinished.replace(path)


def _line(record: Response | Graded) -> str:
    return json.dumps(asdict(record)) + "\n"


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _read(path: Path, kind: type[Record]) -> list[Record]:
    if not path.exists():
        return []
    found: dict[Key, Record] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what is behind the last newline was cut off by a crash
        try:
            record = kind(**_known(json.loads(line), kind))
        except (ValueError, TypeError) as error:
            raise HarnessError(f"{path}:{number}: not a {kind.__name__}: {error}") from None
        found.pop(record.key, None)
        found[record.key] = record
    return list(found.values())


def _known(row: Any, kind: type[Record]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if not isinstance(row, dict) or set(row) - names:
        raise ValueError(f"expected an object with {', '.join(sorted(names))}")
    return row
