"""A broker's journal without a broker: the records that pipelines and tools read, written one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bascule.core.destination import Routing
from bascule.jms.message import JmsMessage, encode_message
from bascule.journal.records import KEY_OF_KIND, Kind, Op, Send, SendFlag, ack_entry, encode_record, json_entry, send_entry
from bascule.kafka import clients
from bascule.kafka.log import patient


def text_message(text: str, **fields: Any) -> bytes:
    """Encode a text message; ``fields`` as in JmsMessage."""
    return encode_message(JmsMessage(body_kind="text", body=text, **fields))


class SyntheticJournal:
    """A writer of one journal partition, as a broker writes it: epochs, contiguous sequences, one record for each JMS action."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._producer = clients.producer(
            {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "acks": "all", "linger.ms": 1}
        )
        self._topic = topic
        self.epoch = -1
        self.sequence = 0

    def start_epoch(self, exclusive: Sequence[str] = ()) -> int:
        """Start an epoch with the exclusive diverts that the broker applies in it. Return its number."""
        self.epoch = self.put(Kind.EPOCH, json_entry(Op.EPOCH, {"exclusive": list(exclusive)}), epoch=0, sequence=0)
        return self.epoch

    def send(self, *messages: bytes, address: str = "flights", flags: int = SendFlag.DURABLE, diverts: Sequence[str] = ()) -> None:
        """Write one record with one or more messages (a transaction), without waiting.

        ``diverts`` are the exclusive ones that took them.
        """
        self.sequence += 1
        marks = flags | (SendFlag.DIVERTS if diverts else 0)
        now_ms = int(time.time() * 1000)
        sends = (Send(marks, Routing.ANYCAST, 4, now_ms, 0, 0, address, (1,), (), tuple(diverts), None, body) for body in messages)
        self._produce(Kind.DATA, b"".join(map(send_entry, sends)), self.epoch, self.sequence)

    def acknowledge(self) -> None:
        """Write one record without messages, without waiting."""
        self.sequence += 1
        self._produce(Kind.STATE, ack_entry(1, [1, 2, 3]), self.epoch, self.sequence)

    def put(self, kind: Kind, body: bytes, *, epoch: int, sequence: int) -> int:
        """Write any record, for example of a fenced broker or a repetition. Return its offset."""
        offsets: list[int] = []
        self._produce(kind, body, epoch, sequence, offsets)
        self.flush()
        return offsets[0]

    def flush(self) -> None:
        """Wait until all records are stored."""
        assert self._producer.flush(30) == 0

    def _produce(self, kind: Kind, body: bytes, epoch: int, sequence: int, offsets: list[int] | None = None) -> None:
        def stored(error: object, message: Any) -> None:
            assert error is None, error
            if offsets is not None:
                offsets.append(message.offset())

        value = encode_record(kind, epoch, sequence, body)
        patient(self._producer)(self._topic, value, KEY_OF_KIND[kind], 0, on_delivery=stored)
        self._producer.poll(0)
