"""`python -m reef` is `reef`."""

import sys

from reef.cli import main

if __name__ == "__main__":
    sys.exit(main())
