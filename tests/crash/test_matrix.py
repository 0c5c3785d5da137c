"""kill -9 of anybody at any point loses nothing and trains nothing twice.

One run directory goes through every cell, a point and who is killed there, one after the other. Its chain must be that
of a run in which nobody was killed, and so must the trainer's state at the end, bit by bit.

CI takes, at each point, whoever stands still there or everything at once, in turn; at every third also one of the other
two. (Starting everything again is most of the time.) `make soak`, which sets REEF_CRASH=all, takes everybody at every
point.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import frozen, soak
from tests.crash.walk import OWNERS, TARGETS, Cell, plan, walking

pytestmark = [pytest.mark.slow]


def cells() -> Iterator[Cell]:
    for index, (point, owner) in enumerate(OWNERS.items()):
        others = [target for target in TARGETS if target not in (owner, "all")]
        targets = [owner, "all", *others]
        if os.environ.get("REEF_CRASH") != "all":
            targets = [(owner, "all")[index % 2], *([others[index // 3 % 2]] if index % 3 == 0 else [])]
        for target in targets:
            yield Cell(point, target)


@pytest.mark.timeout(3600)
def test_kill_9_at_any_point_leaves_the_chain_and_the_trainer_as_if_nobody_had_been_killed(tmp_path: Path) -> None:
    moves = plan(cells())
    frozen.freeze(tmp_path / "frozen", len(moves))
    with walking(tmp_path / "frozen", tmp_path / "reference") as reference:
        reference.repeat(moves)
        contents = reference.ledger.contents()
        expected = reference.finish()
    with walking(tmp_path / "frozen", tmp_path / "walk", contents) as walk:
        for move in moves:
            started = time.monotonic()
            walk.move(move)
            if move is not None:
                print(f"{move}: {time.monotonic() - started:.1f} s", flush=True)
        found = walk.finish()
    assert frozen.differences(found, expected) == []


@pytest.mark.timeout(1800)
def test_kills_at_random_times_leave_it_so_too(tmp_path: Path) -> None:
    assert soak.run(tmp_path, kills=3, seed=0) == 3
