"""Paths that say what headers say, for agents of which only the base URL can be set.

/scenarios/{s}/v1/...  /sessions/{id}/v1/...  /scenarios/{s}/sessions/{id}/v1/...
->  /v1/... with x-reef-scenario: {s} and x-reef-session: {id}
"""

import re
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from reef.errors import BadRequestError

_PREFIXED = re.compile(rb"(?:/scenarios/([^/]+))?(?:/sessions/([^/]+))?(/v1/.*)", re.DOTALL)
_HEADERS = (b"x-reef-scenario", b"x-reef-session")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")  # what no header carries


def without_prefix(scope: Scope) -> Scope:
    """The request as if its prefix had been headers; unchanged where it has none.

    Raises:
        BadRequestError: header and path contradict each other, or the path names what no header can carry.
    """
    raw = _raw_path(scope)
    if raw.startswith(b"/v1/") or (match := _PREFIXED.fullmatch(raw)) is None:
        return scope
    headers: list[tuple[bytes, bytes]] = list(scope["headers"])
    for name, segment in zip(_HEADERS, match.groups()[:2], strict=True):
        if segment is None:
            continue
        value = unquote_to_bytes(segment)
        if _CONTROL.search(value):
            raise BadRequestError("the path names a scenario or session with control characters", param=name.decode())
        given = [header for known, header in headers if known == name]
        if any(header != value for header in given):
            raise BadRequestError(
                f"the header {name.decode()} is {_text(given[0])!r}, the path says {_text(value)!r}",
                param=name.decode(),
                code="header_contradicts_path",
            )
        if not given:
            headers.append((name, value))
    path = match[3]
    changed: dict[str, Any] = {"path": unquote_to_bytes(path).decode(errors="replace"), "raw_path": path}
    return {**scope, **changed, "headers": headers, "reef.headers": None}


def _raw_path(scope: Scope) -> bytes:
    """The path before %2F became a slash. ASGI leaves it to servers whether they say it; ours does."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")[:80]
