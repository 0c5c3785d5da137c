"""What a report is written about: a scenario of a service, or what was kept of one; and a driver's records."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reef_harness import wire
from reef_harness.client import Client
from reef_harness.drivers.records import Rollout, read_rollouts
from reef_harness.errors import Forbidden, HarnessError
from reef_harness.monitor.figures import is_number
from reef_harness.types import Json, Release


@dataclass(frozen=True, slots=True)
class Run:
    """All that is known of a run.

    ``releases`` are oldest first. ``status`` is the service's, None where it was not asked or did not tell.
    ``rollouts`` are those of the records, None where none were given.
    """

    scenario: str
    releases: tuple[Release, ...]
    status: Json | None = None
    rollouts: tuple[Rollout, ...] | None = None

    def json(self) -> Json:
        """What :func:`from_file` reads: all but the rollouts, which are kept where they are."""
        return {
            "scenario": self.scenario,
            "releases": [release.raw for release in reversed(self.releases)],
            "status": self.status,
        }


async def from_service(client: Client) -> Run:
    """The whole chain and the status of the client's scenario. A key that may not see the status leaves it out."""
    releases = await client.releases(limit=None)
    try:
        status: Json | None = await client.status()
    except Forbidden:
        status = None
    return Run(str(client.scenario), tuple(reversed(releases)), status)


def from_file(path: Path) -> Run:
    """A run that an earlier report kept (run.json), or the answer of ``GET /reef/scenarios/S/releases``, as a file.

    Raises HarnessError for a file that is neither.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8-sig"))
        releases = [_checked(wire.release(entry)) for entry in body["releases"]]
        scenario, status = str(body["scenario"]), body.get("status")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HarnessError(
            f"{path}: expected a run.json, or the JSON of GET /reef/scenarios/S/releases: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Run(scenario, tuple(reversed(releases)), status)


def _checked(release: Release) -> Release:
    """The same; ValueError where a page could not be written of it."""
    if not isinstance(release.created_at, str) and not is_number(release.created_at):
        raise ValueError(f"{release.id}: created_at must be a time, got {release.created_at!r}"[:200])
    for name in ("evaluations", "alarms"):
        told = release.raw.get(name) or []
        if not isinstance(told, list) or not all(isinstance(each, dict) for each in told):
            raise ValueError(f"{release.id}: {name} must be a list of objects, got {told!r}"[:200])
    return release


def with_rollouts(run: Run, paths: Sequence[Path], say: Callable[[str], None] = lambda text: None) -> Run:
    """The same run with the rollouts of drivers' records; those of answers that failed are among them.

    Records of one driver's run that are given twice (a file, or a copy of it) count once, the longer ones; ``say`` is
    told. Raises WrongRecords for a file that is none of a driver's.
    """
    if not paths:
        return run
    found: dict[str, list[Rollout]] = {}
    for path in paths:
        rollouts, name = read_rollouts(path), _run_of(path)
        if name in found:
            say(f"{path} holds the run {name} once more: it is counted once")
        found[name] = max(found.get(name, []), rollouts, key=len)
    return Run(run.scenario, run.releases, run.status, tuple(each for rollouts in found.values() for each in rollouts))


def _run_of(path: Path) -> str:
    """The name of the run that a driver's records are of, "" for a file without a line yet."""
    with path.open("rb") as file:
        first = file.readline()
    return str(json.loads(first).get("run")) if first.endswith(b"\n") else ""
