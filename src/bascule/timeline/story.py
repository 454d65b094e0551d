"""The answer to the question what happened to a message: events, the present state, and what no topic records. No Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bascule.core.masking import MASK, PropertyMask
from bascule.journal.records import SendFlag
from bascule.timeline.facts import BranchLife, Fate, JournaledMessage, LifeEvent, QueueStay, What
from bascule.timeline.life import MessageLife

#: Statements about what is not recorded.
NO_DELIVERIES: Final = (
    "The journal does not record single deliveries, nor who acknowledged the message. The audit does, with audit.messages = true and"
    " audit.topic."
)
NO_SENDER: Final = "Nothing records who sent the message. The audit does, and JMSXUserID with broker.validated_user = 'set'."
NO_TRANSACTION: Final = (
    "The journal does not say whether a local transaction sent or acknowledged the message: it has the effect of commits only."
)
NO_REASON: Final = (
    "The journal does not say whether a message that left a queue was acknowledged by a consumer, removed by an administrator, or expired"
    " or was dead-lettered without an address for that."
)
NO_DUPLICATES: Final = (
    "The journal does not record repeated sends that the broker recognised as duplicates. The audit records each send, with"
    " audit.messages = true and audit.topic."
)
NOT_FOUND: Final = (
    "No message with this id is in the part of the journal that was read. The journal has no messages that were non-persistent, unless a"
    " divert takes them; none that were sent to a topic without durable subscriptions; none that were refused, or sent in a transaction"
    " that has not committed; and none that the retention of the journal has removed, also if a prepared transaction still holds them."
)
DIVERTS_ONLY: Final = (
    "The message is in the journal for diverts only (non-persistent, or without a durable subscription): what became of it at consumers is"
    " not recorded."
)
DIVERTS_OF_SETTINGS: Final = (
    "Which diverts take a message follows from their present settings, except for exclusive diverts: a divert that was changed or removed"
    " since may have taken it, too."
)
TRANSFERS: Final = (
    "A transfer to a client is not yet a delivery to its application: the client may have prefetched the message. Nothing records queue"
    " browsers, which take no message."
)
REDRIVEN: Final = (
    "A dead letter may have been redriven or discarded since. `bascule redrive list` shows those that wait; a redriven record is behind the"
    " later records of the divert, where the search does not look."
)
SAME_ID: Final = "Messages with different ids match: the JMSMessageID of each is shown."
STORE_NAMES_ONE: Final = (
    "The store names one of the subscriptions that have a message of a topic. The others are shown when they acknowledge the message."
)
#: The state of a divert's outcome that has a record in the target topic (``DivertState.WRITTEN``).
WRITTEN: Final = "written"
_TIME_OF_RECORD: Final = "the time is that of the record, not of the write"


@dataclass(slots=True)
class MessageStory:
    """The life of a message, with the findings in other topics.

    ``outcomes`` are rows of ``DivertOutcome``. ``audited`` says whether the audit topic has a send of the message, so that it recorded
    messages at that time. ``gaps`` says what was not read, and why. ``complete``: the journal was read up to its end.
    """

    life: MessageLife
    journal: str
    first: int
    start: int
    position: int
    mask: PropertyMask = field(default_factory=PropertyMask)
    outcomes: Sequence[Any] = ()
    audit_events: Sequence[LifeEvent] = ()
    audited: bool = False
    gaps: Sequence[str] = ()
    diverts_ended: bool = False
    complete: bool = True

    @property
    def ended(self) -> bool:
        """Return whether nothing more can happen to the message."""
        return self.complete and self.life.ended and self.diverts_ended

    def events(self) -> list[LifeEvent]:
        """Return all events in the order of their times; those of one journal record stay in their order."""
        # A diverted record has the time that the sender set, which precedes the divert's work.
        accepted_ms = {message.identity: message.time_ms for message in self.life.messages.values()}
        diverted = [
            LifeEvent(
                max(each.time_ms, accepted_ms.get(each.identity, 0)), -1,
                What.DIVERTED if each.state == WRITTEN else What.DIVERT_FAILED, each.identity, 0, f"{divert_text(each)}; {_TIME_OF_RECORD}",
            )
            for each in self.outcomes
            if each.offset >= 0
        ]  # fmt: skip
        return sorted((*self.life.events, *self.audit_events, *diverted), key=lambda event: (event.time_ms, event.what is not What.SENT))

    def unrecorded(self) -> list[str]:
        """Return what is not recorded, and what was not read, in sentences."""
        return [*self._unread(), *self._unrecorded()]

    def _unread(self) -> Iterator[str]:
        yield from self.gaps
        if self.start > self.first:
            yield f"the journal before offset {self.start} was not read, because of the time limit of the search"
        if self.life.more_branches:
            yield f"{self.life.more_branches} more prepared transactions with this message are not shown"
        if self.life.more_messages:
            yield f"{self.life.more_messages} more messages with this id are not shown"
        if self.life.more_events:
            yield f"{self.life.more_events} more events are not shown"

    def _unrecorded(self) -> Iterator[str]:
        messages = self.life.messages.values()
        if not messages:
            if not any(branch.prepared for branch in self.life.branches.values()):
                yield NOT_FOUND
                yield DIVERTS_OF_SETTINGS
            return
        if not self.audited:
            yield NO_DELIVERIES
            yield NO_DUPLICATES
            if not all(message.user_id or message.source for message in messages):
                yield NO_SENDER
            yield NO_TRANSACTION
        if any(stay.fate is Fate.REMOVED for message in messages for stay in message.stays.values()):
            yield NO_REASON
        if not all(message.in_queues for message in messages):
            yield DIVERTS_ONLY
        if any(event.what is What.RECEIVED for event in self.audit_events):
            yield TRANSFERS
        if not all(message.stays_known for message in messages):
            yield STORE_NAMES_ONE
        if any(each.offset >= 0 and each.state != WRITTEN for each in self.outcomes):
            yield REDRIVEN
        if len({message.message_id for message in messages}) > 1:
            yield SAME_ID
        yield DIVERTS_OF_SETTINGS

    # -- JSON --------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the story as JSON can hold it."""
        life = self.life
        return {
            "id": life.wanted.text,
            "journal": {"topic": self.journal, "first": self.first, "from": self.start, "to": self.position},
            "ended": self.ended,
            "messages": [self._message(message) for message in life.messages.values()],
            "branches": [self._branch(branch) for branch in life.branches.values()],
            "events": [self.event(event) for event in self.events()],
            "unrecorded": self.unrecorded(),
        }

    def event(self, event: LifeEvent) -> dict[str, Any]:
        """Return an event as JSON can hold it."""
        return {
            "time_ms": event.time_ms, "offset": event.offset if event.offset >= 0 else None, "what": str(event.what),
            "message": event.identity, "queue": life_queue(self.life, event), "detail": event.detail,
        }  # fmt: skip

    def _message(self, message: JournaledMessage) -> dict[str, Any]:
        source = message.source
        return {
            "message": message.identity, "id": message.message_id,
            "offset": message.offset if message.offset >= 0 else None, "address": message.address,
            "routing": "multicast" if message.multicast else "anycast", "accepted_ms": message.accepted_ms, "sent_ms": message.sent_ms,
            "persistent": message.flagged(SendFlag.DURABLE), "priority": message.priority, "bytes": message.size_bytes,
            "expiry_ms": message.expiry_ms, "due_ms": message.due_ms,
            "user_id": MASK if message.user_id and self.mask.covers("JMSXUserID") else message.user_id,
            "kafka_source": source._asdict() if source is not None else None, "copied_from": message.copied_from,
            "reason": message.reason, "branch": str(message.xid) if message.xid is not None else "",
            "duplicates_recognised": message.flagged(SendFlag.DUPLICATE_ID), "exclusive_diverts": list(message.exclusive),
            "queues": [self._stay(stay) for stay in message.stays.values()],
            "diverts": [
                {**each._asdict(), "state": str(each.state)} for each in self.outcomes if each.identity == message.identity
            ],
        }  # fmt: skip

    def _stay(self, stay: QueueStay) -> dict[str, Any]:
        unknown = stay.held and (stay.fate is Fate.UNKNOWN or not self.complete)
        return {
            "queue": self.life.queue_name(stay.queue), "queue_id": stay.queue, "state": str(Fate.UNKNOWN if unknown else stay.fate),
            "held": None if unknown else stay.held,
            "left_offset": stay.offset if stay.offset >= 0 else None, "left_ms": stay.time_ms, "failed_deliveries": stay.failed,
            "may_have_been_delivered": self._deliverable(stay), "redelivered": stay.redelivered,
            "branch": str(stay.xid) if stay.xid is not None else "", "copy": stay.copy,
        }  # fmt: skip

    def _deliverable(self, stay: QueueStay) -> bool | None:
        """Return whether the broker may have delivered a message; None if a record that was not read decides that."""
        if stay.deliverable:
            return True
        return False if stay.reservations_known and (self.complete or not stay.held) else None

    def _branch(self, branch: BranchLife) -> dict[str, Any]:
        outcome = "prepared" if branch.ending is None else branch.ending.name.lower().replace("_", " ")
        if branch.prepared and (branch.lost or not self.complete):
            outcome = str(Fate.UNKNOWN)
        return {
            "xid": str(branch.xid), "client": branch.container, "user": branch.user, "prepared_ms": branch.since_ms,
            "prepared_offset": branch.offset, "sends": branch.sends, "received": branch.received, "outcome": outcome,
            "ended_ms": branch.ended_ms, "forced": branch.forced,
        }  # fmt: skip


def life_queue(life: MessageLife, event: LifeEvent) -> str:
    """Return the name of an event's queue, "" if it concerns none."""
    return life.queue_name(event.queue) if event.queue else ""


def divert_text(outcome: Any) -> str:
    """Return what a divert has done, in words."""
    where = f" {outcome.topic}-{outcome.partition} offset {outcome.offset}" if outcome.offset >= 0 else ""
    return f"divert {outcome.divert!r}: {outcome.state}{where}{': ' + outcome.detail if outcome.detail else ''}"
