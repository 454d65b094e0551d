"""Entries of prepared branches in the journal.

Both encoding and reading go message by message, since a branch may have very many messages.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final

from bascule.broker.leaving import Ack
from bascule.broker.memory import MemoryAccount
from bascule.broker.message import BrokerMessage, stored_group
from bascule.broker.plans import PlanInTurns
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.transactions import Draft, LocalTransaction
from bascule.core.destination import Routing
from bascule.core.xid import Xid
from bascule.journal.branches import branch_entry, prepared_sends
from bascule.journal.records import Send, SendFlag, entries, packed_count_entry, packed_counts, send_entry

#: Steps to encode a message, and messages of one piece.
SEND_STEPS: Final = 5
PIECE_SENDS = 50
#: Steps to encode a received message, and received messages of one piece.
RECEIVED_STEPS: Final = 2
PIECE_RECEIVED = 200
_DIGEST_FLAGS: Final = (0, SendFlag.DUPLICATE_ID, SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID)


class PreparePlan(PlanInTurns):
    """A plan that encodes the journal entry of a branch from the transaction that prepares, and collects the messages it will hold."""

    __slots__ = ("_acks_count", "_parts", "_received", "acks", "queues", "received", "sent")

    def __init__(self, transaction: LocalTransaction, account: MemoryAccount) -> None:
        self.sent = len(transaction.drafts)
        self.received = 0  # received messages that are in the journal
        self.acks: list[Ack] = []
        self.queues: dict[BrokerQueue, None] = {}  # of ``acks``
        self._acks_count = len(transaction.acks)
        self._parts: list[bytes] = []
        self._received: dict[int, bytearray] = {}  # packed mids and delivery counts, by queue id
        super().__init__(self._encode(transaction.drafts, transaction.acks), account, transaction.size_bytes)

    def whole(self, transaction: LocalTransaction) -> bool:
        """Return whether the plan contains all messages and acknowledgements of the transaction."""
        return (self.sent, self._acks_count) == (len(transaction.drafts), len(transaction.acks))

    def _encode(self, drafts: Sequence[Draft], acks: Sequence[tuple[QueueConsumer, BrokerMessage]]) -> Generator[int, None, None]:
        for first in range(0, len(drafts), PIECE_SENDS):
            piece = drafts[first : first + PIECE_SENDS]
            self._parts += [send_entry(_send_of(draft)) for draft in piece]
            yield len(piece) * SEND_STEPS
        for first in range(0, len(acks), PIECE_RECEIVED):
            piece_acks = acks[first : first + PIECE_RECEIVED]
            self._receive(piece_acks)
            yield len(piece_acks) * RECEIVED_STEPS

    def _receive(self, acks: Sequence[tuple[QueueConsumer, BrokerMessage]]) -> None:
        counts: dict[int, list[tuple[int, int]]] = {}
        for consumer, message in acks:
            queue = consumer.queue
            self.acks.append((queue, message))
            self.queues[queue] = None
            if queue.durable and message.mid >= 0:
                counts.setdefault(queue.id, []).append((message.mid, queue.delivery_count(message)))
                self.received += 1
        for queue_id, found in counts.items():
            self._received.setdefault(queue_id, bytearray()).extend(packed_counts(found))

    def entry(self, xid: Xid, since_ms: int, container: str, user: str) -> bytes:
        """Return the journal entry. Encode the parts that the turns have not encoded yet.

        Raises the error that an earlier turn has raised.
        """
        self.finish()
        received = (packed_count_entry(queue, packed) for queue, packed in self._received.items())
        return branch_entry(xid, since_ms, container, (*self._parts, *received), user)


def drafts_of(entry: bytes) -> Iterator[Draft]:
    """Yield the sends of a prepared branch, decoded from its journal entry."""
    _, start, end = next(entries(entry, 0))
    container, sends = prepared_sends(entry, start, end)
    for send in sends:
        message = BrokerMessage(send.body, send.priority, send.expiry_ms, stored_group(send.flags, send.body))
        yield Draft(
            message, send.address, Routing(send.routing), send.body, bool(send.flags & SendFlag.DURABLE), container, send.duplicate_ids,
            send.delivery_time_ms,
        )  # fmt: skip


def _send_of(draft: Draft) -> Send:
    message = draft.message
    flags = SendFlag.DURABLE if draft.durable else 0
    flags |= _DIGEST_FLAGS[len(draft.duplicate_ids)] | (SendFlag.GROUPED if message.group is not None else 0)
    return Send(
        flags, draft.routing, message.priority, 0, message.expiry_ms, draft.delivery_time_ms, draft.address, (), draft.duplicate_ids,
        (), None, draft.body,
    )  # fmt: skip
