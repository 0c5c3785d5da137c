"""`make bench`: every figure of docs/performance.md, each beside its reference in the same run."""

import subprocess
import sys

# One process each: none inherits another's threads or memory. The last one writes the page.
NAMES = ("engine", "step", "publish", "checkpoint", "gateway", "ledger", "loop", "demo", "report")


def main() -> int:
    for name in NAMES:
        if status := subprocess.call([sys.executable, "-m", f"benchmarks.{name}"]):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
