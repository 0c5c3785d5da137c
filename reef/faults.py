"""A breakpoint for tests: where the code can be made to stand still, so that a test can kill -9 whom it likes there.

Off unless the environment variable REEF_FAULTS names a directory. A test arms a point by creating the file DIR/POINT,
whose text says how often to pass it first (empty: not once). The process that reaches it renames it to POINT.reached
and stands until POINT.go is there: the test decides who is killed meanwhile, and lets the others go on.
"""

import os
import time
from pathlib import Path

POLL_S = 0.01
_DIRECTORY = os.environ.get("REEF_FAULTS")


def reach(point: str) -> None:
    """Stand still here, if a test has armed this point. Blocks the thread."""
    if _DIRECTORY is not None:
        _stand(Path(_DIRECTORY), point)


def _stand(directory: Path, point: str) -> None:
    armed, reached, go = directory / point, directory / f"{point}.reached", directory / f"{point}.go"
    try:
        passes = int(armed.read_text() or 0)
        if passes:
            fewer = directory / f"{point}.{os.getpid()}"
            fewer.write_text(str(passes - 1))
            fewer.rename(armed)
            return
        armed.rename(reached)
    except FileNotFoundError:  # not armed, or another process was first
        return
    while not go.exists():
        time.sleep(POLL_S)
