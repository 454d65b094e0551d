"""The latest end of a process that was asked to end, also while a call of a library holds its main thread."""

from __future__ import annotations

import os
import signal
import time

from bascule.core.log import get_log
from bascule.threads.lasting import end_process, exit_at_once, lasting_thread

log = get_log(__name__)


def end_within(timeout_s: float) -> None:
    """End the process ``timeout_s`` seconds after SIGTERM or SIGINT, as a kill would, unless it has ended. Call this from the main thread.

    The handlers of Python wait for the main thread; the descriptor gets each signal with a handler at once.
    """
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)

    def run() -> None:
        while os.read(receiving, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        time.sleep(timeout_s)
        log.warning("orderly end took too long, process ends", timeout_s=timeout_s)
        exit_at_once(0)

    lasting_thread(run, "prompt-end", on_failure=end_process).start()
