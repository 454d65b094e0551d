"""A PostgreSQL session with two users: the application (a thread, or tasks of an event loop), and the phases of its branch.

They work on one session, one after the other: the application's connection is taken out of use before a phase begins.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any, Self

import psycopg
from psycopg.pq import ConnStatus, TransactionStatus

from bascule.threads.loops import LoopGone, on_loop
from bascule.xa.errors import BranchRolledBack, Code
from bascule.xa.resource import refuse_ending

#: If a statement is in progress when its transaction ends, the server is asked to cancel it. After this time, in seconds, the session ends.
CANCEL_WITHIN_S = 3.0
#: The server ignores a request that arrives before the statement has begun. The request is repeated after this time, in seconds.
CANCEL_AGAIN_S = 0.1
RELEASE_WITHIN_S = CANCEL_WITHIN_S + 2.0


#: Methods of a connection that end the database transaction of its branch. psycopg itself refuses ``commit`` and ``rollback``.
_ENDING = ("tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback")


def leave_end_to_manager(handle: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Refuse the methods of a handle that would end the database transaction of its branch."""
    for name in _ENDING:
        setattr(handle, name, partial(refuse_ending, name))


class Finished:
    """Replaces the session of a connection whose branch has ended."""

    status = ConnStatus.BAD
    transaction_status = TransactionStatus.UNKNOWN

    def __init__(self, backend_pid: int) -> None:
        self.backend_pid = backend_pid

    def __getattr__(self, name: str) -> Any:
        raise psycopg.OperationalError("the transaction of this connection is over; enlist the resource in the next transaction")


class LoopConnection(psycopg.AsyncConnection[Any]):
    """The handle for asyncio. Commit and rollback are refused, as on every connection with a two-phase transaction."""

    _on: asyncio.AbstractEventLoop

    @classmethod
    def of(cls, connection: psycopg.Connection[Any], loop: asyncio.AbstractEventLoop) -> Self:
        """Return a second object on the session of a connection. It shares psycopg's state of the session."""
        handlers = connection.pgconn.notice_handler, connection.pgconn.notify_handler
        handle = cls(connection.pgconn)
        connection.pgconn.notice_handler, connection.pgconn.notify_handler = handlers
        handle._prepared = connection._prepared  # otherwise both would give the same name to different statements
        handle._tpc = connection._tpc
        handle._on = loop
        leave_end_to_manager(handle)
        return handle

    def cut_off(self) -> None:
        """End the use of the object. Call this from any thread but the loop's.

        Raises BranchRolledBack if a task is within a statement, which is cancelled.
        """
        if isinstance(self.pgconn, Finished):
            return
        try:
            busy = on_loop(self._on, self._release, RELEASE_WITHIN_S)
        except LoopGone:
            if busy := self.lock.locked():
                _shut_down(self.pgconn)
            self._finish()
        if busy:
            raise BranchRolledBack("the application was still using the branch; its statement was cancelled", Code.XA_RBPROTO)

    async def _release(self) -> bool:
        if busy := self.lock.locked():
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_WITHIN_S):
                    await self._cancel_and_finish()
                return True
            _shut_down(self.pgconn)
        async with self.lock:
            self._finish()
        return busy

    async def _cancel_and_finish(self) -> None:
        while True:
            with suppress(psycopg.Error):
                await self.cancel_safe(timeout=CANCEL_WITHIN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_AGAIN_S), self.lock:
                    self._finish()
                    return

    def _finish(self) -> None:
        self.pgconn = Finished(0 if self.pgconn.status == ConnStatus.BAD else self.pgconn.backend_pid)  # type: ignore[assignment]


def interrupt(connection: psycopg.Connection[Any]) -> bool:
    """Cancel the statement of a thread in progress on a connection, or end the session. Return True if there was one."""
    if not connection.lock.locked():
        return False
    until_s = time.monotonic() + CANCEL_WITHIN_S
    while (left_s := until_s - time.monotonic()) > 0:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=left_s)
        if connection.lock.acquire(timeout=CANCEL_AGAIN_S):
            connection.lock.release()
            return True
    _shut_down(connection.pgconn)
    return True


def _shut_down(pgconn: Any) -> None:
    """End a session that another thread or task may be reading from: the reader gets the end of the stream."""
    try:
        with socket.socket(fileno=os.dup(pgconn.socket)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):
        return  # it has ended already
