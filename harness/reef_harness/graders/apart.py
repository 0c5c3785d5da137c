"""One question to a script in a process of its own, whose time and memory are bounded; the answer is JSON."""

import json
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from reef_harness.graders.process import run
from reef_harness.types import Json

_OUTPUT_BYTES = 1 << 20


class TookTooLong(Exception):  # noqa: N818
    """It was ended for its time."""


class ScriptFailed(Exception):  # noqa: N818
    """It ended without an answer; the message is the end of what it said."""


def need(module: str, extra: str) -> None:
    """Raise ValueError where an extra's package is not installed."""
    if find_spec(module) is None:
        raise ValueError(f"the grader {extra} needs the package {module}: pip install 'reef-harness[{extra}]'")


def ask(script: Path, question: Json, *, timeout_s: float, memory_mib: int) -> Json:
    """Send ``question`` to ``script`` and return its answer.

    The script is started as ``script CPU_SECONDS MEMORY_BYTES`` and limits itself with these before it reads.
    Raises TookTooLong and ScriptFailed.
    """
    argv = [sys.executable, "-I", "-B", str(script), str(int(timeout_s) + 1), str(memory_mib << 20)]
    with tempfile.TemporaryDirectory(prefix="reef-grader-") as name:
        finished = run(
            argv,
            json.dumps(question).encode(),
            wall_s=timeout_s,
            output_bytes=_OUTPUT_BYTES,
            cwd=Path(name),
            env={"LANG": "C.UTF-8", "HOME": name, "OPENBLAS_NUM_THREADS": "1"},
        )
    if finished.ended == "time" or finished.code == -signal.SIGXCPU:
        raise TookTooLong(f"no answer within {timeout_s:g} s")
    try:
        answer = json.loads(finished.stdout) if finished.code == 0 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        said = finished.stderr.decode(errors="replace").strip()[-300:]
        raise ScriptFailed(f"{script.name} ended with {finished.code}: {said}")
    return answer
