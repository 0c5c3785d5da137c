"""Pages of other sites in a browser, and names that are made to mean this machine."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from reef.errors import ForbiddenError
from reef.service.browsers import refuse_other_sites


@pytest.mark.parametrize(
    ("host", "origin", "is_open", "answered"),
    [
        ("127.0.0.1:8080", None, True, True),
        ("localhost:8080", "http://localhost:8080", True, True),
        ("LOCALHOST", "https://localhost", True, True),
        ("[::1]:8080", "http://[::1]:8080", True, True),
        (None, None, True, True),
        ("127.0.0.1:8080", "http://localhost:8080", True, False),
        ("127.0.0.1:8080", "http://127.0.0.1:3000", True, False),
        ("127.0.0.1:8080", "null", True, False),
        ("127.0.0.1:8080", "", True, False),
        (None, "http://evil.example", True, False),
        ("evil.example:8080", "http://evil.example:8080", True, False),
        ("evil.example:8080", None, True, False),
        ("127.0.0.1.evil.example", None, True, False),
        ("reef.example", "https://reef.example", False, True),
        ("reef.example", None, False, True),
        ("reef.example", "https://evil.example", False, False),
    ],
)
def test_a_page_asks_only_where_it_came_from_and_without_a_key_only_loopback(host, origin, is_open, answered) -> None:
    headers = Headers({name: value for name, value in (("host", host), ("origin", origin)) if value is not None})
    if answered:
        refuse_other_sites(headers, is_open)
        return
    with pytest.raises(ForbiddenError) as error:
        refuse_other_sites(headers, is_open)
    assert error.value.code in ("other_site", "other_host")
