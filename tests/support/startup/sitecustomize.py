"""Startup code of each Python process of a test run (by PYTHONPATH): the process writes its stacks on request."""

import os
from contextlib import suppress

# Not in a process that cannot import Bascule, has a closed standard error, or outlives the run's directory.
with suppress(ImportError, OSError, ValueError):
    from bascule.threads.stacks import STACKS_VARIABLE, show_stacks_on_signal

    if STACKS_VARIABLE in os.environ:
        show_stacks_on_signal()
