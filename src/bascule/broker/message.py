"""A message as the broker holds it: opaque AMQP bytes and what dispatch needs to know of them."""

from __future__ import annotations

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
#: Bytes of a body that the store reads in a step.
STORED_BYTES_PER_STEP: Final = 1_000


def stored_group(flags: int, body: bytes) -> str | None:
    """The group (JMSXGroupID) of a message in the journal, whose SEND entry has these flags.

    None also where the properties of the message cannot be read: no stored message keeps a broker from starting.
    """
    if flags & SendFlag.GROUPED:
        with suppress(BasculeError):
            return group_of(body)
    return None


class BodyOwner(Protocol):
    """Who asks for a body by its handle."""

    handle: int


class BodyStore(Protocol):
    """Where bodies go that memory has no room for: a cache, never the truth (that is the journal)."""

    def put(self, body: bytes, owner: BodyOwner) -> int:
        """Keep ``body``; returns a handle, 0 or more. Raises OSError when there is no room: nothing is kept then.

        If the store moves the body, it gives ``owner`` another handle.
        """

    def get(self, handle: int, size_bytes: int) -> bytes:
        """The body behind a handle. Raises OSError."""

    def free(self, handle: int, size_bytes: int) -> None:
        """The body will not be asked for again."""


class BrokerMessage:
    """One message, shared by all queues that hold it.

    ``mid`` is its journal identity, -1 where it is not journaled, which a ``durable`` one may not be either (docs/adr/0002).
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
        self.timers: tuple[ScheduledAction, ...] = ()  # what is scheduled for it

    def keep_timer(self, timer: ScheduledAction) -> None:
        """Something is scheduled for the message, for as long as a queue holds it."""
        self.timers = (*(each for each in self.timers if each.pending), timer)


class Bodies:
    """The messages that queues hold: each is in the account of memory, and its body goes to the store where memory has no room for it."""

    def __init__(self, store: BodyStore | None, memory_bytes: int) -> None:
        """``memory_bytes`` is the limit of the account, for all that the broker holds."""
        self.store = store
        self.account = MemoryAccount(memory_bytes)
        self.stored_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Bodies in memory."""
        return self.account.bodies_bytes

    @staticmethod
    def read_steps(message: BrokerMessage) -> int:
        """What reading a message's body costs, in steps of about a microsecond."""
        return message.size_bytes // STORED_BYTES_PER_STEP if message.body is None else 0

    def hold(self, message: BrokerMessage) -> None:
        """A queue took the message: count it, and send its body away where memory is short."""
        account, size = self.account, message.size_bytes
        account.messages += 1
        account.entries += message.references
        short = account.bodies_bytes + size > account.bodies_max_bytes or account.blocked
        if short and self.store is not None and message.body is not None:
            # Without room there either it stays: the account blocks producers before memory ends.
            with suppress(OSError):
                message.handle = self.store.put(message.body, message)
                message.body = None
                self.stored_bytes += size
                return
        account.bodies_bytes += size

    def read(self, message: BrokerMessage) -> bytes:
        """The message's bytes, wherever they are. Raises BodyUnavailable."""
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
        """No queue holds the message any more."""
        self.account.messages -= 1
        for timer in message.timers:
            timer.cancel()  # a message that is delayed for a year must not stay in memory for so long
        if message.body is None:
            self.stored_bytes -= message.size_bytes
            self._store_of(message).free(message.handle, message.size_bytes)
        else:
            self.account.bodies_bytes -= message.size_bytes
