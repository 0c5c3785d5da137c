"""The commands of this room: ``report RUN``."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from reef_harness import service
from reef_harness.monitor import gates as gates_
from reef_harness.monitor.page import page
from reef_harness.monitor.source import Run, from_file, from_service, with_rollouts

NONE_ELIGIBLE = 3


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
    parser = commands.add_parser(
        "report",
        help="what a run did, on one page",
        description="Write report.md with figures. Exit status 3: --gates was given, and no release is eligible.",
    )
    service.add_options(parser)
    parser.add_argument(
        "source", nargs="?", metavar="RUN", help="a scenario of the service, or the run.json of an earlier report"
    )
    parser.add_argument("--records", type=Path, action="append", default=[], help="a driver's JSONL; may be repeated")
    parser.add_argument("--gates", type=Path, help="TOML: which releases may be used (else: mild defaults)")
    parser.add_argument("--out", type=Path, default=Path("work/report"), help="directory (work/report)")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    gates = gates_.read_gates(arguments.gates) if arguments.gates else gates_.DEFAULT
    run = with_rollouts(_run(arguments), arguments.records, _say)
    checked = gates_.check(run, gates)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    drawn = _draw(out, run)
    (out / "run.json").write_text(json.dumps(run.json(), indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(page(run, checked, gates, drawn), encoding="utf-8")
    for each in gates_.strangers(run, gates) if arguments.gates else ():
        _say(each)
    found = gates_.best(checked)
    print(f"best eligible release: {found.release.id if found else 'none'}")
    _say(f"wrote {out / 'report.md'}, run.json{''.join(f', {name}.png' for name in drawn)}")
    return NONE_ELIGIBLE if arguments.gates and found is None else 0


def _run(arguments: argparse.Namespace) -> Run:
    if arguments.source is not None and Path(arguments.source).is_file():
        return from_file(Path(arguments.source))
    if arguments.source is not None and arguments.source.endswith((".json", ".jsonl")):
        raise FileNotFoundError(f"there is no file {arguments.source}")
    if arguments.source is not None:
        arguments.scenario = arguments.source
    return asyncio.run(_ask(arguments))


async def _ask(arguments: argparse.Namespace) -> Run:
    async with await service.connect(arguments) as client:
        return await from_service(client)


def _draw(out: Path, run: Run) -> list[str]:
    """Draw what can be drawn, take away what an earlier report drew; the names."""
    try:
        from reef_harness.monitor import plot
    except ImportError:
        _say("no figures: they need matplotlib (pip install 'reef-harness[plot]')")
        return []
    drawn = []
    for name, draw in plot.FIGURES:
        path = out / f"{name}.png"
        path.unlink(missing_ok=True)
        if draw(path, run):
            drawn.append(name)
    return drawn


def _say(text: str) -> None:
    print(text, file=sys.stderr)
