"""SIGHUP, which asks a process to reload its settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from bascule.threads.lasting import end_process, lasting_thread

_TERMINAL: Final = 0  # the descriptor of standard input
_held: Final[SimpleQueue[None]] = SimpleQueue()  # a signal may interrupt its own ``put``


def hangup_reloads() -> bool:
    """Return whether SIGHUP asks for a reload. On a terminal, it means that the terminal was closed."""
    return not os.isatty(_TERMINAL)


def hold_hangups() -> None:
    """Keep each SIGHUP until the process can reload; otherwise it would end the process. Call this first, from the main thread.

    ``on_hangup`` and ``take_held`` end it.
    """
    if hangup_reloads():
        signal.signal(signal.SIGHUP, lambda *_: _held.put(None))


def take_held() -> bool:
    """Return whether a SIGHUP was kept. Call this when the process can reload."""
    found = False
    while not _held.empty():
        _held.get()
        found = True
    return found


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
    if take_held():
        came.put(None)
    lasting_thread(run, "hangup", on_failure=end_process).start()
