"""A message in the broker: opaque AMQP bytes, and the values that dispatching needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from bascule.broker.errors import BodyUnavailable, BrokerFault
from bascule.broker.memory import MemoryAccount
from bascule.broker.schedule import ScheduledAction
from bascule.core.errors import BasculeError
from bascule.jms.sections import group_of
from bascule.journal.records import SendFlag

#: Priorities run from 0 to 9, 4 is the default (Jakarta Messaging 3.1, section 3.4.9).
DEFAULT_PRIORITY: Final = 4
PRIORITY_MAX: Final = 9
#: Bytes of a stored body that are read in one step.
STORED_BYTES_PER_STEP: Final = 1_000
#: The bodies of a record are stored together if they have less than this: a usual record has at most 256 KiB.
STORED_TOGETHER_BYTES: Final = 1 << 20


def stored_group(flags: int, body: bytes) -> str | None:
    """Return the group (JMSXGroupID) of a journaled message, whose SEND entry has ``flags``.

    Return None if the properties of the message cannot be read, since no stored message may keep a broker from starting.
    """
    if flags & SendFlag.GROUPED:
        with suppress(BasculeError):
            return group_of(body)
    return None


class BodyOwner(Protocol):
    """The object that identifies a stored body by its handle. The body has ``size_bytes``."""

    handle: int
    size_bytes: int


class BodyStore(Protocol):
    """A store for bodies that do not fit into memory. It is only a cache: the journal has the same bodies."""

    @property
    def roomy(self) -> bool:
        """Return True if most of the room is left: bodies may be stored before memory is short."""

    def put(self, body: bytes, owner: BodyOwner) -> int:
        """Store ``body``; return a handle, 0 or more. Raises OSError, and stores nothing, if there is no room.

        If the store moves the body, it gives ``owner`` another handle.
        """

    def put_all(self, content: bytes, starts: Sequence[int], owners: Sequence[BodyOwner]) -> int:
        """Store small bodies, which begin at ``starts`` in ``content``, ascending; return the handle of the first one.

        The handles of the others follow. Raises OSError, and stores nothing, if there is no room.
        """

    def get(self, handle: int, size_bytes: int) -> bytes:
        """Return the body with a handle. Raises OSError."""

    def free(self, handle: int, size_bytes: int) -> None:
        """Free the body with a handle, which nobody will ask for again."""


class BrokerMessage:
    """One message, shared by all queues that hold it.

    ``mid`` is its identity in the journal; -1 if it is not journaled, which is possible for a ``durable`` message, too (docs/adr/0002).
    ``position`` is the order of arrival, which queues keep. ``body`` is None while the body is in the body store.
    """

    __slots__ = (
        "body", "durable", "expiry_ms", "group", "handle", "mid", "position", "priority", "references", "size_bytes", "timers",
    )  # fmt: skip

    def __init__(self, body: bytes, priority: int = DEFAULT_PRIORITY, expiry_ms: int = 0, group: str | None = None) -> None:
        self.mid = -1
        self.durable = False  # JMSDeliveryMode PERSISTENT
        self.position = -1
        self.body: bytes | None = body
        self.size_bytes = len(body)
        self.handle = -1
        self.priority = priority
        self.expiry_ms = expiry_ms
        self.group = group  # JMSXGroupID
        self.references = 0  # queues that still hold it
        self.timers: tuple[ScheduledAction, ...] = ()  # scheduled actions for the message

    def keep_timer(self, timer: ScheduledAction) -> None:
        """Keep a scheduled action for the message, to be cancelled when no queue holds the message any more."""
        self.timers = (*(each for each in self.timers if each.pending), timer)


class Bodies:
    """The bodies of all messages that queues hold. Bodies go to the store if memory has no room for them; the account counts both."""

    def __init__(self, store: BodyStore | None, memory_bytes: int) -> None:
        """Create the bodies of a broker. ``memory_bytes`` is the limit of the account, for all that the broker holds."""
        self.store = store
        self.account = MemoryAccount(memory_bytes)
        self.stored_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of bodies in memory."""
        return self.account.bodies_bytes

    @property
    def roomy(self) -> bool:
        """Return True if there is a store, and most of its room is left."""
        return self.store is not None and self.store.roomy

    @staticmethod
    def read_steps(message: BrokerMessage) -> int:
        """Return the cost of reading a message's body, in steps of about a microsecond."""
        return message.size_bytes // STORED_BYTES_PER_STEP if message.body is None else 0

    def hold(self, message: BrokerMessage, *, for_long: bool = False) -> None:
        """Count a message that a queue took, and move its body to the store if memory is short.

        ``for_long``: the message waits for long, because the broker loads its state, or many other messages are before it. Then less memory
        is used.
        """
        account, size = self.account, message.size_bytes
        account.messages += 1
        account.entries += message.references
        most = account.first_bodies_max_bytes if for_long else account.bodies_max_bytes
        short = account.bodies_bytes + size > most or account.blocked
        body, store = message.body, self.store
        if short and store is not None and body is not None:
            try:
                message.handle = store.put(body, message)
            except OSError:
                pass  # the body stays: the account blocks producers before memory ends
            else:
                message.body = None
                self.stored_bytes += size
                return
        account.bodies_bytes += size

    def hold_loaded(self, messages: list[BrokerMessage], content: bytes, starts: list[int]) -> None:
        """Count messages whose bodies begin at ``starts`` in a record that a load has read, as ``hold`` does with ``for_long``.

        Bodies are stored together if possible.
        """
        account, store = self.account, self.store
        size_bytes = sum([message.size_bytes for message in messages])
        fits = account.bodies_bytes + size_bytes <= account.first_bodies_max_bytes and not account.blocked
        if store is None or fits or size_bytes >= STORED_TOGETHER_BYTES:
            for message, start in zip(messages, starts, strict=True):
                message.body = content[start : start + message.size_bytes]
                self.hold(message, for_long=True)
            return
        account.messages += len(messages)
        account.entries += sum([message.references for message in messages])
        try:
            handle = store.put_all(content, starts, messages)
        except OSError:
            for message, start in zip(messages, starts, strict=True):
                message.body = content[start : start + message.size_bytes]
            account.bodies_bytes += size_bytes  # the bodies stay, as in ``hold``
            return
        for message in messages:
            message.handle = handle
            handle += 1
        self.stored_bytes += size_bytes

    def read(self, message: BrokerMessage) -> bytes:
        """Return the bytes of a message from memory or the store. Raises BodyUnavailable."""
        if message.body is not None:
            return message.body
        try:
            return self._store_of(message).get(message.handle, message.size_bytes)
        except OSError as error:
            raise BodyUnavailable(f"the body of message {message.mid} ({message.size_bytes} bytes) cannot be read: {error}") from error

    def _store_of(self, message: BrokerMessage) -> BodyStore:
        if self.store is None:
            raise BrokerFault(f"message {message.mid} has no body in memory, and there is no body store")
        return self.store

    def release(self, message: BrokerMessage) -> None:
        """Release a message that no queue holds any more."""
        self.account.messages -= 1
        for timer in message.timers:
            timer.cancel()  # a message that is delayed for a year must not stay in memory for so long
        if message.body is None:
            self.stored_bytes -= message.size_bytes
            self._store_of(message).free(message.handle, message.size_bytes)
        else:
            self.account.bodies_bytes -= message.size_bytes
