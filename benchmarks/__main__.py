"""`make bench`: every figure of docs/performance.md, each beside its reference in the same run."""

import subprocess
import sys

NAMES = ("engine", "step", "gateway", "loop")  # one process each: none inherits another's threads or memory


def main() -> int:
    return max(subprocess.call([sys.executable, "-m", f"benchmarks.{name}"]) for name in NAMES)


if __name__ == "__main__":
    sys.exit(main())
