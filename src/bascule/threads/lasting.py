"""Threads and tasks that run until their owner ends them. An error that ends one of them is always reported, or ends the process.

A thread or task of the broker's process is started with ``on_failure=end_process``: the process ends with ``EXIT_CODE`` and its supervisor
(``bascule up``, systemd, Kubernetes) restarts it. All state that the broker has confirmed is in Kafka, so ending at any point is safe.

A thread or task that may run in a user's program (client, adapter, XA) must not end that program. It is started with a method of its
owner, which fails the owner: from then on each call of the owner raises the error, and waiting calls get it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from bascule.core.log import get_log

log = get_log(__name__)

#: The exit code of a process after a failed thread (EX_SOFTWARE of sysexits.h).
EXIT_CODE: Final = 70


def lasting_thread(target: Callable[[], None], name: str, *, on_failure: Callable[[BaseException], None]) -> threading.Thread:
    """Return a new daemon thread, not started. If ``target`` raises, it logs the error and calls ``on_failure`` with it.

    ``on_failure`` is ``end_process``, or a method that fails the owner of the thread. If ``on_failure`` raises, the process ends.
    """

    def run() -> None:
        try:
            target()
        except BaseException as error:
            log.critical("thread failed", thread=name, error=repr(error), exc_info=error)
            _inform(name, error, on_failure)

    return threading.Thread(target=run, name=name, daemon=True)


def lasting_task(work: Coroutine[Any, Any, None], name: str, *, on_failure: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Return a new task of the running event loop. If ``work`` raises, it logs the error and calls ``on_failure`` with it.

    asyncio itself reports the error only when nobody refers to the task any more. The end of a cancelled task is not reported.
    ``on_failure`` is as for a thread.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(partial(_task_ended, name, on_failure))
    return task


def _task_ended(name: str, on_failure: Callable[[BaseException], None], task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("task failed", task=name, error=repr(error), exc_info=error)
        _inform(name, error, on_failure)


def _inform(name: str, error: BaseException, on_failure: Callable[[BaseException], None]) -> None:
    try:
        on_failure(error)
    except BaseException as second:
        log.critical("could not inform the owner of a failed thread", thread=name, error=repr(second), exc_info=second)
        end_process(second)


def end_process(error: BaseException) -> NoReturn:
    """End this process at once with ``EXIT_CODE``, as a kill would, after writing its log."""
    name = threading.current_thread().name
    with suppress(Exception):
        log.critical("process ends", thread=name, error=repr(error), exit_code=EXIT_CODE)
    exit_at_once(EXIT_CODE)


def exit_at_once(code: int) -> NoReturn:
    """End this process with an exit code, as a kill would, after writing its log."""
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
