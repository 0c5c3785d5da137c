"""The report as Markdown: what a person wants to know of a run, and what is not known."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean

from reef_harness.evaluation.table import table
from reef_harness.monitor.figures import (
    Reading,
    alarms,
    answers,
    by_release,
    held_out,
    mean_score,
    number,
    of_method,
    of_step,
)
from reef_harness.monitor.gates import Checked, Gates, best, strangers
from reef_harness.monitor.series import (
    INFORMATIVE,
    REWARD,
    STEP_FIGURES,
    Shown,
    components,
    measured,
    numbered,
    phase_seconds,
    recorded,
    series,
    steps,
)
from reef_harness.monitor.source import Run
from reef_harness.monitor.statistics import Correlation, correlation

MOST_ROWS = 12
MOST_FIGURES = 6  # held-out ones of a release; more where there are more sets, each with its accuracy
_NOT_SHOWN = ("correct", "graded", "errors", "samples", "temperature")  # how it was measured, and no result
Rows = Sequence[tuple[str, ...]]


def page(run: Run, checked: Sequence[Checked], gates: Gates, figures: Sequence[str]) -> str:
    """The whole page; ``figures`` are the names of the PNGs beside it."""
    missing = strangers(run, gates) if checked else []
    parts = [
        _head(run),
        _eligible(checked, gates),
        _held_out(run, missing) + _picture("reward", figures, "Reward and held-out accuracy by release"),
        _steps(run, missing) + _picture("steps", figures, "Figures of every step"),
        _length(run, missing) + _picture("length", figures, "Reward against length"),
        _answers(run, missing),
        _time(run, missing) + _picture("time", figures, "Seconds by phase"),
        _queue(run, missing),
    ]
    if missing:
        parts.append("## Not known\n\n" + "".join(f"- {each}\n" for each in missing))
    return "\n".join(part for part in parts if part)


def _picture(name: str, figures: Sequence[str], title: str) -> str:
    return f"\n![{title}]({name}.png)\n" if name in figures else ""


# ---- what it is


def _head(run: Run) -> str:
    releases = run.releases
    lines = [f"# {run.scenario}: report\n"]
    if releases:
        kinds = {kind: sum(each.operation == kind for each in releases) for kind in dict.fromkeys(_operations(run))}
        head = next((each for each in reversed(releases) if each.current), releases[-1])
        lines.append(
            f"{len(releases)} releases ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}), from "
            f"{_when(releases[0].created_at)} to {_when(releases[-1].created_at)}. The head is {head.id}, step "
            f"{head.step}{'' if head.state in (None, 'released') else f', {head.state}'}.\n"
        )
    else:
        lines.append("There are no releases.\n")
    paid, tested = [value for _, value in series(releases, REWARD.name)], measured(releases)
    told = []
    if len(paid) > 1:
        span = min(5, len(paid) // 2)
        ends = f"means of the first and the last {span}" if span > 1 else "the first and the last"
        told.append(
            f"Reward, over the rollouts trained from, went from {number(fmean(paid[:span]))} to "
            f"{number(fmean(paid[-span:]))} ({ends} of {len(paid)} steps)."
        )
    if len(tested) > 1:
        told.append(f"Held-out accuracy went from {tested[0][2]} to {tested[-1][2]}.")
    rung = [release.id for release in releases if alarms(release)]
    if rung:
        told.append(f"**Alarms ring on {', '.join(rung[-3:])}** ({len(rung)} in all).")
    return "\n".join([*lines, " ".join(told) + "\n"] if told else lines)


def _operations(run: Run) -> list[str]:
    return [release.operation for release in run.releases]


def _when(created_at: str | float) -> str:
    if isinstance(created_at, str):
        return created_at
    return datetime.fromtimestamp(created_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- what may be used


def _eligible(checked: Sequence[Checked], gates: Gates) -> str:
    if not checked:
        return ""
    found = best(checked)
    eligible = sum(each.eligible for each in checked)
    text = "## Checkpoints that may be used\n\n"
    if found is None:
        text += "**None is eligible**: a release is, where every gate passes; what is not known does not pass.\n\n"
    else:
        rank = "not known" if found.rank is None else number(found.rank)
        text += (
            f"Eligible: {eligible} of {len(checked)}. **The best by {gates.best} is {found.release.id}** ({rank}).\n\n"
        )
    rows = [
        (
            each.release.id + (" (best)" if each is found else ""),
            "yes" if each.eligible else "no",
            *(_gate_cell(result, reading) for _, result, reading in each.results),
            each.unusable or "yes",
        )
        for each in checked
    ]
    head = ("release", "eligible", *(gate.figure for gate in gates.gates), "weights")
    for gate, *_ in checked[0].results:
        counts = Counter(result for each in checked for of, result, _ in each.results if of is gate)
        text += f"- {gate}: " + ", ".join(f"{result} {count}" for result, count in sorted(counts.items())) + "\n"
    return text + "\n" + _table(head, rows, lambda row: row[1] == "yes", lambda row: row[0].endswith("(best)"))


def _gate_cell(result: str, reading: Reading | None) -> str:
    return result if reading is None else f"{reading}{'' if result == 'passed' else ': ' + result}"


# ---- held out, steps


def _held_out(run: Run, missing: list[str]) -> str:
    tested = [(release, held_out(release)) for release in run.releases]
    tested = [(release, found) for release, found in tested if found]
    if not tested:
        missing.append("held-out results: none is stored on a release (`reef-harness evaluate --store`)")
    marked = [release for release in run.releases if alarms(release)]
    if not tested and not marked:
        return "## Reward\n" if series(run.releases, REWARD.name) else ""
    text = "## Held-out results and marks\n\n"
    if tested:
        names, left_out = _names(tested)
        rows = [
            (release.id, str(release.step), *(_cell(found.get(name)) for name in names)) for release, found in tested
        ]
        text += _table(("release", "step", *names), rows)
        if left_out:
            more = f" and {len(left_out) - MOST_ROWS} more" if len(left_out) > MOST_ROWS else ""
            text += f"\nFigures left out, all in run.json: {', '.join(left_out[:MOST_ROWS])}{more}.\n"
    for release in marked[-MOST_ROWS:]:
        for alarm in alarms(release):
            text += f"\n- {release.id} rings: {alarm.get('message') or alarm.get('metric')}"
    held = [each for each in run.releases if each.state not in (None, "released")]
    for release in held[-MOST_ROWS:]:
        text += f"\n- {release.id} is {release.state}: {release.raw.get('reason') or 'no reason is given'}"
    return text.rstrip() + "\n"


def _names(tested: Sequence[tuple[object, Mapping[str, Reading]]]) -> tuple[list[str], list[str]]:
    """Names of figures: those that are shown, every set's accuracy first, and those that are left out."""
    found = {name: reading.low is None for _, figures in tested for name, reading in figures.items()}
    accuracies = [name for name in sorted(found) if name.endswith("_accuracy") and "greedy_" not in name]
    most = max((int(name[8:]) for name in found if re.fullmatch(r"pass_at_\d+", name)), default=0)
    first = ["accuracy", *accuracies, "greedy_accuracy", f"pass_at_{most}", "majority"]
    rest = sorted(found.keys() - {*first, *_NOT_SHOWN}, key=lambda name: (found[name], name))
    names = [*(name for name in first if name in found), *rest]
    shown = max(MOST_FIGURES, 1 + len(accuracies))
    return names[:shown], names[shown:]


def _cell(reading: Reading | None) -> str:
    return "" if reading is None else str(reading)


def _steps(run: Run, missing: list[str]) -> str:
    made = steps(run.releases)
    if not made:
        missing.append("figures of steps: no release was made by a step")
        return ""
    shown = [each for each in (REWARD, *STEP_FIGURES) if series(run.releases, each.name)]
    gone = [each.title for each in STEP_FIGURES if each not in shown]
    if gone:
        missing.append("no step has: " + "; ".join(gone))
    parts = components(run.releases)
    if not parts:
        missing.append("the reward by component: no report has `rewards`")
    scores = dict(recorded(run))
    beside = ("reward, recorded",) if scores else ()
    head = ("release", *beside, *(each.short for each in shown), *parts)
    rows = [
        (
            release.id,
            *((number(scores[place]) if place in scores else "") for _ in beside),
            *_step_cells(of_step(release), shown, parts),
        )
        for place, release in made
    ]
    text = "## Steps\n\nRewards, lengths and truncation are of the rollouts trained from.\n"
    if INFORMATIVE in shown:
        text += "Informative is the share of groups whose rewards differ, those that were dropped as tied counted in.\n"
    if scores:
        text += "Recorded is the mean score of all recorded answers of the release before, dropped ones included.\n"
    return text + "\n" + _table(head, rows)


def _step_cells(found: Mapping[str, Reading], shown: Sequence[Shown], parts: Sequence[str]) -> list[str]:
    cells = []
    for each in shown:
        cell, spread = _cell(of_method(found, each.name)), found.get("reward_std")
        cells.append(f"{cell} ± {number(spread.value)}" if each is REWARD and cell and spread else cell)
    return cells + [_cell(found.get(f"reward/{part}")) for part in parts]


# ---- length, answers


def _length(run: Run, missing: list[str]) -> str:
    lengths = dict(series(run.releases, "response_length_mean"))
    pairs = [(lengths[place], paid) for place, paid in series(run.releases, REWARD.name) if place in lengths]
    lines = []
    if pairs:
        found = _correlation(correlation(pairs))
        lines.append(f"- by step, mean length in tokens and mean reward of the rollouts trained from: {found}")
    if run.rollouts is not None:
        lines.append(f"- by rollout, characters and score: {_correlation(answers(run.rollouts).length_reward)}")
    else:
        missing.append("length and reward of single rollouts, and unique answers: no records were given (`--records`)")
    return "## Length and reward\n\n" + "\n".join(lines) + "\n" if lines else ""


def _correlation(found: Correlation) -> str:
    if found.pearson is None:
        why = "fewer than three pairs" if found.n < 3 else "one of the two is constant"
        return f"none ({why}, n = {found.n})"
    rank = "" if found.spearman is None else f", of ranks {found.spearman:+.2f}"
    return f"Pearson {found.pearson:+.2f}{rank} (n = {found.n})"


def _answers(run: Run, missing: list[str]) -> str:
    if run.rollouts is None:
        return ""
    groups = by_release(run.rollouts)
    order = [release.id for _, release in numbered(run.releases) if release.id in groups]
    order += [name for name in groups if name not in order]
    whole = answers(run.rollouts)
    if whole.unique_rate is None:
        missing.append("unique answers: no prompt of the records was answered several times at once")
    rows = []
    for name in order:
        found = answers(groups[name])
        score = mean_score(groups[name])
        unique = "" if found.unique_rate is None else f"{found.unique_rate:.3f}"
        pearson = found.length_reward.pearson
        rows.append(
            (
                name,
                str(found.rollouts),
                "" if score is None else number(score),
                unique,
                "" if pearson is None else f"{pearson:+.2f}",
            )
        )
    return (
        f"## Answers\n\n{whole.rollouts} rollouts in the records, {whole.failed} of them failed. Unique is the share "
        "of different texts among the answers to one prompt.\n\n"
        + _table(("answered by", "rollouts", "score", "unique", "length and score"), rows)
    )


# ---- time, queue


def _time(run: Run, missing: list[str]) -> str:
    phases = phase_seconds(run.releases)
    if not phases:
        missing.append("seconds by phase: no step has them")
        return ""
    totals = {phase: sum(value for _, value in values) for phase, values in phases.items()}
    whole = sum(totals.values()) or 1.0
    rows = [
        (phase.replace("_", " "), f"{fmean(value for _, value in phases[phase]):.3f}", f"{totals[phase] / whole:.1%}")
        for phase in totals
    ]
    return "## Time\n\n" + table(("phase", "seconds a step (mean)", "share"), rows)


def _queue(run: Run, missing: list[str]) -> str:
    if run.status is None:
        missing.append("queue and phase: the service's status was not asked, or not told")
        return ""
    scenario, training = run.status.get("scenario") or {}, run.status.get("training") or {}
    if scenario.get("name") != run.scenario:
        return "## Now\n\nThis scenario does not train.\n"
    text = (
        f"## Now\n\nPhase {training.get('phase', 'not known')}; {scenario.get('pending')} reports wait, "
        f"{scenario.get('reserved')} are in a step, a batch is {scenario.get('batch_size')}.\n"
    )
    for name in ("paused", "error", "batch_error"):
        if training.get(name):
            text += f"\n- {name.replace('_', ' ')}: {training[name]}\n"
    return text


_Which = Callable[[tuple[str, ...]], bool]


def _table(
    head: Sequence[str], rows: Rows, keep: _Which = lambda row: False, always: _Which = lambda row: False
) -> str:
    """At most ``MOST_ROWS`` rows, evenly spaced from the first to the last, the last ones to ``keep``, and ``always``.

    Says how many are left out.
    """
    last = len(rows) - 1
    spaced = (
        {round(i * last / (MOST_ROWS - 1)) for i in range(MOST_ROWS)} if len(rows) > MOST_ROWS else range(len(rows))
    )
    kept = [i for i, row in enumerate(rows) if keep(row)][-MOST_ROWS // 2 :]
    chosen = [row for i, row in enumerate(rows) if i in {*spaced, *kept} or always(row)]
    left_out = len(rows) - len(chosen)
    note = f"\n{left_out} of {len(rows)} rows are left out, evenly.\n" if left_out else ""
    return table(head, chosen) + note
