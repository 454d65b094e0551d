"""Threads that run until their owner ends them. An error that leaves such a thread is never lost: somebody is told, or the process ends.

A thread of the broker's process is started with ``on_failure=end_process``: the process ends with ``EXIT_CODE`` and whoever supervises it
(``bascule up``, systemd, Kubernetes) starts it again. All that the broker has promised is in Kafka, so that an end at any point is safe.

A thread that may run in a user's program (client, adapter, XA) must not end that program. It is started with a method of its owner, which
fails the owner: from then on each call of the owner raises the error, and what waits for the owner is told.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from bascule.core.log import get_log

log = get_log(__name__)

#: With which a process ends when one of its threads has failed (EX_SOFTWARE of sysexits.h).
EXIT_CODE: Final = 70


def lasting_thread(target: Callable[[], None], name: str, *, on_failure: Callable[[BaseException], None]) -> threading.Thread:
    """Make a daemon thread, not started. If ``target`` raises, it logs the error with the thread's name and calls ``on_failure`` with it.

    ``on_failure`` is ``end_process``, or a method that fails the owner of the thread. If it raises, the process ends.
    """

    def run() -> None:
        try:
            target()
        except BaseException as error:
            log.critical("thread failed", thread=name, error=repr(error), exc_info=error)
            try:
                on_failure(error)
            except BaseException as second:
                log.critical("owner of failed thread not told", thread=name, error=repr(second), exc_info=second)
                end_process(second)

    return threading.Thread(target=run, name=name, daemon=True)


def end_process(error: BaseException) -> NoReturn:
    """End this process at once with ``EXIT_CODE``, as a kill would, after its log is written."""
    name = threading.current_thread().name
    with suppress(Exception):
        log.critical("process ends", thread=name, error=repr(error), exit_code=EXIT_CODE)
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(EXIT_CODE)
