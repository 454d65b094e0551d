"""Reads ``broker.users_file`` again when it changes, and ends the connections of users who may no longer have them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.sasl import SaslServer
from bascule.config.users_file import Stamp, UsersFileError, stamp
from bascule.core.log import get_log
from bascule.server.user_directory import EndedLogins, UserDirectory, is_private
from bascule.threads.lasting import end_process, lasting_thread

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection

log = get_log(__name__)

#: Interval between two looks at the file.
LOOK_S: Final = 1.0
#: Mechanisms with the passwords of the file.
PASSWORD_MECHANISMS: Final = ("SCRAM-", "PLAIN")


class UsersWatch:
    """Watches the file of users in a thread."""

    def __init__(self, directory: UserDirectory, path: Path, on_change: Callable[[Mapping[str, EndedLogins]], None]) -> None:
        """Begin. ``on_change`` is called on this event loop after each change, with the users whose connections must end."""
        self._directory = directory
        self._path = path
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._stamp: Stamp | None = None  # of the file that was read last
        self._failure = ""
        self._look = threading.Event()
        self._asked = self._over = False
        lasting_thread(self._run, "users-watch", on_failure=end_process).start()

    def ask(self) -> None:
        """Read the file at once, whether it has changed or not."""
        self._asked = True
        self._look.set()

    def close(self) -> None:
        """End the watch without waiting for its thread."""
        self._over = True
        self._look.set()

    def _run(self) -> None:
        while not self._over:
            asked, self._asked = self._asked, False
            self._read_if_changed(asked)
            self._look.wait(LOOK_S)
            self._look.clear()

    def _read_if_changed(self, asked: bool) -> None:
        try:
            found = stamp(self._path)
            if found == self._stamp and not asked:
                return
            self._warn_if_open()
            self._stamp = found
            ended = self._directory.read_again()
        except (OSError, UsersFileError) as error:
            reason = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            if reason != self._failure or asked:
                log.error("users not read again, the users before stay", reason=reason)
            self._failure = reason
            return
        self._failure = ""
        if ended is not None or asked:
            log.info("users read again", users=self._directory.count, ended=len(ended or ()))
        if ended is not None:
            with suppress(RuntimeError):  # the loop may be closed, since nobody waits for this thread
                self._loop.call_soon_threadsafe(self._on_change, ended)

    def _warn_if_open(self) -> None:
        if not is_private(self._path):
            log.warning("other users of the machine may read the users and the hashes of their passwords", file=str(self._path))


def end_connections(connections: Mapping[ClientConnection, None], ended: Mapping[str, EndedLogins]) -> Iterator[None]:
    """End the connections of users, also those that are about to log in: their password may have been checked before the change."""
    for connection in list(connections):
        sasl = connection.sasl
        why = ended.get(sasl.claimed_user)
        if why is not None and not connection.client.ended and (why.all_logins or _with_password(sasl)):
            log.info("connection closed", peer=connection.peer, container=connection.client.container, error=why.reason)
            connection.end(AmqpError(CONNECTION_FORCED, why.reason))
        yield


def _with_password(sasl: SaslServer) -> bool:
    """Return whether a client has logged in, or is logging in, with a password. PLAIN may have a token in its place."""
    return sasl.mechanism.startswith(PASSWORD_MECHANISMS) and sasl.identity is None
