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
    #: The journal does not say which of the three.
    REMOVED = "acknowledged, purged, or expired without an expiry address"
    ACKNOWLEDGED = "acknowledged in a distributed transaction"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead-lettered"
    MOVED = "moved, or forwarded in a transaction"
    RETURNED = "returned from the dead letters"
    DELETED = "deleted with its queue"


#: A message with one of these fates is still in its queue.
HELD_FATES = frozenset((Fate.WAITING, Fate.IN_BRANCH))


class What(enum.StrEnum):
    """The kind of an event."""

    ACCEPTED = "accepted"
    STORED = "found in the store"
    PREPARED = "transaction prepared"
    COMMITTED = "transaction committed"
    ROLLED_BACK = "transaction rolled back"
    DELIVERABLE = "deliverable"
    FAILED = "delivery failed"
    RESTARTED = "broker restarted"
    LEFT = "left the queue"
    DIVERTED = "diverted"
    SENT = "sent by a client"
    RECEIVED = "delivered to a client"
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
    ``redelivered``: the broker was started again while this was the case. ``copy`` names the message that replaces this one elsewhere.
    """

    queue: int
    fate: Fate = Fate.WAITING
    offset: int = -1
    time_ms: int = 0
    failed: int = 0
    deliverable: bool = False
    redelivered: bool = False
    xid: Xid | None = None
    copy: str = ""

    @property
    def held(self) -> bool:
        """Return whether the message is still in the queue."""
        return self.fate in HELD_FATES


@dataclass(slots=True)
class JournaledMessage:
    """A message in the journal. ``offset`` is that of its record, -1 if only the store has the message.

    ``takers`` are the diverts that take the message, and ``exclusive`` those of them that took it instead of the queues. ``copied_from``
    names the message that this one replaces, and ``xid`` is the branch that sent it.
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
    stays: dict[int, QueueStay] = field(default_factory=dict)
    copied_from: str = ""
    xid: Xid | None = None

    @property
    def identity(self) -> str:
        """Return the name of the message, as the header ``bascule.id`` of a diverted record has it."""
        return f"{self.epoch}-{self.sequence}-{self.index}"

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
        """Return whether some queue still has the message."""
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
    """A transaction branch that has sent the message ``sends`` times, or has received it."""

    xid: Xid
    offset: int
    since_ms: int
    container: str
    user: str
    sends: int
    received: int
    ending: Ending | None = None
    ended_ms: int = 0

    @property
    def prepared(self) -> bool:
        """Return whether the branch still waits for its outcome."""
        return self.ending is None

    @property
    def forced(self) -> bool:
        """Return whether an administrator ended the branch."""
        return self.ending in FORCED
