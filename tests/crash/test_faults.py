"""A breakpoint that nobody has armed is none; an armed one holds whoever comes first, until it is let go."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reef import faults
from tests.crash.walk import Faults

SOON_S = 60.0


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    made = Faults(tmp_path / "faults")
    monkeypatch.setattr(faults, "_DIRECTORY", str(made.directory))
    return made


def passing(point: str) -> threading.Thread:
    """Somebody who comes to a point, and has ended once it is behind him."""
    thread = threading.Thread(target=faults.reach, args=(point,), daemon=True)
    thread.start()
    return thread


def soon(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not true() and time.monotonic() < deadline:
        time.sleep(faults.POLL_S)
    return true()


def test_a_point_that_is_not_armed_is_passed(points: Faults) -> None:
    points.arm("elsewhere")
    faults.reach("here")
    assert not points.reached("here")
    assert not points.reached("elsewhere")


def test_the_first_to_come_stands_until_it_is_let_go_and_the_others_pass(points: Faults) -> None:
    points.arm("here")
    first = passing("here")
    assert soon(lambda: points.reached("here"))
    faults.reach("here")
    assert first.is_alive()
    points.go("here")
    assert soon(lambda: not first.is_alive())


def test_a_point_is_passed_as_often_as_it_says(points: Faults) -> None:
    (points.directory / "here").write_text("2")
    faults.reach("here")
    faults.reach("here")
    assert not points.reached("here")
    third = passing("here")
    assert soon(lambda: points.reached("here"))
    points.go("here")
    assert soon(lambda: not third.is_alive())


def test_a_point_can_be_armed_again(points: Faults) -> None:
    for _ in range(2):
        points.arm("here")
        someone = passing("here")
        assert soon(lambda: points.reached("here"))
        points.go("here")
        assert soon(lambda someone=someone: not someone.is_alive())
