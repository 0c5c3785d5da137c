"""Paths that say what headers say."""

from __future__ import annotations

import pytest

from reef.errors import BadRequestError
from reef.service.prefix import without_prefix


def scope(method="GET", path="/v1/models", raw=None, **headers):
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "raw_path": raw or path.encode(), "headers": sent}


@pytest.mark.parametrize(
    ("raw", "path", "scenario", "session"),
    [
        (b"/scenarios/a/v1/models", "/v1/models", b"a", None),
        (b"/sessions/s%2F1/v1/chat/completions", "/v1/chat/completions", None, b"s/1"),
        (b"/scenarios/a/sessions/b/v1/messages?beta=true", "/v1/messages", b"a", b"b"),
        (b"/sessions/%C3%A9%20x/v1/models", "/v1/models", None, "é x".encode()),
        (b"/scenarios/v1/v1/v1/x", "/v1/v1/x", b"v1", None),
        (b"/sessions/a/v1/x%20y", "/v1/x y", None, b"a"),
    ],
)
def test_a_prefix_is_read_as_headers(raw, path, scenario, session) -> None:
    changed = without_prefix(scope("POST", "as it came", raw, accept="*/*"))
    headers = dict(changed["headers"])
    assert changed["path"] == path
    assert (headers.get(b"x-reef-scenario"), headers.get(b"x-reef-session")) == (scenario, session)
    assert headers[b"accept"] == b"*/*"


OTHERS = [
    b"/v1/models",
    b"/scenarios/a",
    b"/scenarios//v1/models",
    b"/scenarios/a/v2/models",
    b"/scenarios/a/v1",
    b"/sessions/a/scenarios/b/v1/models",
    b"/scenarios/a/reef/status",
    b"/reef/scenarios/a/v1/x",
    b"/scenarios/a/b/v1/x",
]


@pytest.mark.parametrize("raw", OTHERS)
def test_any_other_path_stays_as_it_is(raw) -> None:
    asked = scope("GET", raw.decode(), raw)
    assert without_prefix(asked) is asked


def test_header_and_path_may_say_the_same_and_not_different_things() -> None:
    raw = b"/scenarios/a/sessions/b/v1/models"
    same = without_prefix(scope(raw=raw, x_reef_scenario="a", x_reef_session="b", x_session_id="another"))
    assert [value for name, value in same["headers"] if name.startswith(b"x-reef")] == [b"a", b"b"]
    for name in ("x_reef_scenario", "x_reef_session"):
        with pytest.raises(BadRequestError, match=r"the header x-reef-.* is 'z', the path says") as contradiction:
            without_prefix(scope(raw=raw, **{name: "z"}))
        assert contradiction.value.param == name.replace("_", "-")
        assert contradiction.value.code == "header_contradicts_path"
    for escape in (b"%0d%0ax: y", b"%00", b"%7f"):
        with pytest.raises(BadRequestError, match="control characters"):
            without_prefix(scope(raw=b"/sessions/a" + escape + b"/v1/models"))
