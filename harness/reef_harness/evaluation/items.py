"""Items out of a JSONL file: a row that cannot be used is a complaint, and the others go on."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reef_harness.errors import HarnessError
from reef_harness.types import Item, Message

FIELDS = frozenset({"id", "prompt", "messages", "gold", "source", "revision", "split", "slices"})


def read_items(path: Path) -> tuple[list[Item], list[str]]:
    """Read rows ``{id, prompt | messages, gold, source?, revision?, split?, slices?}``: (items, complaints).

    A complaint names the file, the line and what is wrong with it; that row is left out. ``prompt`` is one user
    message, ``messages`` a conversation. ``gold`` is text; any other JSON value becomes its JSON text; without one
    the item has ``gold`` None and is graded ``error: no_gold``. Raises HarnessError where no row can be used, OSError
    where the file cannot be read.
    """
    items: dict[str, Item] = {}
    lines: dict[str, int] = {}
    complaints: list[str] = []
    for number, line in _lines(path):
        try:
            item = _item(_row(line))
            if item.id in items:
                raise ValueError(f"the id {item.id!r} is already that of line {lines[item.id]}")
        except ValueError as error:
            complaints.append(f"{path}:{number}: {error}")
            continue
        items[item.id], lines[item.id] = item, number
    if not items:
        first = f"; the first complaint: {complaints[0]}" if complaints else ": it is empty"
        raise HarnessError(f"{path} has no usable item ({len(complaints)} rows were refused){first}")
    return list(items.values()), complaints


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """The prompts of a JSONL file, each with a name: its id, or its line. Other fields are ignored, so is what a system
    prompt says. Raises HarnessError for a row that has no prompt: half a file compared proves nothing.
    """
    for number, line in _lines(path):
        try:
            row = _row(line)
            messages = _messages(row)
        except ValueError as error:
            raise HarnessError(f"{path}:{number}: {error}") from None
        said = (message["content"] for message in messages if message["role"] not in ("system", "developer"))
        yield str(row.get("id") or f"line {number}"), "\n".join(_words(content) for content in said)


def row_of(item: Item) -> dict[str, Any]:
    """The row that :func:`read_items` makes ``item`` of."""
    row: dict[str, Any] = {"id": item.id}
    if len(item.messages) == 1 and set(item.messages[0]) == {"role", "content"} and item.messages[0]["role"] == "user":
        row["prompt"] = item.messages[0]["content"]
    else:
        row["messages"] = [dict(message) for message in item.messages]
    rest = {"gold": item.gold, "source": item.source, "revision": item.revision, "split": item.split}
    row |= {name: value for name, value in rest.items() if value is not None}
    return row | ({"slices": dict(item.slices)} if item.slices else {})


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, counted from 1, without a byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            stripped = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if stripped:
                yield number, stripped


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # half a surrogate pair cannot be sent or written again
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from None
    except RecursionError:
        raise ValueError("bad JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"bad JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these; JSON leaves open which of two equal names counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _item(row: Mapping[str, Any]) -> Item:
    if unknown := sorted(set(row) - FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}; a row has {', '.join(sorted(FIELDS))}")
    return Item(
        _id(row.get("id")),
        _messages(row),
        _gold(row.get("gold")),
        _text(row, "source"),
        _text(row, "revision"),
        _text(row, "split"),
        _slices(row.get("slices")),
    )


def _id(value: Any) -> str:
    if value is None or value == "":
        raise ValueError("a row without an id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"id must be text, got {type(value).__name__}")
    return str(value)


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("no prompt: expected prompt or messages" if prompt is None else "both prompt and messages")
    if messages is None:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompt must be text that is not blank, got {prompt!r}"[:200])
        return ({"role": "user", "content": prompt},)
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"messages[{position}] must be an object with role and content")
    return tuple(messages)


def _words(content: Any) -> str:
    """A message's text; of a list of parts that of all parts."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _gold(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return value


def _slices(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(each, str | int) for each in value.values()):
        raise ValueError('slices must be an object of names and values, as in {"level": "hard"}')
    return {name: _gold(each) or "" for name, each in value.items()}
