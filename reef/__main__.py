"""`reef` and `python -m reef`."""

import os
import signal
import sys

# Until a command handles it, Ctrl-C ends this at once: there is nothing to put in order, and no traceback to read.
signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))

from reef.cli import main  # noqa: E402 - the imports take a second, in which somebody may press it already

if __name__ == "__main__":
    sys.exit(main())
