"""What is drawn and tabulated of a chain: a figure over its releases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reef_harness.monitor.figures import Reading, by_release, held_out, mean_score, of_method, of_step
from reef_harness.monitor.source import Run
from reef_harness.types import Release

PHASES = ("wait", "reserve", "views", "critic", "forward_backward", "optimizer", "publish", "commit")


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure of a step: its name in the metrics (that of the method left out), and in words with its unit."""

    name: str
    title: str
    short: str


REWARD = Shown("reward_mean", "reward (mean over rollouts trained from)", "reward, trained from")
INFORMATIVE = Shown("informative_group_rate", "groups whose rewards differ (share of all that came)", "informative")
STEP_FIGURES = (
    INFORMATIVE,
    Shown("entropy", "entropy (nats a token)", "entropy"),
    Shown("response_length_mean", "length (sampled tokens, mean)", "length"),
    Shown("truncation_rate", "truncated (share of rollouts)", "truncated"),
    Shown("policy_lag_mean", "staleness (updates, mean)", "lag"),
    Shown("pg_clipfrac", "clipped or masked (share of tokens)", "clipped"),
    Shown("train_rollout_logprob_abs_diff", "trainer - engine |log-probability| (mean)", "logprob gap"),
    Shown("critic/explained_variance", "critic's explained variance", "explained var."),
)


def numbered(releases: Sequence[Release]) -> Iterator[tuple[int, Release]]:
    """Releases with their places in the chain, from 0."""
    for position, release in enumerate(releases):
        yield position if release.number is None else release.number, release


def steps(releases: Sequence[Release]) -> list[tuple[int, Release]]:
    """Those that a step made, with their places."""
    return [(place, release) for place, release in numbered(releases) if release.operation in ("train", "critic-only")]


def series(releases: Sequence[Release], name: str) -> list[tuple[int, float]]:
    """(place, value) of a figure of the steps that have it."""
    found = [(place, of_method(of_step(release), name)) for place, release in steps(releases)]
    return [(place, reading.value) for place, reading in found if reading is not None]


def recorded(run: Run) -> list[tuple[int, float]]:
    """(place, mean score) of the steps: of all recorded answers of the release before, dropped ones included."""
    groups = by_release(run.rollouts or ())
    found = [(place, mean_score(groups.get(release.parent or "", ()))) for place, release in steps(run.releases)]
    return [(place, score) for place, score in found if score is not None]


def components(releases: Sequence[Release]) -> list[str]:
    """The names of the reward's parts, in order."""
    names = {name for _, release in steps(releases) for name in of_step(release) if name.startswith("reward/")}
    return sorted(name.removeprefix("reward/") for name in names)


def measured(releases: Sequence[Release], name: str = "accuracy") -> list[tuple[int, Release, Reading]]:
    """(place, release, reading) of a held-out figure."""
    found = [(place, release, held_out(release).get(name)) for place, release in numbered(releases)]
    return [(place, release, reading) for place, release, reading in found if reading is not None]


def phase_seconds(releases: Sequence[Release]) -> dict[str, list[tuple[int, float]]]:
    """Seconds by phase, of the phases that any step has."""
    found = {phase: series(releases, f"seconds/{phase}") for phase in PHASES}
    return {phase: values for phase, values in found.items() if values}
