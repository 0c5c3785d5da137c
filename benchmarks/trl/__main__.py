"""Both sides, one after the other, for each model and seed; then accuracies, a table, the page: `make bench-trl`.

    python -m benchmarks.trl [--models starter 5M] [--seeds 0 1 2] [--steps 60] [--problems 1000]

The clock runs from the first rollout until the weights are there (Reef: until their release is durable), with nothing
being measured meanwhile: both sides leave weights, and the same code measures them afterwards. Starts are not counted
on either side. Writes work/bench/trl.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers

from benchmarks import report
from benchmarks.common import RESULTS, ROOT, STARTER, table, write
from benchmarks.trl import curve, model, service

PEER = ROOT / ".venv-trl" / "bin" / "python"
WORK = RESULTS / "trl"
GAINS = (0.15, 0.35)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and what Reef is told about it."""

    name: str
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        return STARTER if self.name == "starter" else model.grow(STARTER, WORK / "model-5M")


CASES = (Case("starter", ()), Case("5M", ("--training.threads", "2")))


def peer(path: Path, out: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """TRL's run: what peer.py wrote."""
    command = [str(PEER), "-m", "benchmarks.trl.peer", "--model", str(path), "--out", str(out), "--seed", str(seed)]
    command += ["--steps", str(args.steps), "--every", str(args.every)]
    out.mkdir(parents=True)
    with (out / "peer.log").open("wb") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def one(case: Case, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides on one seed, and what they reached."""
    shutil.rmtree(WORK / "run", ignore_errors=True)
    path = case.path
    load = os.getloadavg()[0]
    trl = peer(path, WORK / "run" / "trl", seed, args)
    reef = service.run(path, WORK / "run" / "reef", seed, args.steps, args.every, args.ahead, [*case.flags, *args.flag])
    snapshots = [curve.Snapshot(s["step"], s["seconds"], s["rollouts"], Path(s["path"])) for s in trl["snapshots"]]
    curves = {
        "trl": curve.measure(path, snapshots, args.problems),
        "reef": curve.measure(path, reef.snapshots, args.problems),
    }
    shutil.rmtree(WORK / "run")
    return {
        "model": case.name,
        "seed": seed,
        "load_average_before": load,
        "step_s": {"trl": trl["seconds"] / trl["steps"], "reef": reef.seconds / reef.steps},
        "gains": {str(gain): compare(curves, gain) for gain in GAINS},
        "phases": reef.phases,
        "cpu_s_per_release": {name: seconds / reef.steps for name, seconds in reef.cpu_s.items()},
        "curves": {side: [asdict(point) for point in points] for side, points in curves.items()},
    }


def compare(curves: dict[str, curve.Curve], gain: float) -> dict[str, Any]:
    """Seconds and rollouts of both sides to a gain, and Reef's accuracy when TRL had reached it. None: not reached."""
    trl, reef = (curve.reaches(curves[side], gain) for side in ("trl", "reef"))
    then = curve.at(curves["reef"], trl.seconds) if trl else None
    return {
        "trl": asdict(trl) if trl else None,
        "reef": asdict(reef) if reef else None,
        "ratio": reef.seconds / trl.seconds if reef and trl else None,
        "reef_accuracy_at_trl_seconds": then.accuracy if then else None,
    }


def show(found: dict[str, Any]) -> None:
    """Side by side, and where Reef's time goes."""
    print(f"\n{found['model']}, seed {found['seed']} (load average before: {found['load_average_before']:.1f})")
    print(table(report.TRL_HEAD, report.trl_lines([found])))
    print(table(["Reef, a release", "seconds"], [[name, f"{s:.4f}"] for name, s in found["phases"].items()]))
    used = found["cpu_s_per_release"].items()
    print(table(["Reef, a release", "processor seconds"], [[name, f"{s:.3f}"] for name, s in used]), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write the figures and their section of the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, and releases")
    parser.add_argument("--every", type=int, default=2, help="steps between two measured weights")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems")
    parser.add_argument("--ahead", type=int, default=1, help="batches that Reef's rollouts may run ahead")
    parser.add_argument("--flag", nargs="+", default=[], help="more for reef serve, e.g. --flag=--training.threads 2")
    args = parser.parse_args(argv)
    if not PEER.exists():
        raise SystemExit(f"{PEER} is not there: `make bench-trl` sets it up and then runs this")
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    runs = []
    for case in (case for case in CASES if case.name in args.models):
        for seed in args.seeds:
            runs.append(one(case, seed, args))
            show(runs[-1])
    write("trl", {"steps": args.steps, "problems": args.problems, "every": args.every, "runs": runs})
    report.put_trl()


if __name__ == "__main__":
    main()
