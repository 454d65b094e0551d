"""Follows the messages with one id through the records of a journal. No Kafka, no clock: callers pass the records in order.

The rules are those by which a broker loads its state (bascule.broker.loading); only records that concern the wanted messages are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from bascule.broker.branches import COMMITS, ROLLBACKS
from bascule.broker.delivery import EXPIRED
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.xid import Xid
from bascule.jms.annotate import MOVED_AT, ORIGINAL_QUEUE, REASON
from bascule.jms.ids import message_id_text
from bascule.jms.sections import message_annotation, property_fields_of
from bascule.journal.branches import Ending, decode_ended, decode_prepared, encoded_xid
from bascule.journal.fence import Fence
from bascule.journal.records import (
    INDEX_MAX,
    Kind,
    Op,
    Send,
    SendFlag,
    decode_ack,
    decode_count,
    decode_header,
    decode_json,
    decode_queue_deleted,
    decode_reserve,
    decode_send,
    entries,
    mid_of,
    packed_mid,
)
from bascule.timeline.facts import BranchLife, Fate, JournaledMessage, LifeEvent, QueueName, QueueStay, What
from bascule.timeline.wanted import WantedId, has

#: Messages with the id that are followed: each costs a search in each record while a queue has it.
MESSAGES_MAX: Final = 100
#: Branches that are followed: a client may prepare any number that send a message with the id.
BRANCHES_MAX: Final = 100
#: Events that are kept. A message that a consumer fails to process again and again has an event for each attempt.
EVENTS_MAX: Final = 5_000
#: Characters of a user id, of the reason of a dead letter and of the name of its queue that are kept.
USER_LENGTH_MAX: Final = 200
TEXT_LENGTH_MAX: Final = 500
#: Names of queues that are kept: a broker has at most some ten thousand at once, and may create any number over time.
NAMES_MAX: Final = 200_000
#: Bytes in each entry that creates a queue: a name that only its JSON has.
_QUEUE_CREATED: Final = b'"no_local":'
_RESTARTED: Final = (
    "the broker was started again, or a standby took over; the message may have been delivered before, and is marked with JMSRedelivered"
)
_RESERVE: Final = bytes([Op.RESERVE, 0, 0, 0, 12])
_QUEUE_DELETED: Final = bytes([Op.QUEUE_DELETED, 0, 0, 0, 4])
#: Returns the diverts that take a message, and keeps the exclusive diverts in force.
Takers = Callable[[Send], tuple[str, ...]]


@dataclass(slots=True)
class _Record:
    """A record while its entries are applied: its new messages, the stays that it ends, and the branches that it commits."""

    offset: int
    time_ms: int
    epoch: int
    new: list[JournaledMessage] = field(default_factory=list)
    left: list[tuple[JournaledMessage, QueueStay]] = field(default_factory=list)
    committed: list[Xid] = field(default_factory=list)


class MessageLife:
    """The messages with one id, as far as the journal was read."""

    def __init__(
        self, wanted: WantedId, fence: Fence, names: dict[int, QueueName] | None = None, takers: Takers = lambda _: (),
        epoch_started: Callable[[bytes], None] = lambda _: None, *, from_start: bool = True,
    ) -> None:  # fmt: skip
        """``epoch_started`` gets the record of each start of an epoch, and ``takers`` each message with the id.

        ``from_start``: the first record will be that at offset 0, so no earlier record has made later messages deliverable.
        """
        self.wanted = wanted
        self.fence = fence
        self.names: dict[int, QueueName] = names or {}
        self.messages: dict[int, JournaledMessage] = {}  # by mid
        self.branches: dict[Xid, BranchLife] = {}
        self.events: list[LifeEvent] = []
        #: Messages with the id, branches and events that are not kept.
        self.more_messages = self.more_branches = self.more_events = 0
        self.epochs = 0
        self._takers = takers
        self._epoch_started = epoch_started
        self._reserved: dict[int, int] = {}  # queue id -> mid up to which it may have delivered
        self._reservations_known = from_start  # of the messages to come
        self._needles: tuple[bytes, ...] = ()
        self._look_for()

    @property
    def ended(self) -> bool:
        """Return whether the message was found, and no queue and no prepared branch has it any more."""
        if self.more_messages or self.more_branches or any(branch.prepared for branch in self.branches.values()):
            return False
        return bool(self.messages) and all(message.stays_known and not message.held for message in self.messages.values())

    def lose_track(self) -> None:
        """Note that records which follow the ones taken so far will not be taken: they may have removed a message or ended a branch."""
        self._reserved.clear()
        self._reservations_known = False
        for message in self.messages.values():
            for stay in message.stays.values():
                if stay.held:
                    stay.fate, stay.reservations_known = Fate.UNKNOWN, False
        for branch in self.branches.values():
            branch.lost = branch.prepared

    def queue_name(self, queue: int) -> str:
        """Return the name of a queue, or its number if no record that was read has the name."""
        known = self.names.get(queue)
        return known.name if known is not None else f"queue number {queue}"

    # -- records -----------------------------------------------------------------------------------------------------

    def take(self, offset: int, time_ms: int, value: bytes | None) -> None:
        """Apply the record at an offset. Raises RecordError (ForeignRecord: skip the record)."""
        header = decode_header(value, check=False)  # Kafka's client has checked the bytes
        value = value or b""
        if not self.fence.admits(offset, header):
            return
        if header.kind is Kind.EPOCH:
            self._begin_epoch(offset, time_ms, value)
            return
        if not any(has(value, needle) for needle in self._needles):
            return
        record = _Record(offset, time_ms, header.epoch)
        index = 0
        for op, start, end in entries(value):
            if op == Op.SEND:
                if self.wanted.may_be_in(value, start, end):
                    self._send(record, mid_of(header.sequence, index), decode_send(value, start, end))
                index += 1
            else:
                self._apply(record, op, value, start, end)
        self._close(record)
        self._look_for()

    def take_stored(self, mid: int, time_ms: int, value: bytes | None) -> None:
        """Apply a record of the store, whose key is ``mid``; None if the message was removed. Take the store before the journal."""
        if value is None:
            if (known := self.messages.get(mid)) is not None:
                known.stays_known = True
                for stay in known.stays.values():
                    self._leave(_Record(-1, time_ms, known.epoch), known, stay)
            return
        if not self.wanted.may_be_in(value):
            return
        decode_header(value, check=False)
        op, start, end = next(entries(value), (0, 0, 0))
        if op != Op.SEND:
            return
        send = decode_send(value, start, end)
        # The record has the epoch that has moved the message, not the one that has accepted it.
        if self.wanted.is_of(send.body) and (message := self._note(_Record(-1, time_ms, -1), mid, send)) is not None:
            message.stays_known = not message.multicast  # the record names one queue of the message only
            more = "" if message.stays_known else "; the store names one of the subscriptions that have it"
            self._tell(LifeEvent(time_ms, -1, What.STORED, message.identity, 0, f"the journal record of the message may be gone{more}"))
            self._look_for()

    def _begin_epoch(self, offset: int, time_ms: int, value: bytes) -> None:
        self._epoch_started(value)
        self.epochs += 1
        self._reservations_known = True  # none lasts longer than its epoch
        if self.fence.sequence >= 0:
            last_mid = mid_of(self.fence.sequence, INDEX_MAX)
            self._reserved = {queue: min(mid, last_mid) for queue, mid in self._reserved.items()}
        for message in self.messages.values():
            for stay in message.stays.values():
                if stay.fate is Fate.WAITING and stay.deliverable and not stay.redelivered:
                    stay.redelivered = True
                    self._tell(LifeEvent(time_ms, offset, What.RESTARTED, message.identity, stay.queue, _RESTARTED))

    def _look_for(self) -> None:
        """Note the bytes of which a record must have some, if it concerns the messages."""
        held = [mid for mid, message in self.messages.items() if message.held or not message.stays_known]
        prepared = [encoded_xid(branch.xid) for branch in self.branches.values() if branch.prepared]
        self._needles = (*self.wanted.needles, _QUEUE_CREATED, _RESERVE, _QUEUE_DELETED, *map(packed_mid, held), *prepared)

    def _tell(self, event: LifeEvent) -> None:
        if len(self.events) < EVENTS_MAX:
            self.events.append(event)
        else:
            self.more_events += 1

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, record: _Record, mid: int, send: Send) -> None:
        if not self.wanted.is_of(send.body):
            return
        message = self._note(record, mid, send)
        if message is None:
            return
        record.new.append(message)
        self._tell(LifeEvent(record.time_ms, record.offset, What.ACCEPTED, message.identity, 0, _accepted(message)))
        for stay in message.stays.values():
            if self._reserved.get(stay.queue, -1) >= mid:
                self._make_deliverable(record, message, stay)

    def _note(self, record: _Record, mid: int, send: Send) -> JournaledMessage | None:
        """Follow a message; None if there are too many. What the journal says about a message replaces what the store says."""
        if mid not in self.messages and len(self.messages) >= MESSAGES_MAX:
            self.more_messages += 1
            return None
        queues = send.queues if not send.flags & SendFlag.PIPELINES_ONLY else ()
        message = described(mid, record.epoch, record.offset, record.time_ms, send, self._takers(send))
        known = self._reservations_known and record.offset >= 0
        message.stays = {queue: QueueStay(queue, reservations_known=known) for queue in queues}
        if (stored := self.messages.get(mid)) is not None:
            self.events = [event for event in self.events if event.offset >= 0 or event.identity != stored.identity]
        self.messages[mid] = message
        return message

    def _apply(self, record: _Record, op: int, value: bytes, start: int, end: int) -> None:
        if op == Op.ACK:
            queue, mids = decode_ack(value, start, end)
            record.left += [found for mid in mids if (found := self._stay(queue, mid)) is not None and found[1].held]
        elif op == Op.COUNT:
            queue, counts = decode_count(value, start, end)
            for mid, count in counts:
                if (found := self._stay(queue, mid)) is not None:
                    self._failed(record, *found, count)
        elif op == Op.RESERVE:
            self._reserve(record, *decode_reserve(value, start))
        elif op == Op.QUEUE_CREATED:
            content = decode_json(value, start, end)
            self._name(int(content["id"]), QueueName(str(content["name"]), str(content["address"])))
        elif op == Op.QUEUE_DELETED:
            self._delete(record, decode_queue_deleted(value, start))
        elif op == Op.PREPARED:
            if any(has(value, needle, start, end) for needle in self._needles):
                self._prepared(record, value, start, end)
        elif op == Op.ENDED:
            self._branch_ended(record, value, start, end)

    def _stay(self, queue: int, mid: int) -> tuple[JournaledMessage, QueueStay] | None:
        message = self.messages.get(mid)
        stay = None if message is None else message.stays.get(queue)
        if message is None or stay is None:
            return self._stay_of_stored(queue, message)
        return message, stay

    def _stay_of_stored(self, queue: int, message: JournaledMessage | None) -> tuple[JournaledMessage, QueueStay] | None:
        """Return a stay that the store did not name: its record has one of the queues of the message only."""
        if message is None or message.offset >= 0:
            return None
        stay = message.stays[queue] = QueueStay(queue)
        return message, stay

    def _failed(self, record: _Record, message: JournaledMessage, stay: QueueStay, count: int) -> None:
        more, stay.failed = count > stay.failed, count
        if stay.fate is Fate.UNKNOWN:
            stay.fate = Fate.WAITING  # the broker counts only the deliveries of messages that it has
        what = What.FAILED if more else What.GIVEN_BACK
        detail = f"{'' if more else 'this delivery does not count as failed; '}{count} failed deliveries so far"
        self._tell(LifeEvent(record.time_ms, record.offset, what, message.identity, stay.queue, detail))

    def _reserve(self, record: _Record, queue: int, mid: int) -> None:
        self._reserved[queue] = mid
        for each, message in self.messages.items():
            stay = message.stays.get(queue)
            if stay is not None and stay.held and each <= mid and not stay.deliverable:
                self._make_deliverable(record, message, stay)

    def _make_deliverable(self, record: _Record, message: JournaledMessage, stay: QueueStay) -> None:
        stay.deliverable = True
        detail = "from here on the broker may deliver the message; the journal records no single delivery"
        self._tell(LifeEvent(record.time_ms, record.offset, What.DELIVERABLE, message.identity, stay.queue, detail))

    def _name(self, queue: int, name: QueueName) -> None:
        if len(self.names) >= NAMES_MAX:
            needed = {stay for message in self.messages.values() for stay in message.stays}
            self.names = {number: known for number, known in self.names.items() if number in needed}
        self.names[queue] = name

    def _delete(self, record: _Record, queue: int) -> None:
        self._reserved.pop(queue, None)
        for message in self.messages.values():
            stay = message.stays.get(queue)
            if stay is not None and stay.held:
                self._leave(record, message, stay, Fate.DELETED)

    # -- branches ----------------------------------------------------------------------------------------------------

    def _prepared(self, record: _Record, value: bytes, start: int, end: int) -> None:
        entry = decode_prepared(value, start, end)
        sends = sum(self.wanted.is_of(send.body) for send in entry.sends)
        received = [found for queue, counts in entry.received for mid, _ in counts if (found := self._stay(queue, mid)) and found[1].held]
        if not sends and not received:
            return
        if entry.xid not in self.branches and len(self.branches) >= BRANCHES_MAX:
            self.more_branches += 1
            return
        self.branches[entry.xid] = BranchLife(
            entry.xid, record.offset, entry.since_ms, entry.container, entry.user, sends, len(received)
        )  # fmt: skip
        if sends:
            detail = f"{entry.xid} of client {entry.container!r} sends the message"
            self._tell(LifeEvent(record.time_ms, record.offset, What.PREPARED, "", 0, detail))
        for message, stay in received:
            stay.fate, stay.xid, stay.deliverable = Fate.IN_BRANCH, entry.xid, True
            detail = f"{entry.xid} of client {entry.container!r} has received the message"
            self._tell(LifeEvent(record.time_ms, record.offset, What.PREPARED, message.identity, stay.queue, detail))

    def _branch_ended(self, record: _Record, value: bytes, start: int, end: int) -> None:
        ended = decode_ended(value, start, end)
        branch = self.branches.get(ended.xid)
        if branch is None or not branch.prepared or ended.ending is Ending.FORGOTTEN:
            return
        branch.ending, branch.ended_ms = ended.ending, ended.at_ms
        by = " by an administrator" if branch.forced else ""
        if ended.ending in COMMITS:
            record.committed.append(ended.xid)
            self._tell(LifeEvent(record.time_ms, record.offset, What.COMMITTED, "", 0, f"{ended.xid}{by}"))
        elif ended.ending in ROLLBACKS:
            self._tell(LifeEvent(record.time_ms, record.offset, What.ROLLED_BACK, "", 0, f"{ended.xid}{by}"))
            for message in self.messages.values():
                for stay in message.stays.values():
                    if stay.xid == ended.xid and stay.fate is Fate.IN_BRANCH:
                        stay.fate, stay.xid = Fate.WAITING, None
                        self._failed(record, message, stay, stay.failed + 1)

    # -- the end of a record -----------------------------------------------------------------------------------------

    def _close(self, record: _Record) -> None:
        """Find out why messages have left their queues: a move brings the copy in the record that removes the message."""
        copies = [message for message in record.new if not message.flags & _NO_COPY]
        for message, stay in record.left:
            copy = self._copy_of(message, stay, copies)
            if copy is None:
                in_branch = stay.xid is not None and stay.xid in record.committed
                self._leave(record, message, stay, Fate.ACKNOWLEDGED if in_branch else Fate.REMOVED)
            else:
                copies.remove(copy)
                copy.copied_from, stay.copy = message.identity, copy.identity
                self._leave(record, message, stay, _fate_of_move(message, copy))
        self._note_sender(record)

    def _note_sender(self, record: _Record) -> None:
        """Note the branch that has sent the new messages, if the record has no others: it has the sends of other clients, too."""
        sent = [message for message in record.new if not message.copied_from]
        senders = [xid for xid in record.committed if self.branches[xid].sends]
        if len(senders) == 1 and len(sent) == self.branches[senders[0]].sends:
            for message in sent:
                message.xid = senders[0]

    def _copy_of(self, message: JournaledMessage, stay: QueueStay, copies: Sequence[JournaledMessage]) -> JournaledMessage | None:
        """Return the message of this record that replaces another one. One that the broker has annotated names its earlier queue."""
        name = self.names.get(stay.queue)
        moved = [copy for copy in copies if copy.moved_at_ms and copy.moved_at_ms != message.moved_at_ms]
        named = [copy for copy in moved if name is None or copy.original_queue == name.name]
        plain = [copy for copy in copies if copy not in moved]
        return next(iter((*named, *plain)), None)

    def _leave(self, record: _Record, message: JournaledMessage, stay: QueueStay, fate: Fate = Fate.REMOVED) -> None:
        if not stay.held:
            return
        stay.fate, stay.offset, stay.time_ms = fate, record.offset, record.time_ms
        detail = str(fate) if record.offset >= 0 else "the store has deleted the message, which left its queue before"
        if fate is Fate.REMOVED and 0 < message.expiry_ms <= record.time_ms:
            detail += "; it was to expire before that time"
        if stay.copy:
            detail += f" as {stay.copy}"
        self._tell(LifeEvent(record.time_ms, record.offset, What.LEFT, message.identity, stay.queue, detail))


#: A copy that a move makes has none of these marks.
_NO_COPY: Final = SendFlag.FROM_KAFKA | SendFlag.DUPLICATE_ID


def _fate_of_move(message: JournaledMessage, copy: JournaledMessage) -> Fate:
    if copy.moved_at_ms and copy.moved_at_ms != message.moved_at_ms:
        return Fate.EXPIRED if copy.reason == EXPIRED else Fate.DEAD_LETTERED
    return Fate.RETURNED if message.moved_at_ms and not copy.moved_at_ms else Fate.MOVED


def described(mid: int, epoch: int, offset: int, time_ms: int, send: Send, takers: tuple[str, ...]) -> JournaledMessage:
    """Return what a SEND entry says about its message. Sections that cannot be read count as missing."""
    sent_ms, user_id, message_id = 0, "", ""
    try:
        fields = property_fields_of(send.body)
        message_id = message_id_text(fields[0])
        sent_ms = int(fields[9] or 0)
        user_id = fields[1][:USER_LENGTH_MAX].decode(errors="replace") if isinstance(fields[1], bytes) else ""
    except (BasculeError, TypeError, ValueError):
        pass
    moved_at_ms, reason, original_queue = (_annotation(send.body, name) for name in (MOVED_AT, REASON, ORIGINAL_QUEUE))
    return JournaledMessage(
        mid=mid, epoch=epoch, offset=offset, time_ms=time_ms, address=send.address, multicast=send.routing == Routing.MULTICAST,
        flags=send.flags, priority=send.priority, size_bytes=len(send.body), accepted_ms=send.timestamp_ms, expiry_ms=send.expiry_ms,
        due_ms=send.delivery_time_ms, sent_ms=sent_ms, user_id=user_id, source=send.source, takers=takers, exclusive=send.diverts,
        moved_at_ms=int(moved_at_ms) if isinstance(moved_at_ms, int) else 0,
        reason=reason[:TEXT_LENGTH_MAX] if isinstance(reason, str) else "",
        original_queue=original_queue if isinstance(original_queue, str) else "", message_id=message_id,
    )  # fmt: skip


def _annotation(body: bytes, name: str) -> object:
    try:
        return message_annotation(body, name)
    except BasculeError:
        return None


def _accepted(message: JournaledMessage) -> str:
    return ", ".join(_parts(message))


def _parts(message: JournaledMessage) -> Iterator[str]:
    yield f"{'topic' if message.multicast else 'address'} {message.address!r}, {message.size_bytes} bytes"
    if message.source is not None:
        yield f"from Kafka record {message.source.topic}-{message.source.partition} offset {message.source.offset}"
    if not message.in_queues:
        yield "journaled for diverts only"
    elif message.exclusive:
        yield f"taken by exclusive divert {', '.join(message.exclusive)}"
    elif not message.stays:
        yield "stored for no queue"
    if message.due_ms > 0:
        yield f"not to be delivered before {_moment(message.due_ms)}"
    if message.expiry_ms > 0:
        yield f"expires at {_moment(message.expiry_ms)}"


def _moment(time_ms: int) -> str:
    """Return a time as text; senders may set any."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms since 1970"
