"""What became of the reports: which units wait, which releases they trained, and how stale they were by then."""

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime

from reef_harness.client import Client
from reef_harness.drivers.records import Key, Records
from reef_harness.errors import Forbidden, NotFound, WrongRecords
from reef_harness.together import together
from reef_harness.types import Json, Release, ReportState

_LOOKS = 16  # of a sweep
_LOOKS_AT_ONCE = 8  # once the oldest was used: those of one batch are used together
_MAX_LINKS = 256  # of the chain that are remembered: what is used now was answered and trained of late


@dataclass(frozen=True, slots=True)
class Open:
    """A unit that waits to be used. One that is not ``whole`` may wait long, and holds nobody up."""

    report: str
    release: str | None
    whole: bool


@dataclass(frozen=True, slots=True)
class Standstill:
    """Why nothing is trained now. ``passes``: it may end by itself (a gate measures); else somebody must act."""

    told: str
    passes: bool = False


class Following:
    """The units that are open: reported, and not yet trained, recorded or dropped. Begins with those of the records.

    ``trained`` are the releases that our reports trained, with their steps; ``staleness`` that of the last batch.
    """

    def __init__(self, client: Client, records: Records, size: int, batch_units: int) -> None:
        self._client, self._records = client, records
        self.open = {
            key: Open(past.report, past.release, past.num_scored >= size)
            for key, past in records.past.items()
            if past.report is not None and not past.settled
        }
        self.trained = dict(records.trained)
        self.staleness: deque[int] = deque(maxlen=batch_units)
        self._chain: dict[str, Release | None] = {}
        self._cursor = 0

    @property
    def num_whole(self) -> int:
        """Units that are waited for."""
        return sum(unit.whole for unit in self.open.values())

    def add(self, key: Key, unit: Open) -> None:
        """A unit was reported."""
        self.open[key] = unit

    async def settle(self, *, sweep: bool) -> bool:
        """Ask what became of the open units, oldest first, up to the first still in use; whether any was used."""
        waiting = [key for key, unit in self.open.items() if unit.whole]
        used, looks = 0, 1
        while waiting:
            now, waiting = waiting[:looks], waiting[looks:]
            ended = await together(self._look(key) for key in now)
            used += sum(ended)
            if not all(ended):
                break
            looks = _LOOKS_AT_ONCE
        if sweep and self.open:
            others = list(self.open)
            start = self._cursor % len(others)
            self._cursor = start + _LOOKS
            used += sum(await together(self._look(key) for key in others[start : start + _LOOKS]))
        return used > 0

    async def settle_all(self) -> bool:
        """Ask what became of every open unit; whether any was used."""
        keys, used = list(self.open), 0
        for begin in range(0, len(keys), _LOOKS):
            used += sum(await together(self._look(key) for key in keys[begin : begin + _LOOKS]))
        return used > 0

    async def _look(self, key: Key) -> bool:
        unit = self.open[key]
        try:
            state = await self._client.report_state(unit.report)
        except NotFound as error:
            told = f"the service does not know report {unit.report}"
            if self._records.path is not None:
                told = f"{self._records.path} is of another service, or of another ledger: {told}"
            raise WrongRecords(told) from error
        if state.final:
            await self.close(key, state, unit.release)
        return state.final

    async def close(self, key: Key, state: ReportState, answered_by: str | None) -> None:
        """A unit was used, in ``state``; ``answered_by`` is the release that its answers came from."""
        self.open.pop(key, None)
        self._records.settled(key, state)
        if state.state == "trained" and state.release:
            self.trained[state.release] = state.step or 0
            trained, answered = await self._link(state.release), await self._link(answered_by)
            before = await self._link(trained.parent) if trained else None
            if before and answered:
                self.staleness.append(max(0, before.version - answered.version))

    async def _link(self, release: str | None) -> Release | None:
        """A link of the chain, asked for once; None where the service cannot show it."""
        if release is None:
            return None
        if release not in self._chain:
            try:
                self._chain[release] = await self._client.release(release)
            except NotFound:
                self._chain[release] = None
        link = self._chain[release]
        if len(self._chain) > _MAX_LINKS:
            del self._chain[next(iter(self._chain))]
        return link


async def standstill(client: Client, queue: Json) -> Standstill | None:
    """Why the service trains nothing now; None: it does, or does not say. ``queue``: its Client.queue."""
    if queue.get("mode") == "manual" and not queue["reserved"]:
        return Standstill(f"nothing is trained by itself: the mode of {queue['name']} is manual")
    training = await _training(client)
    if training.get("paused"):
        return Standstill(f"training is paused: {training['paused']}")
    if training.get("phase") == "stopped":
        return Standstill(f"training has stopped: {training.get('error')}")
    head = await client.release(queue["head"]) if queue.get("head") else None
    return _held(head, training.get("held") or {}) if head and head.state == "pending" else None


def _held(head: Release, so_far: Json) -> Standstill:
    """What the gate waits for, where the status says it: a command that failed is run again only by a restart."""
    told = f"the gate holds release {head.id} since {_time(head.created_at)}"
    if failed := so_far.get("error"):
        return Standstill(f"{told}: {failed}")
    if missing := so_far.get("missing"):
        told += f", and waits for {', '.join(missing)}"
    return Standstill(told, passes=True)


def _time(created_at: str | float) -> str:
    if isinstance(created_at, str):
        return created_at
    return datetime.fromtimestamp(created_at, UTC).isoformat(sep=" ", timespec="seconds")


async def _training(client: Client) -> Json:
    try:
        return dict((await client.status())["training"] or {})
    except (Forbidden, NotFound):
        return {}  # it is for other keys
