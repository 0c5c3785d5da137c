"""Run by the project's own Python: the real service, until our standard input ends. Prints its URL once it is ready."""

import sys
from pathlib import Path

from recipes.arithmetic.service import running_service


def main() -> None:
    """``serve.py CONFIG RUN_DIR FLAG...``"""
    config, run_dir, *flags = sys.argv[1:]
    with running_service(Path(config), Path(run_dir), flags, say=lambda text: print(text, file=sys.stderr)) as url:
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
