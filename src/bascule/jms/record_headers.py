"""Headers that Bascule adds to Kafka records: the writer, the source message, and the error of a dead letter."""

from __future__ import annotations

from bascule.core.kafka_records import Headers

#: The bridge that wrote a record: an ingress of the same bridge skips the record.
ORIGIN_HEADER = "bascule.origin"
#: epoch-sequence-index of the message in the journal, for the audit.
ID_HEADER = "bascule.id"
DIVERT_HEADER = "bascule.divert"
#: The address of the message in a dead letter of a divert.
ADDRESS_HEADER = "bascule.address"
#: How often a record was redriven from the dead-letter topic: of a record in a target topic, this time included; of a dead letter, in vain.
REDRIVES_HEADER = "bascule.redrives"
#: The timestamp (ms) of a record whose topic sets the time of arrival instead. A record with a header JMSTimestamp has none.
TIMESTAMP_HEADER = "bascule.timestamp"
#: Prefix of the headers that describe an error, as in Kafka Connect.
ERRORS = "__connect.errors."
#: The names of these headers, in their order.
ERROR_FACTS = ("topic", "partition", "offset", "connector.name", "task.id", "stage", "exception.class.name", "exception.message")


def error_headers(pipeline: str, topic: str, partition: int, offset: int, stage: str, error: BaseException) -> Headers:
    """Return the headers of a dead letter, under the names of Kafka Connect.

    ``topic``, ``partition`` and ``offset`` name the source record.
    """
    values = (topic, str(partition), str(offset), pipeline, str(partition), stage, type(error).__name__, text_of_error(error))
    return [(f"{ERRORS}{name}", value.encode()) for name, value in zip(ERROR_FACTS, values, strict=True)]


def text_of_error(error: BaseException) -> str:
    """Return an error's text without half surrogate pairs, which JSON allows and UTF-8 does not."""
    return str(error).encode(errors="backslashreplace").decode()
