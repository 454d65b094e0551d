"""What is known about the messages with one id: where each of them is, and the events that the journal has recorded. No Kafka."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from bascule.core.xid import Xid
from bascule.journal.branches import FORCED, Ending
from bascule.journal.records import INDEX_BITS, INDEX_MAX, KafkaOrigin, SendFlag


class Fate(enum.StrEnum):
    """What has become of a message in a queue."""

    WAITING = "waiting"
    IN_BRANCH = "held by a prepared transaction"
    #: The journal does not say which of them, nor who did it.
    REMOVED = "acknowledged or removed"
    ACKNOWLEDGED = "acknowledged in a distributed transaction"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead-lettered"
    #: The record that ended the stay also has another message with the id: a move, a client that forwards, or one that repeats an id.
    MOVED = "moved, or acknowledged while a message with the same id was stored"
    RETURNED = "returned from the dead letters, or forwarded"
    DELETED = "deleted with its queue"
    UNKNOWN = "unknown: a part of the journal was not read"


#: No record that was read has removed a message with one of these fates from its queue.
HELD_FATES = frozenset((Fate.WAITING, Fate.IN_BRANCH, Fate.UNKNOWN))


class What(enum.StrEnum):
    """The kind of an event."""

    ACCEPTED = "accepted"
    STORED = "found in the store"
    PREPARED = "transaction prepared"
    COMMITTED = "transaction committed"
    ROLLED_BACK = "transaction rolled back"
    DELIVERABLE = "deliverable"
    FAILED = "delivery failed"
    GIVEN_BACK = "delivery given back"
    RESTARTED = "epoch began"
    LEFT = "left the queue"
    DIVERTED = "diverted"
    DIVERT_FAILED = "not diverted: dead letter"
    SENT = "sent by a client"
    RECEIVED = "transferred to a client"
    ADMINISTERED = "administration"


class LifeEvent(NamedTuple):
    """One event. ``offset`` is that of the journal record, -1 if another topic has recorded the event.

    ``identity`` names the message, and ``queue`` is the id of the queue; "" and 0 if the event concerns none.
    """

    time_ms: int
    offset: int
    what: What
    identity: str = ""
    queue: int = 0
    detail: str = ""


class QueueName(NamedTuple):
    """The name of a queue or subscription, and its address."""

    name: str
    address: str


@dataclass(slots=True)
class QueueStay:
    """A message in one queue. ``offset`` and ``time_ms`` are those of the record that ended the stay.

    ``failed`` is the number of failed deliveries that the journal states. ``deliverable``: the broker may have delivered the message.
    ``reservations_known``: all records were read that could have made the message deliverable. ``redelivered``: another epoch began while
    it was. ``copy`` names the message that replaces this one elsewhere.
    """

    queue: int
    fate: Fate = Fate.WAITING
    offset: int = -1
    time_ms: int = 0
    failed: int = 0
    deliverable: bool = False
    reservations_known: bool = False
    redelivered: bool = False
    xid: Xid | None = None
    copy: str = ""

    @property
    def held(self) -> bool:
        """Return whether no record that was read has removed the message from the queue."""
        return self.fate in HELD_FATES


@dataclass(slots=True)
class JournaledMessage:
    """A message in the journal. ``offset`` is that of its record, -1 if only the store has the message.

    ``epoch`` is -1 in the second case: the store does not say which epoch has accepted the message. ``stays_known``: all queues that took
    the message are known. ``message_id`` is its JMSMessageID. ``takers`` are the diverts that take the message, and ``exclusive`` those of
    them that took it instead of the queues. ``copied_from`` names the message that this one replaces, and ``xid`` is the branch that sent
    it.
    """

    mid: int
    epoch: int
    offset: int
    time_ms: int
    address: str
    multicast: bool
    flags: int
    priority: int
    size_bytes: int
    accepted_ms: int
    expiry_ms: int
    due_ms: int
    sent_ms: int
    user_id: str
    source: KafkaOrigin | None
    takers: tuple[str, ...]
    exclusive: tuple[str, ...]
    moved_at_ms: int
    reason: str
    original_queue: str
    message_id: str = ""
    stays: dict[int, QueueStay] = field(default_factory=dict)
    stays_known: bool = True
    copied_from: str = ""
    xid: Xid | None = None

    @property
    def identity(self) -> str:
        """Return the name of the message, as the header ``bascule.id`` of a diverted record has it; ``*`` for an unknown epoch."""
        return f"{'*' if self.epoch < 0 else self.epoch}-{self.sequence}-{self.index}"

    @property
    def sequence(self) -> int:
        """Return the sequence of the message's record."""
        return self.mid >> INDEX_BITS

    @property
    def index(self) -> int:
        """Return the number of the message in its record."""
        return self.mid & INDEX_MAX

    @property
    def held(self) -> bool:
        """Return whether some queue may still have the message."""
        return any(stay.held for stay in self.stays.values())

    def flagged(self, flag: int) -> bool:
        """Return whether the message has a flag of its journal entry."""
        return bool(self.flags & flag)

    @property
    def in_queues(self) -> bool:
        """Return whether the journal says what became of the message in queues."""
        return not self.flagged(SendFlag.PIPELINES_ONLY)


@dataclass(slots=True)
class BranchLife:
    """A transaction branch that has sent the message ``sends`` times, or has received it.

    ``lost``: its end may be in a part of the journal that was not read.
    """

    xid: Xid
    offset: int
    since_ms: int
    container: str
    user: str
    sends: int
    received: int
    ending: Ending | None = None
    ended_ms: int = 0
    lost: bool = False

    @property
    def prepared(self) -> bool:
        """Return whether no record that was read has ended the branch."""
        return self.ending is None

    @property
    def forced(self) -> bool:
        """Return whether an administrator ended the branch."""
        return self.ending in FORCED
