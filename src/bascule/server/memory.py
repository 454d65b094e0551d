"""Measures the use of memory for the account, and closes connections that hold too much without reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from sys import getsizeof
from typing import TYPE_CHECKING, Final

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.partials import PartialBudget
from bascule.broker.containment import ErrorKind
from bascule.broker.memory import MemoryPart, measuring
from bascule.broker.turns import Work
from bascule.core import caches
from bascule.core.log import get_log

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.server.connection import ClientConnection
    from bascule.server.spill import SpillFiles

log = get_log(__name__)

#: Shortest time between two measurements. Measurements may take a hundredth of the time: with many queues or connections the pause is
#: longer.
MEASURE_S: Final = 0.25
MEASURE_SHARE: Final = 0.01
#: Estimated time of one step of work in turns.
STEP_S: Final = 1e-6
#: Steps to measure a connection, and to drop one.
CONNECTION_STEPS: Final = 3
DROP_STEPS: Final = 1_000
#: Estimated bytes of a connection with its transport and protocol state, a session and a link, with room for TLS and undecoded input. An
#: idle connection with a session adds 9 KiB to the resident memory of a broker (tests/scenarios/test_crowds.py).
CONNECTION_BYTES: Final = 24 << 10
SESSION_BYTES: Final = 4 << 10
LINK_BYTES: Final = 4 << 10
#: Links that the broker has ended and that are looked at in one step.
ENDED_PER_STEP: Final = 2
#: Share of the limit for incomplete messages, and share for output that clients do not read.
PARTIAL_SHARE: Final = 0.125
BUFFERS_SHARE: Final = 0.125
#: Above that share, clients that have read nothing for the first time are disconnected; above twice the share, after the second time.
UNREAD_S: Final = 10.0
UNREAD_PRESSING_S: Final = 1.0
#: Caches are emptied this long after a connection has ended, and at most this often: their content serves clients that stay.
FORGET_S: Final = 1.0


def partial_budget(limit_bytes: int) -> PartialBudget:
    """Return the budget that the connections of a broker share for incomplete messages."""
    return PartialBudget(int(PARTIAL_SHARE * limit_bytes), lambda connection: connection.context.touch())


class PeerCaches:
    """Empties the caches of client data soon after a client has gone, once for many clients."""

    def __init__(self, engine: Callable[[], Engine | None], gone: Callable[[int], None] = lambda _: None) -> None:
        """Begin without a client gone. ``engine`` returns the current engine, whose cached routes are also forgotten.

        ``gone(count)`` is called after the caches were emptied, with the number of clients that have gone.
        """
        self._engine = engine
        self._tell_gone = gone
        self._gone = 0
        self._timer: asyncio.TimerHandle | None = None

    def client_gone(self) -> None:
        """Empty the caches within ``FORGET_S``."""
        self._gone += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FORGET_S, self._empty)

    def _empty(self) -> None:
        self._timer = None
        caches.forget_peers()
        engine = self._engine()
        if engine is not None:
            engine.addresses.forget_routes()
        gone, self._gone = self._gone, 0
        self._tell_gone(gone)


class MemoryWatch:
    """Watches the memory of one engine and of the connections to it, from ``start`` to ``stop``."""

    def __init__(
        self,
        engine: Engine,
        spill: SpillFiles,
        partials: PartialBudget,
        connections: Iterable[ClientConnection],
        dispatch: Callable[[], None],
    ) -> None:
        """Watch an engine and its connections. ``dispatch`` ends a turn of the loop: see Node."""
        self._engine = engine
        self._account = engine.memory
        self._spill = spill
        self._partials = partials
        self._connections = connections
        self._dispatch = dispatch
        self._unread: dict[ClientConnection, tuple[int, float]] = {}  # bytes, and since when the number has not decreased
        self._timer: asyncio.TimerHandle | None = None
        self._account.on_change = self._changed
        self._compacting = self._writing = False
        self._stopped = False

    def start(self) -> None:
        """Measure now and periodically. Large bodies are written to the spill files in turns from now on."""
        self._spill.on_waiting = self._write_large
        self._engine.turns.begin(self._measuring(time.monotonic(), again=True))
        self._dispatch()

    def stop(self) -> None:
        """Stop measuring."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._unread.clear()
        self._spill.on_waiting = None

    def _write_large(self) -> None:
        if not self._writing:
            self._writing = True
            self._engine.turns.begin(self._large_written())

    def _large_written(self) -> Work:
        try:
            yield 1  # the body is stored, and the caller goes on, before the first piece is written
            yield from self._spill.writing()
        finally:
            self._writing = False

    def measure(self, now_s: float) -> None:
        """Tell the account how much memory is used: at once, or after some turns if there are many connections or queues."""
        self._engine.turns.begin(self._measuring(now_s))
        self._dispatch()

    def _measuring(self, now_s: float, *, again: bool = False) -> Work:
        """Measure once, and plan the next time if ``again``. An error must not end the epoch, as it would in another turn."""
        steps = 0
        try:
            for cost in self._measured(now_s):
                steps += cost
                yield cost
        except Exception as error:
            self._engine.journaling.errors.contain(ErrorKind.TIMER, error)
        if again and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(max(MEASURE_S, steps * STEP_S / MEASURE_SHARE), self.start)

    def _measured(self, now_s: float) -> Work:
        buffers_bytes = held_bytes = 0
        stuck: list[tuple[float, int, ClientConnection]] = []
        before = self._unread
        unread: dict[ClientConnection, tuple[int, float]] = {}
        for connection in list(self._connections):
            yield CONNECTION_STEPS
            if connection.client.lost:
                continue  # since the work began
            held_bytes += _held_bytes(connection)
            if ended_bytes := _ended_bytes(connection):
                held_bytes += ended_bytes
                yield ended_bytes // LINK_BYTES // ENDED_PER_STEP
            if unread_bytes := connection.unread_bytes:
                buffers_bytes += unread_bytes
                unsent_bytes = connection.unsent_bytes
                last_bytes, since_s = before.get(connection, (0, now_s))
                if unsent_bytes < last_bytes:
                    since_s = now_s
                unread[connection] = unsent_bytes, since_s
                stuck.append((since_s, unread_bytes, connection))
        parts: dict[MemoryPart, int] = {}
        yield from measuring(self._engine, parts, now_s)
        if self._stopped:
            return
        self._unread = unread
        account = self._account
        account.shortage = self._spill.look()
        if self._spill.waiting_bytes:
            self._write_large()  # again, if the disk has failed
        account.measured(
            {
                **parts,
                MemoryPart.PARTIAL: self._partials.used_bytes,
                MemoryPart.BUFFERS: buffers_bytes + self._spill.waiting_bytes,
                MemoryPart.CONNECTIONS: held_bytes,
            }
        )
        if not self._compacting and self._spill.wasteful:
            self._engine.turns.begin(self._compaction())
        yield from self._drop_stuck(stuck, buffers_bytes, now_s)

    def _compaction(self) -> Work:
        self._compacting = True
        try:
            yield from self._spill.compaction()
        except OSError as error:
            log.debug("compaction of spill files failed", error=error)  # logged at each measurement
        finally:
            self._compacting = False

    def _drop_stuck(self, stuck: list[tuple[float, int, ClientConnection]], buffers_bytes: int, now_s: float) -> Work:
        """Disconnect the clients that have not read for longest, while such clients hold too much."""
        share = int(BUFFERS_SHARE * self._account.limit_bytes)
        for since_s, unread_bytes, connection in sorted(stuck, key=lambda each: each[0]):
            if buffers_bytes <= share or now_s - since_s < (UNREAD_PRESSING_S if buffers_bytes > 2 * share else UNREAD_S):
                return
            buffers_bytes -= unread_bytes
            text = f"{unread_bytes} bytes wait for this client, and the client has read nothing for {now_s - since_s:.0f} s"
            log.warning("client does not read", peer=connection.peer, container=connection.client.container, unread_bytes=unread_bytes)
            connection.drop(AmqpError(RESOURCE_LIMIT_EXCEEDED, text))
            yield DROP_STEPS

    def _changed(self) -> None:
        account = self._account
        if account.blocked:
            parts = {part: used for part, used in account.parts().items() if used}
            log.warning("producers blocked", reason=account.blocked, used_bytes=account.used_bytes, **_by_name(parts))
        else:
            log.info("producers unblocked", used_bytes=account.used_bytes, limit_bytes=account.limit_bytes)


def _by_name(parts: dict[MemoryPart, int]) -> dict[str, int]:
    return {f"{part}_bytes": used for part, used in parts.items()}


def _held_bytes(connection: ClientConnection) -> int:
    """Return the memory of a connection.

    The client's links lack those that were refused and whose detach the peer has not answered. The protocol's links lack those of a session
    that has ended and that the client releases in later turns.
    """
    amqp = connection.amqp
    links, counts = connection.client.links, connection.amqp.link_counts
    links_bytes = LINK_BYTES * max(len(links), counts.count) + max(links.names_bytes, counts.names_bytes) + links.attach_bytes
    return CONNECTION_BYTES + len(amqp.buffer.kept) + SESSION_BYTES * len(amqp.sessions) + links_bytes


def _ended_bytes(connection: ClientConnection) -> int:
    """Return the memory of the links that the broker has refused or ended, and whose client has not answered the detach."""
    links, sessions = connection.client.links, connection.amqp.sessions.values()
    if sum(len(session.links) for session in sessions) <= len(links):
        return 0
    return sum(LINK_BYTES + getsizeof(link.name) for session in sessions for link in session.links.values() if link not in links)
