"""kill -9 of anybody at any point loses nothing and trains nothing twice.

Two run directories go through the cells, a point and who is killed there, one after the other, and beside each other.
The chain of each must be that of a run in which nobody was killed, and so must the trainer's state at the end, bit by
bit.

CI takes, at each point, whoever stands still there or everything at once, in turn; at every third also one of the other
two. (Starting everything again is most of the time.) `make soak`, which sets REEF_CRASH=all, takes everybody at every
point.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash import frozen, soak
from tests.crash.soak import Reference
from tests.crash.walk import OWNERS, TARGETS, Cell, Move, plan, walking

pytestmark = [pytest.mark.slow]

KILLS = 3  # at random


def cells() -> Iterator[Cell]:
    for index, (point, owner) in enumerate(OWNERS.items()):
        others = [target for target in TARGETS if target not in (owner, "all")]
        targets = [owner, "all", *others]
        if os.environ.get("REEF_CRASH") != "all":
            targets = [(owner, "all")[index % 2], *([others[index // 3 % 2]] if index % 3 == 0 else [])]
        for target in targets:
            yield Cell(point, target)


def lives() -> tuple[list[Move], list[Move]]:
    """The moves of two run directories. The first is the shorter one, and only the other rolls back: at its end."""
    found = list(cells())
    plain = [cell for cell in found if not cell.rolls_back]
    one, other = plan(plain[::2]), plan(plain[1::2])
    one += [None] * (-len(one) % frozen.CHECKPOINT_EVERY)
    other += [None] * (len(one) - len(other))
    return one, plan([cell for cell in found if cell.rolls_back], after=other)


@dataclass(frozen=True)
class References:
    """What comes of the same frozen run where nobody is killed: of a few batches, of one life, of the other."""

    soak: Reference
    one: Reference
    other: Reference


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    directory = tmp_path_factory.mktemp("references")
    one, other = lives()
    frozen.freeze(directory / "frozen", len(other))
    with walking(directory / "frozen", directory / "reference") as walk:
        few = soak.begin(walk, directory, KILLS * soak.BATCHES_A_KILL)
        more = soak.begin(walk, directory, len(one) - few.num_batches)
        walk.repeat(other[len(one) :])
        contents = walk.ledger.contents()
        whole = Reference(directory / "frozen", walk.num_batches, contents, walk.finish(), few.batch_s)
    return References(few, more, whole)


def live(reference: Reference, directory: Path, moves: Sequence[Move]) -> None:
    """All moves, each of which must leave everything in its place."""
    with walking(reference.frozen, directory, reference.contents) as walk:
        for move in moves:
            started = time.monotonic()
            walk.move(move)
            if move is not None:
                print(f"{move}: {time.monotonic() - started:.1f} s", flush=True)
        found = walk.finish()
    assert frozen.differences(found, reference.checkpoint) == []


@pytest.mark.timeout(3600)
def test_kill_9_at_any_point_leaves_the_chain_and_the_trainer_as_if_nobody_had_been_killed(
    references: References, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as threads:
        found = (references.one, references.other)
        list(threads.map(live, found, (tmp_path / "one", tmp_path / "other"), lives()))


@pytest.mark.timeout(1800)
def test_kills_at_random_times_leave_it_so_too(references: References, tmp_path: Path) -> None:
    assert soak.disturb(references.soak, tmp_path / "soak", KILLS, seed=0) == KILLS
