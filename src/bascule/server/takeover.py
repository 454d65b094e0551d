"""Takeover from a broker whose process has ended: performs the effects of :mod:`bascule.broker.takeover`."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from bascule.broker.takeover import MessageKind, PeerMessage, TakeoverProtocol, WatchState, decode
from bascule.config import Settings
from bascule.core.effects import Severity
from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.embedded.process import PortInUse
from bascule.kafka.broadcast import Broadcast
from bascule.kafka.eviction import evict
from bascule.server.descriptors import RESERVED, RESERVED_FOR_ADMIN
from bascule.server.effects import LoopEffects, write_note
from bascule.server.standbys import StandbyListener, watch

log = get_log(__name__)


class Takeover(LoopEffects):
    """The effects of the takeover of a broker process, on its loop from ``start`` to ``close``."""

    def __init__(self, kafka: Mapping[str, Any], settings: Settings, member: Callable[[], str]) -> None:
        """``member`` returns the id of this broker as a member of the group."""
        super().__init__("takeover")
        self._kafka = kafka
        self._settings = settings
        self._member = member
        self._is_elected = False
        self._closed = False
        self._name = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
        self._protocol = TakeoverProtocol(self, self._name, settings.broker.takeover_after_s)
        self._listener: StandbyListener | None = None
        self._broadcast: Broadcast | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen for standbys, and seek the elected broker. Raises PortInUse."""
        broker, port = self._settings.broker, self._settings.broker.standby_port
        try:
            self._listener = StandbyListener(broker.host, port, RESERVED + RESERVED_FOR_ADMIN, self._expected)
        except OSError as error:
            raise PortInUse(f"broker.standby_port {port} on {broker.host} cannot be used ({error.strerror}); choose another") from error
        self._broadcast = Broadcast(self._kafka, self._settings.journal_topics.brokers, self._post)
        self._protocol.start()

    async def close(self) -> None:
        """Stop. A standby that is connected does not challenge this broker."""
        self._closed = True
        self._protocol.close()
        self.cancel_spawned()
        if self._listener is not None:
            self._listener.close()
        if self._broadcast is not None:
            await self.off_loop(self._broadcast.close)

    @property
    def watches_elected(self) -> bool:
        """Return whether there is a connection to the elected broker."""
        return self._protocol.state is WatchState.WATCHING

    def election_changed(self, elected: bool) -> None:
        """Note whether this broker is elected."""
        if self._closed:
            return
        self._is_elected = elected
        if elected:
            self._protocol.elected()
        else:
            self._protocol.not_elected()

    def _expected(self) -> str:
        return self._member() if self._is_elected else ""

    def _post(self, value: bytes | None) -> None:
        """Pass a message to the loop; called by the thread that reads the topic."""
        message = decode(value)
        if message is not None:
            with suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._received, message)

    def _received(self, message: PeerMessage) -> None:
        if not self._closed:
            self._protocol.received(message)

    # -- effects: see bascule.broker.takeover.WatchEffects ----------------------------------------------------------------

    def send(self, message: PeerMessage) -> None:
        """Append a message to the topic."""
        if self._broadcast is not None:
            self._broadcast.send(message.encode())

    def here(self) -> PeerMessage:
        """Return the answer of this broker."""
        host, _, port = (self._settings.broker.standby_address or "").rpartition(":")
        if not host:
            host, port = _reachable(self._settings.broker.host), str(self._listener.port if self._listener is not None else 0)
        return PeerMessage(
            MessageKind.HERE, self._name, instance=self._settings.instance, member=self._member(), host=host.strip("[]"), port=int(port)
        )

    def connect(self, attempt: int, elected: PeerMessage) -> None:
        """Open a connection to the elected broker."""
        self.disconnect()
        self._watching = self._loop.create_task(self._watch(attempt, elected), name="watch-elected")

    async def _watch(self, attempt: int, elected: PeerMessage) -> None:
        try:
            await watch(elected.host, elected.port, elected.member, lambda: self._protocol.connected(attempt))
        except Exception as error:  # mostly an OSError. No other one may end the watch either
            log.debug("connection to the elected broker lost", elected=elected.instance, error=repr(error))
            if not isinstance(error, OSError):
                log.error("watch of the elected broker failed, will retry", elected=elected.instance, exc_info=error)
            self._protocol.lost(attempt, refused=isinstance(error, ConnectionError))
        else:
            self._protocol.dismissed(attempt)

    def disconnect(self) -> None:
        """Close the connection to the elected broker."""
        task, self._watching = self._watching, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def dismiss(self) -> None:
        """Close the connections of standbys."""
        if self._listener is not None:
            self._listener.dismiss()

    def replace(self, elected: PeerMessage) -> None:
        """Remove a member from the group that elects."""
        self.spawn(self._replace(elected))

    async def _replace(self, elected: PeerMessage) -> None:
        names, timeout_s = self._settings.journal_topics, self._settings.broker.session_timeout_s
        try:
            removed = await self.off_loop(evict, self._kafka, names.brokers, names.journal, elected.instance, elected.member, timeout_s)
            if not removed:
                log.info("broker to replace has left the group", instance=elected.instance)
        except Exception as error:  # without the next line, this broker would replace no other one any more
            reason = error if isinstance(error, BasculeError) else repr(error)
            log.warning("broker to replace keeps its place until its session ends", instance=elected.instance, reason=reason)
        self._protocol.replaced()

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Write to the log."""
        write_note(log, severity, event, detail, error)


def _reachable(host: str) -> str:
    """Return a name under which other machines find a host on which this process listens."""
    try:
        is_any = not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = False
    return socket.gethostname() if is_any else host
