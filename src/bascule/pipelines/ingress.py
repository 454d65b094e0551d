"""The engine of an ingress: takes Kafka records, returns records of ``bascule.ingress``. Pure: no Spark, no Kafka, no clock.

The returned records are journal records (epoch and sequence 0) with one SEND entry; the broker journals them under its own epoch. The Kafka
header ``unbound`` says what the broker does with a message whose address has neither a queue nor a subscription: ``keep`` or ``drop``. The
header ``user`` names the user of the ingress, whose permissions the broker checks.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from bascule.core import crash
from bascule.core.destination import ADDRESS_MAX
from bascule.core.errors import BadRecord, BasculeError, Denied, TopicMissing
from bascule.core.kafka_records import Headers, KafkaRecord, Output
from bascule.core.masking import PropertyMask
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.topics import INGRESS_USER_HEADER, MESSAGE_BYTES_MAX, UNBOUND_HEADER
from bascule.jms.from_kafka import message_of
from bascule.jms.message import encode_message
from bascule.jms.record_headers import ORIGIN_HEADER, error_headers, text_of_error
from bascule.journal.records import KafkaOrigin, Kind, Send, SendFlag, encode_record, send_entry
from bascule.pipelines.spec import IngressSpec

INGRESS_FLAGS = SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE


class IngressViolation(enum.StrEnum):
    """Rules of an ingress that a test may break."""

    OWN_RECORDS_TAKEN = "an ingress takes records that its own bridge wrote"


class IngressEngine:
    """Converts Kafka records to JMS messages for one ingress."""

    def __init__(
        self,
        ingress: IngressSpec,
        bridge_id: str,
        ingress_topic: str,
        dead_letter_topic: str | None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Without a dead-letter topic, a record that cannot be carried raises BadRecord.

        This includes a record that makes too large a message.
        """
        self._ingress = ingress
        self._takes_own = IngressViolation.OWN_RECORDS_TAKEN in violations
        self._own = (ORIGIN_HEADER, bridge_id.encode())
        self._ingress_topic = ingress_topic
        self._dead_letter_topic = dead_letter_topic
        self._message_bytes_max = message_bytes_max
        self._mask = PropertyMask(ingress.masked)
        self._headers: Headers = [(UNBOUND_HEADER, ingress.unbound.encode())]
        if ingress.user:
            self._headers.append((INGRESS_USER_HEADER, ingress.user.encode()))

    def output(self, record: KafkaRecord) -> Output | None:
        """Return the record for the broker or for the dead-letter topic, or None for a record that this bridge wrote itself."""
        if self._own in record.headers and not self._takes_own:
            return None
        if record.fault:
            return self.dead_letter(record, "HEADER_CONVERTER", BadRecord(record.fault))
        try:
            value = self._encoded(record)
        except (BasculeError, ValueError) as error:
            return self.dead_letter(record, "VALUE_CONVERTER", error)
        return Output(self._ingress_topic, None, value, self._headers, 0)

    def dead_letter(self, record: KafkaRecord, stage: str, error: Exception) -> Output:
        """Return the unchanged record for the dead-letter topic. Raises BadRecord if there is none: the pipeline stops."""
        if isinstance(error, Denied | TopicMissing):
            raise error  # not the record's fault: all records go to the topic of the broker
        crash.point("ingress.dead_letter")
        if self._dead_letter_topic is None:
            raise BadRecord(text_of_error(error)) from None
        said = error_headers(self._ingress.name, record.topic, record.partition, record.offset, stage, error)
        return Output(self._dead_letter_topic, record.key, record.value, [*record.headers, self._own, *said], record.timestamp_ms)

    def _encoded(self, record: KafkaRecord) -> bytes:
        ingress = self._ingress
        message, address, routing = message_of(
            record,
            ingress.body,
            ingress.target,
            ingress.routing,
            reply_to=ingress.reply_to,
            key_as=ingress.key_as,
            mask=self._mask,
        )
        if not ingress.keep_user_id:
            message.user_id = ingress.user_id or None
        flags = INGRESS_FLAGS | (SendFlag.GROUPED if message.group_id else 0)
        send = Send(
            flags, routing, message.priority, message.timestamp_ms, message.expiration_ms, 0, address, (), (), (),
            KafkaOrigin(record.topic, record.partition, record.offset), encode_message(message),
        )  # fmt: skip
        return ingress_record(send, self._message_bytes_max)


def ingress_record(send: Send, message_bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
    """Return a record of ``bascule.ingress``.

    Raises BadRecord for a message that is too large for the broker's journal, and for an address that no client can name.
    """
    if not 0 < len(send.address) <= ADDRESS_MAX:
        raise BadRecord(f"invalid address {send.address!r:.60}; an address has 1 to {ADDRESS_MAX} characters")
    if send.address == MANAGEMENT_ADDRESS:
        raise BadRecord(f"invalid address {MANAGEMENT_ADDRESS}: clients cannot consume from the management node")
    if len(send.body) > message_bytes_max:
        raise BadRecord(f"message of {len(send.body)} bytes is too large; the limit is {message_bytes_max} bytes")
    return encode_record(Kind.DATA, 0, 0, send_entry(send))
