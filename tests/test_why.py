"""`reef why` has a line for every event of a story."""

import re
from pathlib import Path

import pytest

from reef.cli import EVENTS, _told
from reef.types import ReleaseState, ReportState

STORY = Path(__file__).parents[1] / "reef" / "ledger" / "story.py"


def test_every_event_that_is_told_has_a_line() -> None:
    source = STORY.read_text()
    named = set(re.findall(r'"event": "(\w+)"', source)) | set(
        re.findall(r'event = "(\w+)" if inside else "(\w+)"', source)[0]
    )
    of_releases = {state.value for state in ReleaseState if state is not ReleaseState.PENDING}  # that one is `held`
    assert named | of_releases | {ReportState.PENDING.value, ReportState.WAITING.value} == set(EVENTS)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "written", "receipt_id": "rcp_a", "tokens": 3, "releases": ["r1", "r2"], "exact": True},
            "receipt rcp_a written, 3 tokens from r1, r2, exact",
        ),
        (
            {"event": "written", "receipt_id": "a", "tokens": 1, "releases": ["r1"], "exact": False, "reason": "top_p"},
            "receipt a written, 1 tokens from r1, not exact: top_p",
        ),
        (
            {"event": "attempt_failed", "batch_id": "b1", "attempt": 1, "error": "{a worker} died"},
            "attempt 1 of batch b1 failed: {a worker} died",
        ),
        (
            {"event": "rolled_away", "release_id": "r2", "by": "r3", "operation": "rollback"},
            "release r2 left by rollback r3",
        ),
    ],
)
def test_an_event_is_one_line_with_its_reason(event: dict[str, object], line: str) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  " + re.escape(line), _told({"at": 0.0, **event}))
    assert _told({"at": None, **event}) == " " * 21 + line
