"""A bank: the directory that holds an evaluation's answers, what was asked, and each grader's verdicts.

DIR/run.json                              what was asked, of whom, and who answered
DIR/SET/responses.jsonl                   the answers as they came
DIR/SET/verdicts-GRADER@VERSION.jsonl     what a grader says of them
DIR/summary.json, table.md, *.png         what is made of both
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from reef_harness.errors import HarnessError
from reef_harness.evaluation.items import read_items
from reef_harness.evaluation.records import Graded, Response, read_graded, read_responses
from reef_harness.evaluation.sample import Settings
from reef_harness.types import Item, Json

FORMAT = 1
# Not that of what is written beside it: summary.json, table.md, compare/.
_SET_NAME = re.compile(r"(?!compare$|.*\.(?:json|md|png|new)$)[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class ItemsFile:
    """The items of one set: where they were read, the file's sha256, how many it has and how many rows were refused."""

    path: str
    sha256: str
    items: int
    refused: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What an evaluation asks for. ``release`` is the one that had to answer; None: whichever was served."""

    scenario: str
    release: str | None
    settings: Settings
    sets: Mapping[str, ItemsFile]


class Bank:
    """A bank that is there; see :meth:`begin` and :meth:`open`."""

    def __init__(self, path: Path, asked: Asked, rest: Json) -> None:
        self.path = path
        self.asked = asked
        self._rest = rest  # what run.json says besides: times, URL, graders, who answered

    @classmethod
    def begin(cls, path: Path, asked: Asked, url: str) -> "Bank":
        """A new bank, or the one that is there if it asks for the same: then more samples may be asked for.

        One without a single answer is begun anew, whatever it asks for. Call it under :func:`holding`. Raises
        HarnessError where it holds something else.
        """
        bank = cls(path, asked, {"created_at": now(), "graders": [], "answered_by": {}})
        if (path / "run.json").exists():
            there = cls.open(path)
            if there._is_bare():
                there._clear()
            else:
                there._go_on(asked)
                bank = there
        elif path.exists() and any(each.name != "run.json.new" for each in path.iterdir()):
            raise HarnessError(f"{path} is no evaluation's directory and not empty")
        path.mkdir(parents=True, exist_ok=True)
        bank._rest["url"] = url
        bank.save()  # first of all: what is left by a crash is an evaluation's directory
        for name in bank.asked.sets:
            bank._keep_items(name)
        return bank

    @classmethod
    def open(cls, path: Path) -> "Bank":
        """The bank that is there. Raises HarnessError where there is none that can be read."""
        try:
            run = json.loads((path / "run.json").read_text(encoding="utf-8"))
            if not isinstance(run, dict):
                raise ValueError(f"expected an object, got {type(run).__name__}")
            if run.pop("format") != FORMAT:
                raise ValueError("it has another format")
            asked = Asked(
                run.pop("scenario"),
                run.pop("release"),
                Settings(**run.pop("settings")),
                {name: ItemsFile(**file) for name, file in run.pop("sets").items()},
            )
        except FileNotFoundError:
            raise HarnessError(f"{path} holds no evaluation (no run.json)") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HarnessError(f"{path / 'run.json'} cannot be read: {error}") from None
        return cls(path, asked, run)

    def save(self) -> None:
        """Write run.json: it is there whole, or as it was before."""
        run = {
            "format": FORMAT,
            "scenario": self.asked.scenario,
            "release": self.asked.release,
            "settings": asdict(self.asked.settings),
            "sets": {name: asdict(file) for name, file in self.asked.sets.items()},
        }
        write_json(self.path / "run.json", run | self._rest)

    # ---- what it holds

    def items(self, name: str) -> list[Item]:
        """The items of a set, as they were when the answers were sampled: those of the copy, else those of their file.

        Raises HarnessError where neither is as it was: the answers are to something else.
        """
        file = self.asked.sets[name]
        there = [path for path in (self._copy(name), Path(file.path)) if path.exists()]
        for path in there:
            if sha256_of(path) == file.sha256:
                return read_items(path)[0]
        if not there:
            raise HarnessError(
                f"{self.path}: the items of {name} are neither at {self._copy(name)} nor at {file.path} any more"
            )
        found = ", that of ".join(f"{path} is {sha256_of(path)[:12]}…" for path in there)
        raise HarnessError(
            f"the items of {name} were changed since the answers in {self.path} were sampled: their sha256 was "
            f"{file.sha256[:12]}…, that of {found}; sample again into another directory"
        )

    def _copy(self, name: str) -> Path:
        return self.path / name / "items.jsonl"

    def _keep_items(self, name: str) -> None:
        """Have an intact copy of a set's items. Raises HarnessError where their file changed since it was read."""
        file, copy = self.asked.sets[name], self._copy(name)
        if copy.exists() and sha256_of(copy) == file.sha256:
            return
        content = Path(file.path).read_bytes()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise HarnessError(f"{file.path} was changed a moment ago: begin again")
        copy.parent.mkdir(exist_ok=True)
        unfinished = copy.with_name(copy.name + ".new")
        unfinished.write_bytes(content)
        unfinished.replace(copy)

    def _is_bare(self) -> bool:
        """Whether no set has an answer: errors, which are lines too, are none."""
        return all(each.error for name in self.asked.sets for each in read_responses(self.responses_file(name)))

    def _clear(self) -> None:
        """Take away what a bank without answers holds: the copies of its items, its errors, verdicts on nothing."""
        for name in self.asked.sets:
            for file in (self._copy(name), self.responses_file(name), *(self.path / name).glob("verdicts-*.jsonl")):
                file.unlink(missing_ok=True)

    def responses_file(self, name: str) -> Path:
        """Where the answers to a set are."""
        return self.path / name / "responses.jsonl"

    def responses(self, name: str) -> list[Response]:
        """The answers to a set. Raises HarnessError where there are none."""
        found = read_responses(self.responses_file(name))
        if not found:
            raise HarnessError(f"{self.path} has no answers to {name} yet")
        return found

    def verdicts_file(self, name: str, grader: str) -> Path:
        """Where a grader's verdicts on a set are; ``grader`` is id@version."""
        return self.path / name / f"verdicts-{quote(grader, safe='@.')}.jsonl"

    def verdicts(self, name: str, grader: str) -> list[Graded]:
        """A grader's verdicts on a set. Raises HarnessError where it has not judged it, every answer that is there."""
        file = self.verdicts_file(name, grader)
        if not file.exists():
            raise HarnessError(f"{self.path}: {name} was not graded by {grader}, only by {', '.join(self.graders())}")
        found = read_graded(file)
        if lacking := self._num_lacking(name, found):
            whole = ", ".join(self.complete())
            others = f", or name who judged all (--grader, --against, --truth): {whole}" if whole else ""
            raise HarnessError(
                f"{self.path}: {lacking} answers to {name} were not graded by {grader}: regrade them{others}"
            )
        return found

    def _num_lacking(self, name: str, verdicts: Sequence[Graded]) -> int:
        judged = {verdict.key for verdict in verdicts}
        return sum(each.is_answer and each.key not in judged for each in self.responses(name))

    def graders(self) -> list[str]:
        """The graders that judged every set, as id@version; the first is the evaluation's own."""
        files = {name: list((self.path / name).glob("verdicts-*.jsonl")) for name in self.asked.sets}
        there = [{unquote(file.stem.removeprefix("verdicts-")) for file in found} for found in files.values()]
        everywhere = set.intersection(*there) if there else set()
        known = [grader for grader in self._rest["graders"] if grader in everywhere]
        return known + sorted(everywhere - set(known))

    def complete(self) -> list[str]:
        """Those of :meth:`graders` that judged every answer that is there."""
        return [
            grader
            for grader in self.graders()
            if not any(
                self._num_lacking(name, read_graded(self.verdicts_file(name, grader))) for name in self.asked.sets
            )
        ]

    def grader(self, named: str | None) -> str:
        """The grader that ``named`` means (id, or id@version). None: the first that judged every answer.

        Where none did, that is the evaluation's own. Raises HarnessError.
        """
        there = self.graders()
        if not there:
            raise HarnessError(f"the answers in {self.path} are not all sampled and graded yet")
        if named is None:
            return (self.complete() or there)[0]
        found = [grader for grader in there if named in (grader, grader.rpartition("@")[0])]
        if not found:
            raise HarnessError(f"{self.path} was not graded by {named}, only by {', '.join(there)}")
        if len(found) > 1:
            raise HarnessError(f"{self.path} was graded by {' and '.join(found)}: say which")
        return found[0]

    @property
    def answered_by(self) -> dict[str, int]:
        """Which release gave how many of the graded answers."""
        return dict(self._rest["answered_by"])

    def note(self, grader: str, answered_by: Mapping[str, int]) -> None:
        """Note a grader that judged all, and which release gave how many of the answers."""
        if grader not in self._rest["graders"]:
            self._rest["graders"].append(grader)
        self._rest["answered_by"] = dict(answered_by)
        self._rest["graded_at"] = now()
        self.save()

    def stem(self, grader: str) -> str:
        """What names of files made for a grader start with: nothing for the evaluation's own."""
        return "" if self.graders()[:1] == [grader] else f"{quote(grader, safe='@.')}-"

    def _go_on(self, asked: Asked) -> None:
        """Take up ``asked``, where it differs in nothing but more samples. Raises HarnessError."""
        samples = max(self.asked.settings.samples, asked.settings.samples)
        greedy = self.asked.settings.greedy or asked.settings.greedy
        before, after = (
            replace(each, settings=replace(each.settings, samples=samples, greedy=greedy))
            for each in (self.asked, asked)
        )
        if different := _differences(before, after):
            raise HarnessError(f"{self.path} holds another evaluation ({different}): give another --out")
        self.asked = after


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Within the block nobody else samples or grades into the directory ``path``, which is there.

    The lock is the operating system's and ends with the process. Raises HarnessError where somebody else has it, or
    there is no such directory.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        raise HarnessError(f"{path} holds no evaluation (it is no directory)") from None
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HarnessError(f"{path} is in use: another evaluation or regrade writes to it") from None
        yield
    finally:
        os.close(directory)


def items_file(path: Path) -> tuple[ItemsFile, list[Item], list[str]]:
    """Read a set: what is noted of its file, its items, and the complaints about its rows."""
    digest = sha256_of(path)
    items, complaints = read_items(path)
    return ItemsFile(str(path.resolve()), digest, len(items), len(complaints)), items, complaints


def check_set_name(name: str) -> str:
    """A set's name, which is a directory's, too. Raises ValueError for one that is none."""
    if not _SET_NAME.fullmatch(name):
        raise ValueError(
            f"a set's name has letters, digits, '.', '_' and '-', is not compare and does not end in .json, .md, .png "
            f"or .new, got {name!r}"
        )
    return name


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file: it is there whole, or as it was before."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _differences(before: Asked, after: Asked) -> str:
    found = []
    if before.scenario != after.scenario:
        found.append(f"scenario {before.scenario}, not {after.scenario}")
    if before.release != after.release:
        found.append(f"release {before.release or 'as served'}, not {after.release or 'as served'}")
    then, this = asdict(before.settings), asdict(after.settings)
    found += [f"{name} {then[name]}, not {this[name]}" for name in then if then[name] != this[name]]
    for name in sorted({*before.sets, *after.sets}):
        one, other = before.sets.get(name), after.sets.get(name)
        if one is None or other is None:
            found.append(f"set {name} is only in {'the new' if one is None else 'the old'} one")
        elif one.sha256 != other.sha256:
            moved = one.path != other.path
            found.append(
                f"the items of {name} {f'are those of {one.path}, not {other.path}' if moved else 'were changed'}"
            )
    return "; ".join(found)
