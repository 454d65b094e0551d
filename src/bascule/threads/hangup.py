"""SIGHUP, which asks a process to reload its settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from bascule.threads.lasting import end_process, lasting_thread

_TERMINAL: Final = 0  # the descriptor of standard input


def hangup_reloads() -> bool:
    """Return whether SIGHUP asks for a reload. On a terminal, it means that the terminal was closed."""
    return not os.isatty(_TERMINAL)


def on_hangup(action: Callable[[], None]) -> None:
    """Call ``action`` in a thread for each SIGHUP, if ``hangup_reloads``. Call this from the main thread."""
    if not hangup_reloads():
        return
    came: SimpleQueue[None] = SimpleQueue()  # its ``put`` may interrupt its ``get``

    def run() -> None:
        while True:
            came.get()
            action()

    signal.signal(signal.SIGHUP, lambda *_: came.put(None))
    lasting_thread(run, "hangup", on_failure=end_process).start()
