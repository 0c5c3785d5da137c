"""The gate: whether held-out results and live traffic let a release be served.

A result is any JSON object. Its figures are its numbers, and the objects {value, low, high} in it; below `metrics` too.
Of a metric that several results name, the last one counts.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from reef.config import EvaluationSection, Threshold
from reef.errors import ReefError

Z_95 = 1.959963984540054  # 95% of a normal distribution lies within so many deviations
OUTPUT_BYTES = 4000  # of a failed command's last words


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and the ends of its interval (the value itself where none was given)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a gate says. Neither failed nor missing: the release has passed."""

    failed: tuple[str, ...] = ()  # a sentence each
    missing: tuple[str, ...] = ()  # metrics that no result holds yet

    @property
    def passed(self) -> bool:
        return not self.failed and not self.missing


def judge(gate: Mapping[str, Threshold], results: Iterable[Mapping[str, Any]]) -> Verdict:
    """Compare a release's results with every threshold; the lower end of an interval must reach `min`, and so on."""
    figures = read_figures(results)
    failed, missing = [], []
    for name, threshold in gate.items():
        figure = figures.get(plain(name))
        if figure is None:
            missing.append(name)
            continue
        if threshold.min is not None and not figure.low >= threshold.min:
            failed.append(f"{name} is {_show(figure)}, at least {threshold.min:g} is needed")
        if threshold.max is not None and not figure.high <= threshold.max:
            failed.append(f"{name} is {_show(figure)}, at most {threshold.max:g} is allowed")
    return Verdict(tuple(failed), tuple(missing))


def read_figures(results: Iterable[Mapping[str, Any]]) -> dict[str, Figure]:
    """The figures of results by name (`-` and `_` are the same), later ones over earlier ones.

    An `accuracy` beside a `low` and a `high` in the same object has these as its interval: the harness posts it so.
    """
    figures: dict[str, Figure] = {}
    for result in results:
        nested = result.get("metrics")
        for values in (result, nested if isinstance(nested, Mapping) else {}):
            for name, value in values.items():
                if is_number(value):
                    figures[plain(name)] = Figure(value, value, value)
                elif isinstance(value, Mapping) and is_number(value.get("value")):
                    ends = [value[end] if is_number(value.get(end)) else value["value"] for end in ("low", "high")]
                    figures[plain(name)] = Figure(value["value"], *ends)
            if all(is_number(values.get(name)) for name in ("accuracy", "low", "high")):
                figures["accuracy"] = Figure(values["accuracy"], values["low"], values["high"])
    return figures


def compare(candidate: Sequence[tuple[str, float]], served: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Candidate minus served, as a result with the figure `canary`: its mean difference in score, with a 95% interval.

    Both sides are (prompt, score) of graded answers. Where at least two prompts were answered by both, it is the mean
    of the differences of their means (paired); else the difference of all means. Normal approximation.
    """
    ours, theirs = _by_prompt(candidate), _by_prompt(served)
    both = sorted(set(ours) & set(theirs))
    if len(both) >= 2:
        differences = np.array([np.mean(ours[prompt]) - np.mean(theirs[prompt]) for prompt in both])
        difference, variance = float(differences.mean()), float(differences.var(ddof=1)) / len(both)
    else:
        left, right = (np.array([score for _, score in side]) for side in (candidate, served))
        difference = float(left.mean() - right.mean())
        variance = float(left.var(ddof=1)) / len(left) + float(right.var(ddof=1)) / len(right)
    spread = Z_95 * math.sqrt(variance)
    return {
        "kind": "canary",
        "metrics": {"canary": {"value": difference, "low": difference - spread, "high": difference + spread}},
        "reports": {"candidate": len(candidate), "served": len(served)},
        "paired_prompts": len(both) if len(both) >= 2 else 0,
    }


async def run_command(settings: EvaluationSection, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Run `evaluation.command`; the JSON object on the last line that it printed. None: it printed none (it posted).

    Raises:
        ReefError: it could not be started, failed, or took longer than `evaluation.command-timeout-s`.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise ReefError(f"evaluation.command {settings.command[0]} cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(settings.command_timeout_s):
            output, errors = await process.communicate()
    except TimeoutError:
        raise ReefError(
            f"evaluation.command took longer than {settings.command_timeout_s:g} s (evaluation.command-timeout-s)"
        ) from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        said = errors[-OUTPUT_BYTES:].decode(errors="replace").strip()
        raise ReefError(f"evaluation.command ended with {process.returncode}: {said or 'it said nothing'}")
    last = output.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        result = json.loads(last) if last else None
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def _by_prompt(graded: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for prompt, score in graded:
        found.setdefault(prompt, []).append(score)
    return found


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(name: str) -> str:
    """A metric's name in one way of writing."""
    return str(name).replace("_", "-")


def _show(figure: Figure) -> str:
    if figure.low == figure.high:
        return f"{figure.value:.4g}"
    return f"{figure.value:.4g} [{figure.low:.4g}, {figure.high:.4g}]"
