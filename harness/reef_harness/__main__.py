"""``python -m reef_harness``."""

import sys

from reef_harness.cli import main

sys.exit(main())
