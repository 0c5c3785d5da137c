"""`python -m tests.crash.soak --kills 200`: kill -9 of anybody at random times, for as long as you like.

The chain is compared all the time with that of a run in which nobody was killed, and the trainer's state at the end.

Kills come at any moment, start-up and recovery included. One is held back only where it would be the second failed
attempt of a batch, which ends the batch by design: the service is stopped (SIGSTOP), its ledger asked, and only then is
anybody killed. An engine is killed only while it serves: one that dies twice in a load gets the release quarantined.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.crash import frozen
from tests.crash.walk import POLL_S, SLOW_POLL_S, TARGETS, WAIT_S, Walk, gone, is_a, walking

BATCHES_A_KILL = 2  # the first as soon as there is nothing else to train, the second right before the kill
WINDOW_STARTS = 1.5  # kills come within so many times what a start takes
LEAD_BATCHES = 1.5  # and the second batch comes before them within so many times what a batch takes
LAST_ATTEMPT = 2
STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen run directory, and what comes of its first batches where nobody is killed."""

    frozen: Path
    num_batches: int
    contents: list[str]  # content ids, the base's first
    checkpoint: Path
    batch_s: float  # that a batch takes


def begin(walk: Walk, directory: Path, num_batches: int) -> Reference:
    """So many more batches of the frozen run in `directory`, and a copy of the checkpoint of the last one."""
    started = time.monotonic()
    walk.repeat([None] * num_batches)
    batch_s = (time.monotonic() - started) / num_batches
    assert walk.num_batches % frozen.CHECKPOINT_EVERY == 0
    checkpoint = shutil.copytree(walk.checkpoint(), directory / f"checkpoint-{walk.num_batches}")
    return Reference(directory / "frozen", walk.num_batches, walk.ledger.contents(), checkpoint, batch_s)


def run(directory: Path, kills: int, seed: int, hours: float = float("inf")) -> int:
    """The kills done. Raises AssertionError with what is wrong."""
    num_batches = math.ceil(kills * BATCHES_A_KILL / frozen.CHECKPOINT_EVERY) * frozen.CHECKPOINT_EVERY
    frozen.freeze(directory / "frozen", num_batches)
    with walking(directory / "frozen", directory / "reference") as walk:
        reference = begin(walk, directory, num_batches)
        walk.finish()
    print(f"the reference has {num_batches} releases", flush=True)
    return disturb(reference, directory / "soak", kills, seed, hours)


def disturb(reference: Reference, directory: Path, kills: int, seed: int, hours: float = float("inf")) -> int:
    """The same batches, with so many kills. The kills done."""
    started = time.monotonic()
    with walking(reference.frozen, directory, reference.contents) as walk:
        window_s = WINDOW_STARTS * (time.monotonic() - started)
        soak = _Soak(walk, random.Random(seed), window_s, LEAD_BATCHES * reference.batch_s)
        done = soak.kill(kills, until=started + hours * 3600)
        walk.repeat([None] * (reference.num_batches - walk.num_batches))
        found = walk.finish()
    differ = frozen.differences(found, reference.checkpoint)
    assert not differ, f"the trainer's state is not that of the reference: {differ}"
    return done


@dataclass(slots=True)
class _Kill:
    number: int
    target: str
    phase: str
    head: str
    at: float  # monotonic

    def say(self, end: str) -> None:
        after = time.monotonic() - self.at
        print(f"{self.number:4} {self.target:8} while {self.phase:12} at {self.head}: {end} {after:.1f} s", flush=True)


class _Soak:
    def __init__(self, walk: Walk, chance: random.Random, window_s: float, lead_s: float) -> None:
        self._walk = walk
        self._chance = chance
        self._window_s = window_s
        self._lead_s = lead_s
        self._left: list[psutil.Process] = []  # what killed services had started
        self._last: _Kill | None = None  # while a release is owed since
        self._head = frozen.BASE

    def kill(self, kills: int, until: float) -> int:
        """So many, but none after `until` (monotonic); how many. Everything has recovered when this returns."""
        done = 0
        while done < kills and time.monotonic() < until:
            at = time.monotonic() + self._chance.uniform(0, self._window_s)
            last_batch_at = at - self._chance.uniform(0, self._lead_s)
            target = self._chance.choice(TARGETS)
            deadline = at + WAIT_S
            while True:
                self._look((done + 1) * BATCHES_A_KILL - (time.monotonic() < last_batch_at))
                if time.monotonic() >= at:
                    if self._killed(done + 1, target):
                        break
                    at = time.monotonic() + self._chance.uniform(0, self._lead_s)
                assert time.monotonic() < deadline, f"no moment at which {target} may be killed"
            done += 1
        while self._last is not None:
            self._look(done * BATCHES_A_KILL)
        return done

    def _look(self, num_batches: int) -> None:
        """One look at everything; posts the next batch, of so many, where the last one is trained."""
        walk = self._walk
        time.sleep(POLL_S if walk.grader.url else SLOW_POLL_S)
        assert walk.grader.refused is None, walk.grader.refused
        if walk.service.returncode is not None:  # its workers were killed before it was ready
            assert self._last is not None and self._last.phase == "starting", "the service ended by itself"
            walk.launch()
        if walk.grader.url is None:
            if not walk.service.is_ready():
                return
            walk.grader.url = walk.service.url
            gone(self._left)
            self._left = []
        head = walk.ledger.head()
        if self._last is not None and (head != self._head or head == walk.head):
            self._last.say("recovered after")
            self._last = None
        if head != self._head:
            self._head = head
            walk.check_ledger()
        if head == walk.head and walk.num_batches < num_batches:
            walk.post_batch()

    def _killed(self, number: int, target: str) -> bool:
        """Kill -9, unless this is no moment for it."""
        walk = self._walk
        if walk.service.returncode is not None:
            return False
        status = self._status()
        if target == "engine" and status["engine"] != "ready":
            return False
        service = psutil.Process(walk.service.pid)
        service.suspend()
        while service.status() != psutil.STATUS_STOPPED:
            time.sleep(POLL_S)
        try:
            if target != "engine" and self._attempt() == LAST_ATTEMPT:
                return False
            if target == "worker" and not any(is_a(process, "worker") for process in walk.service.processes()):
                return False
            if self._last is not None:
                self._last.say("killed again after")
            self._last = _Kill(number, target, status["phase"], self._head, time.monotonic())
            left = walk.kill(target)
        finally:
            if service.is_running():
                service.resume()
        if target in ("service", "all"):
            self._left += left
            walk.launch()
        return True

    def _status(self) -> dict[str, str]:
        """What the service says it does."""
        if self._walk.grader.url is None:
            return {"phase": "starting", "engine": "starting"}
        try:
            status: dict[str, Any] = self._walk.service.get("/reef/status", timeout=STATUS_TIMEOUT_S).json()
        except httpx.HTTPError:
            return {"phase": "unknown", "engine": "unknown"}
        return {"phase": status["training"]["phase"], "engine": status["engines"][0]["state"]}

    def _attempt(self) -> int:
        """Of the batch in work. A ledger that cannot be read was not opened since the last kill: nothing is in work."""
        try:
            return self._walk.ledger.attempt()
        except sqlite3.OperationalError:
            return 0


def main() -> int:
    """The exit status: 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hours", type=float, default=float("inf"), help="end earlier, after so many hours")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reef-soak-") as directory:
        try:
            done = run(Path(directory), options.kills, options.seed, options.hours)
        except AssertionError as error:
            print(f"wrong: {error}", file=sys.stderr)
            return 1
    print(f"{done} kills: nothing lost, nothing trained twice, the trainer's state is the reference's bit by bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
