"""Measures the use of memory for the account, and closes connections that hold too much without reading."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
    from bascule.server.connection_room import UserRoom
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
#: Shares of the limit for incomplete messages, for output that clients do not read, and for incomplete frames.
PARTIAL_SHARE: Final = 0.125
BUFFERS_SHARE: Final = 0.125
FRAMES_SHARE: Final = 0.0625
#: Above one of the last two shares, clients that have read nothing, or have ended no frame, for the first time are disconnected; above
#: twice the share, after the second time.
UNREAD_S: Final = 10.0
UNREAD_PRESSING_S: Final = 1.0
#: Links and sessions that the broker has ended and whose end the client has not answered from one measurement to the next, while the
#: connections of its user have used up their memory. The broker keeps them, and the client could attach any number of links to be refused.
UNANSWERED_MAX: Final = 16
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


class HeldBytes:
    """The bytes that a measurement has found for each connection, and since when the number has not decreased.

    ``since_s`` has both by connection, ``stuck`` also the bytes that are freed with a connection, which may be more.
    """

    __slots__ = ("_before", "now_s", "since_s", "size_bytes", "stuck")

    def __init__(self, before: Mapping[ClientConnection, tuple[int, float]], now_s: float) -> None:
        """``before`` is ``since_s`` of the measurement before."""
        self._before = before
        self.now_s = now_s
        self.size_bytes = 0
        self.since_s: dict[ClientConnection, tuple[int, float]] = {}
        self.stuck: list[tuple[float, int, ClientConnection]] = []

    def add(self, connection: ClientConnection, size_bytes: int, left_bytes: int, *, excused: bool = False) -> None:
        """Add a connection that holds ``size_bytes``. ``left_bytes`` decreases while the client goes on. ``excused``: it need not go on."""
        last_bytes, since_s = self._before.get(connection, (0, self.now_s))
        if left_bytes < last_bytes or excused:
            since_s = self.now_s
        self.since_s[connection] = left_bytes, since_s
        self.size_bytes += size_bytes
        self.stuck.append((since_s, size_bytes, connection))


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
        self._unread, self._unended = HeldBytes({}, 0.0), HeldBytes({}, 0.0)
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
        self._unread, self._unended = HeldBytes({}, 0.0), HeldBytes({}, 0.0)
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
        held_bytes = 0
        rest_bytes: Counter[UserRoom] = Counter()
        overdue: list[tuple[ClientConnection, int]] = []
        unread, unended = HeldBytes(self._unread.since_s, now_s), HeldBytes(self._unended.since_s, now_s)
        for connection in list(self._connections):
            yield CONNECTION_STEPS
            if connection.client.lost:
                continue  # since the work began
            size_bytes = _held_bytes(connection)
            held_bytes += size_bytes
            if (room := connection.client.room) is not None:
                rest_bytes[room] += size_bytes - _counted_bytes(connection)
            if (unanswered := connection.amqp.link_counts.overdue()) > UNANSWERED_MAX and not connection.unread:
                overdue.append((connection, unanswered))
            if unread_bytes := connection.unread_bytes:
                unread.add(connection, unread_bytes, connection.unsent_bytes)
            if frame_bytes := len(connection.amqp.buffer.kept):
                unended.add(connection, frame_bytes, frame_bytes, excused=room is None or connection.unread)
        parts: dict[MemoryPart, int] = {}
        yield from measuring(self._engine, parts, now_s)
        if self._stopped:
            return
        self._unread, self._unended = unread, unended
        for room, size_bytes in rest_bytes.items():
            room.measured(size_bytes)
        account = self._account
        account.shortage = self._spill.look()
        if self._spill.waiting_bytes:
            self._write_large()  # again, if the disk has failed
        account.measured(
            {
                **parts,
                MemoryPart.PARTIAL: self._partials.used_bytes + unended.size_bytes,
                MemoryPart.BUFFERS: unread.size_bytes + self._spill.waiting_bytes,
                MemoryPart.CONNECTIONS: held_bytes,
            }
        )
        if not self._compacting and self._spill.wasteful:
            self._engine.turns.begin(self._compaction())
        yield from self._drop_overdue(overdue)
        yield from self._drop(unread, BUFFERS_SHARE, "bytes wait for this client, and the client has read nothing")
        yield from self._drop(unended, FRAMES_SHARE, "bytes of a frame have arrived, and the frame has not ended")

    def _compaction(self) -> Work:
        self._compacting = True
        try:
            yield from self._spill.compaction()
        except OSError as error:
            log.debug("compaction of spill files failed", error=error)  # logged at each measurement
        finally:
            self._compacting = False

    def _drop_overdue(self, overdue: list[tuple[ClientConnection, int]]) -> Work:
        """Disconnect the clients that do not answer the ends of their links and sessions, if their users have no memory left."""
        for connection, unanswered in overdue:
            room = connection.client.room
            if room is not None and not room.has_room():
                log.warning("client does not answer", peer=connection.peer, container=connection.client.container, unanswered=unanswered)
                text = f"the user's connections use too much memory, and the client has not answered {unanswered} detach and end frames"
                connection.drop(AmqpError(RESOURCE_LIMIT_EXCEEDED, text))
                yield DROP_STEPS

    def _drop(self, held: HeldBytes, share: float, what: str) -> Work:
        """Disconnect the clients for which the broker has held bytes for longest, while it holds too many."""
        size_bytes, most_bytes, now_s = held.size_bytes, int(share * self._account.limit_bytes), held.now_s
        for since_s, held_bytes, connection in sorted(held.stuck, key=lambda each: each[0]):
            if size_bytes <= most_bytes or now_s - since_s < (UNREAD_PRESSING_S if size_bytes > 2 * most_bytes else UNREAD_S):
                return
            size_bytes -= held_bytes
            text = f"{held_bytes} {what} for {now_s - since_s:.0f} s"
            log.warning("client does not go on", peer=connection.peer, container=connection.client.container, reason=text)
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
    links, counts = connection.client.links, amqp.link_counts
    links_bytes = LINK_BYTES * max(len(links), counts.count) + max(links.names_bytes, counts.names_bytes) + links.attach_bytes
    return CONNECTION_BYTES + SESSION_BYTES * len(amqp.sessions) + links_bytes


def _counted_bytes(connection: ClientConnection) -> int:
    """Return the part of the memory of a connection that counts for its user while it is connected: see Usage."""
    client = connection.client
    return CONNECTION_BYTES + SESSION_BYTES * len(client.sessions) + LINK_BYTES * len(client.links)
