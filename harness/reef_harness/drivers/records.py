"""What a driver did, a JSON line each: it is read back after a restart, and nothing is reported twice or forgotten.

    {"event": "run", "driver": "groups", "run": "5f1c...", ...settings}    the first line
    {"event": "answered", ...the rollout, "report": its id, "asked"}       graded; written before it is reported
    {"event": "reported", "item", "occurrence", "index", "report"}         the service acknowledged the report
    {"event": "failed", ...the rollout, "error", "asked"}                  not sampled, not graded, or not reported
    {"event": "settled", "item", "occurrence", "state", "release", "step"} the service used it; nothing is waited for

A report's id is made of the run's and the receipt's. So whoever dies between the service's acknowledgement and the line
that says so reports the same again, under the same id, and the service answers what it has. Lines are handed to the
operating system at once and not synced: they survive the death of this process (kill -9 too), not that of the machine.
After that the last lines may be missing; then those prompts are answered once more, with receipts of their own. No
receipt is ever graded twice.

``asked`` is a digest of the item. One that changed between two lives is refused: its old answers and its new ones would
be compared with each other in one group. One that was found to have no gold, or none that can be read, is not asked
again before it changed.
"""

import fcntl
import hashlib
import json
import os
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from reef_harness.errors import WrongRecords
from reef_harness.types import Item, Json, ReportState

Key = tuple[str, int]  # an item's id, and the how-manieth time that it is answered, from 0
GOLDLESS = frozenset({"no_gold", "bad_gold"})  # reason codes: no answer to the item can be graded


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer and what became of it. ``error`` is set where it was not graded or not reported.

    ``num_tokens`` were sampled; of a request for several answers it is their mean, all that the service tells. A
    verdict of review or error has no ``score``: its report says so and never trains.
    """

    item: str
    occurrence: int  # the how-manieth time that the item was answered, from 0
    index: int  # within its group
    group: str | None = None
    error: str | None = None
    receipt: str | None = None
    release: str | None = None  # that answered
    finish_reason: str | None = None
    text: str | None = None
    num_tokens: float | None = None
    score: float | None = None
    outcome: str | None = None
    reason_code: str | None = None
    grader: str | None = None
    version: str | None = None
    report: str | None = None  # its id

    @property
    def key(self) -> Key:
        """Which time of which item it belongs to."""
        return self.item, self.occurrence


@dataclass(slots=True)
class Past:
    """What earlier lives of a driver did at one time of one item."""

    answered: set[int] = field(default_factory=set)  # indexes; they are not sampled again
    owed: dict[int, Rollout] = field(default_factory=dict)  # answered, not acknowledged: by index
    num_scored: int = 0  # reports with a score that the service has
    report: str | None = None  # one of these
    release: str | None = None  # that answered it
    settled: bool = False
    asked: str | None = None  # a digest of the item; None: not written down by older drivers


class Records:
    """The file, or nothing where ``path`` is None. ``settings`` are what a run must not change between its lives.

    Raises WrongRecords where the file is of other settings, of no driver, damaged before its last line, or in use. A
    last line that was cut is removed. ``latest`` are so many of what earlier lives reported last, at most.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], latest: int = 0) -> None:
        self.run = uuid.uuid4().hex[:12]
        self.past: dict[Key, Past] = {}
        self.trained: dict[str, int] = {}  # releases that our reports trained, and their steps
        self.num_reported = 0
        self.num_owed = 0  # graded and not acknowledged, by now
        self.latest: deque[Rollout] = deque(maxlen=latest)
        self._goldless: dict[tuple[str, str], tuple[str, str]] = {}  # an item's id and digest: reason code, error
        self._file: BinaryIO | None = None
        self.path = path
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._open(path, self._file, settings)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file, and let others have it."""
        if self._file is not None:
            self._file.close()

    def report_id(self, receipt: str) -> str:
        """The id under which a receipt is reported, in this life and in later ones."""
        return f"{self.run}-{receipt}"

    def check_item(self, item: Item, key: Key) -> None:
        """Raises WrongRecords where some answers are there to an item that was another one then."""
        past = self.past.get(key)
        if past is not None and past.asked is not None and past.asked != _digest(item):
            raise WrongRecords(
                f"{self.path}: item {item.id!r} was answered with other messages, or another gold: "
                "give what is new another id, or this run records of its own"
            )

    def goldless(self, item: Item) -> tuple[str, str] | None:
        """A reason code and an error, where the item was found to have no gold that can be read, as it is now."""
        return self._goldless.get((item.id, _digest(item)))

    def answered(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """They were graded and are about to be reported."""
        self.num_owed += len(rollouts)
        self._write({"event": "answered", **asdict(each), "asked": _digest(item)} for each in rollouts)

    def failed(self, rollouts: Sequence[Rollout], item: Item | None = None) -> None:
        """They were not sampled, graded or reported; their ``error`` says why. ``item`` is what was asked."""
        events = [{"event": "failed", **asdict(each), "asked": item and _digest(item)} for each in rollouts]
        for event in events:
            self._remember_goldless(event)
        self._write(events)

    def reported(self, rollout: Rollout) -> None:
        """The service acknowledged a report."""
        self.num_owed -= 1
        place = {"item": rollout.item, "occurrence": rollout.occurrence, "index": rollout.index}
        self._write([{"event": "reported", **place, "report": rollout.report}])

    def settled(self, key: Key, state: ReportState) -> None:
        """Nothing more is waited for at this time of this item."""
        what = {"state": state.state, "reason": state.reason, "release": state.release, "step": state.step}
        self._write([{"event": "settled", "item": key[0], "occurrence": key[1], **what}])

    def _write(self, lines: Iterable[Json]) -> None:
        if self._file is not None:
            self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            self._file.flush()

    # ---- reading back

    def _open(self, path: Path, file: BinaryIO, settings: Mapping[str, Any]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WrongRecords(f"{path} is in use: another driver writes to it") from None
        repair(file)
        file.seek(0)
        first = file.readline()
        if not first:
            self._write([{"event": "run", "run": self.run, **settings}])
            return
        header = _line(path, 1, first)
        if header.get("event") != "run" or not isinstance(header.get("run"), str):
            raise WrongRecords(f"{path} is no driver's records: its first line is no run: {first[:80]!r}")
        for name, value in json.loads(json.dumps(settings)).items():
            if name == "extra" and name not in header:
                continue  # older drivers did not write it down
            if header.get(name) != value:
                raise WrongRecords(
                    f"{path} is of a run with {name} {header.get(name)!r}, this one has {value!r}: "
                    "give each run records of its own"
                )
        self.run = header["run"]
        for number, line in enumerate(file, start=2):
            event = _line(path, number, line)
            try:
                self._remember(event)
            except (KeyError, TypeError) as error:
                raise WrongRecords(f"{path}:{number}: no line of a driver's records: {error}") from None

    def _remember(self, event: Json) -> None:
        kind, key = event["event"], (event["item"], event["occurrence"])
        if kind == "answered":
            rollout = Rollout(**{name: event[name] for name in _FIELDS})
            past = self.past.setdefault(key, Past())
            past.answered.add(rollout.index)
            past.asked = event.get("asked")
            past.owed[rollout.index] = rollout
            self.num_owed += 1
        elif kind == "reported":
            past = self.past[key]
            rollout = past.owed.pop(event["index"])
            self.num_reported += 1
            self.num_owed -= 1
            self.latest.append(rollout)
            if rollout.score is not None:
                past.num_scored += 1
                past.report, past.release = rollout.report, rollout.release
        elif kind == "settled":
            self.past[key].settled = True
            if event["state"] == "trained" and event["release"]:
                self.trained[event["release"]] = event["step"] or 0
        elif kind == "failed":
            self._remember_goldless(event)
        else:
            raise KeyError(f"event {kind!r}")

    def _remember_goldless(self, event: Json) -> None:
        if event.get("asked") and event.get("reason_code") in GOLDLESS:
            self._goldless[event["item"], event["asked"]] = (event["reason_code"], event["error"])


_FIELDS = tuple(each.name for each in fields(Rollout))


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a driver's records, in order, one each: what was reported, and what failed with its ``error``.

    One that is graded and whose report is not acknowledged yet is left out: the driver owes it. A failure is left out
    where the same place was filled later. Raises WrongRecords for a file that is none of a driver's.
    """
    found: dict[tuple[str, int, int], Rollout] = {}
    owed: dict[tuple[str, int, int], Rollout] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # being written, or cut
            event = _line(path, number, line)
            if number == 1 and event.get("event") != "run":
                raise WrongRecords(f"{path} is no driver's records: its first line is no run")
            try:
                if event["event"] not in ("answered", "reported", "failed"):
                    continue
                place = (event["item"], event["occurrence"], event["index"])
                if event["event"] == "answered":
                    owed[place] = Rollout(**{name: event[name] for name in _FIELDS})
                elif event["event"] == "reported":
                    found[place] = owed.pop(place)
                else:
                    found[place] = Rollout(**{name: event[name] for name in _FIELDS})
            except (KeyError, TypeError) as error:
                raise WrongRecords(f"{path}:{number}: no line of a driver's records: {error}") from None
    return list(found.values())


def repair(file: BinaryIO) -> None:
    """End a file opened for appending at the end of a line: what a cut last line left of it is removed.

    Nobody was told of a line that was not whole, so nothing is lost that was promised.
    """
    size = file.seek(0, os.SEEK_END)
    kept = size
    while kept > 0:
        step = min(kept, 65536)
        file.seek(kept - step)
        newline = file.read(step).rfind(b"\n")
        if newline >= 0:
            kept += newline + 1 - step
            break
        kept -= step
    if kept != size:
        file.truncate(kept)


def _line(path: Path, number: int, line: bytes) -> Json:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WrongRecords(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(event, dict):
        raise WrongRecords(f"{path}:{number}: expected a JSON object, got {type(event).__name__}")
    return event


def _digest(item: Item) -> str:
    """Of all that an item's answers and their scores depend on."""
    return hashlib.sha256(json.dumps([item.messages, item.gold], sort_keys=True).encode()).hexdigest()[:16]
