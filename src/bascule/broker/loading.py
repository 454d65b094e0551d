"""Load of an engine from a snapshot and the journal records behind it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Set
from typing import Any

from bascule.broker.branches import ROLLBACKS, Branch
from bascule.broker.engine import Engine
from bascule.broker.message import PRIORITY_MAX, BrokerMessage, stored_group
from bascule.broker.queue import BrokerQueue
from bascule.broker.snapshot import Snapshot
from bascule.broker.wanted import WantedMessages
from bascule.journal.branches import Ended, decode_ended
from bascule.journal.errors import DamagedRecord
from bascule.journal.fence import Fence
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import (
    INDEX_MAX,
    MESSAGES_PER_RECORD_MAX,
    Header,
    Kind,
    Op,
    Send,
    SendFlag,
    decode_ack,
    decode_count,
    decode_header,
    decode_ingress,
    decode_json,
    decode_queue_deleted,
    decode_reserve,
    decode_send,
    decode_stored,
    entries,
    entry,
    mid_of,
    stored_sends,
)


class LoadingViolation(enum.StrEnum):
    """Rules of loading that a test can break."""

    RESERVATIONS_FORGOTTEN = "a new epoch forgets which messages may have been delivered before"
    DELIVERY_COUNTS_FORGOTTEN = "a new epoch forgets journaled delivery counts"
    INGRESS_POSITIONS_FORGOTTEN = "a new epoch reads the ingress topic from its start"
    BRANCHES_LOADED_EMPTY = "prepared branches lose the messages that they have received"
    BRANCH_ENDS_PASSED_OVER = "the end of a branch in the journal is skipped"
    UNWANTED_MESSAGES_NOT_COUNTED = "a message's number in its record counts only the messages that the snapshot names"
    UNANNOUNCED_SNAPSHOTS_COUNT = "a snapshot counts before the journal announces it"


class Loader:
    """Applies journal records, in order, to an engine that serves no clients yet.

    A replay makes no decisions: each record says which queues took a message, and neither selectors nor the configuration matter.
    """

    def __init__(self, engine: Engine, snapshot: Snapshot | None = None, stored: Mapping[int, bytes] | None = None) -> None:
        """Begin with a snapshot, if any. ``stored`` has records of the store by mid, for messages that the snapshot keeps there.

        Raises DamagedRecord.
        """
        self.engine = engine
        self._deliveries, self._bodies = engine.deliveries, engine.bodies
        self.snapshot = snapshot
        self._violations = violations = engine.violations
        self.fence = Fence(violations=violations)
        self.offsets = OffsetMap()
        self.announced = LoadingViolation.UNANNOUNCED_SNAPSHOTS_COUNT in violations  # only an announced snapshot counts
        self._queues = engine.addresses.queues  # their ``held`` has the live messages; all else is filled in at the end
        self._counts: dict[int, dict[int, int]] = {}
        self._wanted = WantedMessages(() if snapshot is None else snapshot.stored)
        self._old_fence = Fence(sequence=-1, violations=violations)
        self._sizes: dict[int, int] = {}  # messages of the same size share one integer object
        self._size = -1  # of the last message
        self._delayed: dict[int, int] = {}  # mid -> when the message may be delivered
        self.first_offset = 0
        if snapshot is not None:
            self._restore(snapshot, stored or {})

    def _restore(self, snapshot: Snapshot, stored: Mapping[int, bytes]) -> None:
        engine = self.engine
        self.fence = Fence(snapshot.epoch, snapshot.sequence, violations=self._violations)
        self.offsets = snapshot.offsets
        self.first_offset = snapshot.first_offset()
        engine.next_queue_id = snapshot.next_queue_id
        engine.ingress_positions = dict(snapshot.ingress)
        engine.ingress_topic_id = snapshot.ingress_topic_id
        for content, mids, counts in zip(snapshot.queues, snapshot.mids, snapshot.counts, strict=True):
            reserved_mid = content.pop("reserved")
            queue = self._add(self._described(content))
            queue.unused_since_ms = content.get("unused_since_ms", 0)
            queue.reserved_mid = reserved_mid
            self._counts[queue.id].update(counts)
            self._wanted.add(queue.id, mids)
        snapshot.mids = []  # a million numbers
        for mid in snapshot.stored:
            self._take_stored(mid, stored.get(mid), snapshot)
        for op, start, end in entries(snapshot.branches, 0):
            self._apply(op, snapshot.branches, start, end)
        engine.branches.loaded(snapshot.sequence)
        for address, remembered in snapshot.windows.items():
            engine.windows.window(address).restore(remembered)

    def _take_stored(self, mid: int, value: bytes | None, snapshot: Snapshot) -> None:
        if value is None:
            raise DamagedRecord(f"message {mid} of snapshot {snapshot.id} is not in the store")
        decode_header(value)
        _, start, end = next(entries(value))
        flags, priority, expiry_ms, delivery_time_ms, start, end = decode_stored(value, start, end)
        self._hold(mid, value[start:end], flags, priority, expiry_ms, delivery_time_ms, self._wanted.stored.pop(mid, ()))
        self._deliveries.next_position = mid + 1

    def _described(self, content: dict[str, Any]) -> BrokerQueue:
        return BrokerQueue.from_journal(content, self.engine.policy.of(content["address"]))

    def _add(self, queue: BrokerQueue) -> BrokerQueue:
        self.engine.addresses.add(queue)
        self._counts[queue.id] = {}
        return queue

    def apply(self, offset: int, value: bytes | None) -> None:
        """Apply the record at ``offset``. Raises RecordError if the record cannot be used (ForeignRecord: skip it and raise an alarm)."""
        header, value = decode_header(value), value or b""
        self.offsets.sizes.note(offset, len(value))
        if self.snapshot is not None and offset < self.snapshot.next_offset:
            if header.kind is Kind.EPOCH and offset > self.snapshot.epoch:  # the snapshot was made in the last epoch before its offset
                raise DamagedRecord(f"epoch {offset} begins before the end of snapshot {self.snapshot.id}: the journal has lost records")
            if self._old_fence.admits(offset, header) and header.kind is Kind.DATA:
                self._fetch(header, value)
            return
        if not self.fence.admits(offset, header):
            return
        if header.kind is Kind.EPOCH:
            self._end_deliveries()
            return
        self.offsets.note(header.sequence, offset, len(value))
        index = 0
        for op, start, end in entries(value):
            if op == Op.SEND:
                self._send(mid_of(header.sequence, index), decode_send(value, start, end))
                index += 1
            else:
                self._apply(op, value, start, end)

    def _end_deliveries(self) -> None:
        """End all reservations: an epoch starts without consumers, and a reserved message that is not journaled yet was never delivered."""
        last_mid = mid_of(self.fence.sequence, INDEX_MAX)
        for queue in self.engine.addresses.queues.values():
            queue.reserved_mid = min(queue.reserved_mid, last_mid)

    def _fetch(self, header: Header, value: bytes) -> None:
        """Load the bodies of messages whose mids are in the snapshot."""
        first = mid_of(header.sequence, 0)
        wanted = self._wanted.take(first, first + MESSAGES_PER_RECORD_MAX)
        if not wanted:
            return
        found = stored_sends(value, first, wanted)
        if LoadingViolation.UNWANTED_MESSAGES_NOT_COUNTED in self._violations:
            found = list(zip(range(first, first + len(found)), (stored for _, stored in found), strict=True))
        held: list[BrokerMessage] = []
        starts: list[int] = []  # of the bodies, in the value
        for mid, (flags, priority, expiry_ms, delivery_time_ms, start, end) in found:
            queue_ids = wanted.pop(mid, None)
            if queue_ids is not None:
                group = stored_group(flags, value[start:end]) if flags & SendFlag.GROUPED else None
                message = self._message(mid, end - start, priority, expiry_ms, group)
                self._take(message, delivery_time_ms, queue_ids)
                if message.references:
                    held.append(message)
                    starts.append(start)
        if held:
            self._bodies.hold_loaded(held, value, starts)
        if found:
            self._deliveries.next_position = found[-1][0] + 1
        self._wanted.missing.extend(wanted)

    def _hold(
        self, mid: int, body: bytes, flags: int, priority: int, expiry_ms: int, delivery_time_ms: int, queue_ids: tuple[int, ...]
    ) -> None:
        """Hold a message in its queues, and count it."""
        message = self._message(mid, len(body), priority, expiry_ms, stored_group(flags, body) if flags & SendFlag.GROUPED else None)
        message.body = body
        self._take(message, delivery_time_ms, queue_ids)
        if message.references:
            self._bodies.hold(message, for_long=True)

    def _message(self, mid: int, size_bytes: int, priority: int, expiry_ms: int, group: str | None) -> BrokerMessage:
        """Return a message whose body has a size, without the body."""
        message = BrokerMessage(b"", priority if priority < PRIORITY_MAX else PRIORITY_MAX, expiry_ms, group)
        message.body = None
        message.mid, message.durable = mid, True
        if size_bytes != self._size:
            self._size = self._sizes.setdefault(size_bytes, size_bytes)
        message.size_bytes = self._size
        # Messages arrive here in the order of their mids. A number of its own would take 32 bytes for each message.
        message.position = mid
        return message

    def _take(self, message: BrokerMessage, delivery_time_ms: int, queue_ids: tuple[int, ...]) -> None:
        """Hold a message in its queues, if these exist."""
        mid = message.mid
        if delivery_time_ms and not any(mid in self._counts.get(queue_id, ()) for queue_id in queue_ids):
            self._delayed[mid] = delivery_time_ms
        for queue_id in queue_ids:
            queue = self._queues.get(queue_id)
            if queue is not None:
                queue.held.add(message)
                message.references += 1

    def _send(self, mid: int, send: Send) -> None:
        if send.duplicate_ids:
            self.engine.windows.window(send.address).admit_stored(send.duplicate_ids, send.timestamp_ms)
        if not send.flags & SendFlag.PIPELINES_ONLY:
            self._hold(mid, send.body, send.flags, send.priority, send.expiry_ms, send.delivery_time_ms, send.queues)
            self._deliveries.next_position = mid + 1

    def _apply(self, op: int, value: bytes, start: int, end: int) -> None:
        engine = self.engine
        if op == Op.ACK:
            queue_id, mids = decode_ack(value, start, end)
            acknowledged_in = self._queues.get(queue_id)
            if acknowledged_in is not None:
                self._acknowledge(acknowledged_in, mids)
        elif op == Op.COUNT:
            if LoadingViolation.DELIVERY_COUNTS_FORGOTTEN not in self._violations:
                self._count(*decode_count(value, start, end))
        elif op == Op.RESERVE:
            queue_id, mid = decode_reserve(value, start)
            queue = engine.addresses.queues.get(queue_id)
            if queue is not None and LoadingViolation.RESERVATIONS_FORGOTTEN not in self._violations:
                queue.reserved_mid = mid
        elif op == Op.QUEUE_CREATED:
            queue = self._add(self._described(decode_json(value, start, end)))
            engine.next_queue_id = max(engine.next_queue_id, queue.id + 1)
        elif op == Op.QUEUE_DELETED:
            self._delete(decode_queue_deleted(value, start))
        elif op == Op.INGRESS:
            partition, next_offset = decode_ingress(value, start)
            if LoadingViolation.INGRESS_POSITIONS_FORGOTTEN not in self._violations:
                engine.ingress_positions[partition] = next_offset
        elif op == Op.INGRESS_TOPIC:
            content = decode_json(value, start, end)
            engine.ingress_topic_id, engine.ingress_positions = content["id"], dict(content["positions"])
        elif op == Op.SNAPSHOT:
            if self.snapshot is not None and decode_json(value, start, end)["id"] == self.snapshot.id:
                self.announced = True
        elif op == Op.SUBSCRIPTION_USE:
            content = decode_json(value, start, end)
            queue = engine.addresses.queues.get(content["queue"])
            if queue is not None:
                queue.unused_since_ms = content["unused_since_ms"]
                engine.addresses.change_user(queue, content.get("user", queue.user))
        elif op == Op.PREPARED:
            branch = Branch.from_entry(entry(Op.PREPARED, value[start:end]))
            engine.branches.add(branch)
        elif op == Op.ENDED:
            self._branch_ended(decode_ended(value, start, end))
        else:
            raise DamagedRecord(f"entry at byte {start}: unknown operation {op}")

    def _acknowledge(self, queue: BrokerQueue, mids: Iterable[int]) -> None:
        known, held = self._counts[queue.id], queue.held
        for mid in mids:
            if known:
                known.pop(mid, None)
            message = held.remove(mid)
            if message is not None:
                self._release(message)

    def _count(self, queue_id: int, counts: Iterable[tuple[int, int]]) -> None:
        """Apply failed deliveries. The delay of these messages has ended in all their queues."""
        known = self._counts.get(queue_id)
        for mid, count in counts:
            self._delayed.pop(mid, None)
            if known is not None:  # else the queue was deleted meanwhile
                known[mid] = count

    def _release(self, message: BrokerMessage) -> None:
        self.engine.release(message)
        if not message.references:
            self._delayed.pop(message.mid, None)

    def _delete(self, queue_id: int) -> None:
        queue = self._queues.get(queue_id)
        if queue is not None:
            queue.deleted = True
            self.engine.addresses.remove(queue)
            self._counts.pop(queue_id)
            for message in queue.held:
                self._release(message)

    def finish(self) -> None:
        """Fill the queues after all records up to the epoch's start are applied. Raises DamagedRecord if message bodies are missing."""
        if missing := self._wanted.left():
            name = self.snapshot and self.snapshot.id
            raise DamagedRecord(f"{len(missing)} messages of snapshot {name} are not in the journal: {missing[:3]}…")
        engine = self.engine
        received = self._give_to_branches()
        delayed: dict[BrokerMessage, list[BrokerQueue]] = {}
        for queue in self._queues.values():
            self._fill(queue, received.get(queue.id, frozenset()), delayed)
        for message, queues in delayed.items():
            engine.delay(message, queues, self._delayed[message.mid])
        self.engine.confirmed_ingress = dict(self.engine.ingress_positions)
        plain_until_ms = -1 if self.snapshot is None else self.snapshot.plain_until_ms
        engine.windows.plain_until_ms = engine.windows.expire_ms() if plain_until_ms < 0 else plain_until_ms
        self._counts.clear()

    def _fill(self, queue: BrokerQueue, received: Set[int], delayed: dict[BrokerMessage, list[BrokerQueue]]) -> None:
        """Let the messages that a queue holds wait for consumers, except those that branches have ``received``.

        A message whose delay has not ended is added to ``delayed``.
        """
        counts, due_ms, now_ms = self._counts[queue.id], self._delayed, self.engine.clock()
        for message in queue.held:
            mid = message.mid
            queue.count_held(message)
            if received and mid in received:
                continue
            # A standby may have read the record long ago: a message that has become due since then may have been delivered.
            if due_ms and due_ms.get(mid, 0) > now_ms:
                delayed.setdefault(message, []).append(queue)
                continue
            queue.add(message)
            if message.expiry_ms:
                self.engine.watch_expiry(queue, message.expiry_ms)
            if counts and mid in counts:
                queue.counts[message.position] = counts[mid]
        # A reserved message that still waits may have been delivered before the crash.
        queue.recovered_mid = queue.reserving_mid = queue.reserved_mid

    def _branch_ended(self, ended: Ended) -> None:
        if LoadingViolation.BRANCH_ENDS_PASSED_OVER in self._violations:
            return
        branch = self.engine.branches.prepared.get(ended.xid)
        if branch is not None and ended.ending in ROLLBACKS:
            for queue_id, counts in branch.taken():
                self._count(queue_id, ((mid, count + 1) for mid, count in counts))
        self.engine.branches.over(ended, self.fence.sequence)

    def _give_to_branches(self) -> dict[int, set[int]]:
        """Give the messages that prepared branches have received back to the branches, as before the crash. Return their mids by queue."""
        received: dict[int, set[int]] = {}
        if LoadingViolation.BRANCHES_LOADED_EMPTY in self._violations:
            return received
        for branch in self.engine.branches.prepared.values():
            for queue_id, counts in branch.taken():
                queue = self._queues.get(queue_id)
                if queue is None:
                    continue  # the queue was deleted meanwhile
                mids = received.setdefault(queue_id, set())
                for mid, count in counts:
                    message = queue.held.get(mid)
                    if message is None or mid in mids:
                        continue
                    mids.add(mid)
                    self._delayed.pop(mid, None)
                    queue.counts[message.position] = count
                    branch.acks.append((queue, message))
                    branch.queues[queue] = None
        return received
