"""The first and last offsets of many partitions, and their offsets at a time. Blocking."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from bascule.core.errors import Unavailable
from bascule.kafka.errors import words
from bascule.kafka.history import offsets_client
from bascule.kafka.retrying import ask_in_tries

#: Topic and partition.
Place = tuple[str, int]

#: Errors of a partition that does not exist, or that this client may not see.
_HIDDEN: Final = frozenset({
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.TOPIC_AUTHORIZATION_FAILED,
})  # fmt: skip


class Bounds(NamedTuple):
    """The first offset that is not deleted, and the offset behind the last record, whatever the state of its transaction."""

    first: int
    end: int


def bounds_of(
    kafka: Mapping[str, Any], places: Collection[Place], timeout_s: float, admin: AdminClient | None = None
) -> dict[Place, Bounds]:
    """Return the bounds of partitions. Those that do not exist, or that Kafka does not show, are left out.

    ``admin`` is a client to share with others. Raises Unavailable if Kafka does not answer for one of the others.
    """
    if not places:
        return {}
    asked = _Offsets(kafka, timeout_s, admin)
    # The end is asked later, so it is not before the first offset if records are deleted meanwhile.
    firsts = asked.of(places, OffsetSpec.earliest())
    ends = asked.of(places, OffsetSpec.latest())
    return {place: Bounds(firsts[place], end) for place, end in ends.items() if place in firsts}


def offsets_at(kafka: Mapping[str, Any], places: Collection[Place], timestamp_ms: int, timeout_s: float) -> dict[Place, int | None]:
    """Return the first offset at or after a time for each partition; None if all of its records are older.

    Raises Unavailable if there is no answer for one of them.
    """
    if not places:
        return {}
    found = _Offsets(kafka, timeout_s).of(places, OffsetSpec.for_timestamp(timestamp_ms))
    if missing := sorted(set(places).difference(found)):
        topic, partition = missing[0]
        raise Unavailable(f"Kafka reports no offset of {topic}-{partition} at this time; try again")
    return {place: None if offset < 0 else offset for place, offset in found.items()}


class _Offsets:
    """Asks for offsets of partitions of many topics until ``timeout_s`` is over."""

    def __init__(self, kafka: Mapping[str, Any], timeout_s: float, admin: AdminClient | None = None) -> None:
        self._admin: AdminClient = offsets_client(kafka) if admin is None else admin
        self._deadline_s = time.monotonic() + timeout_s
        self._looked = False

    def of(self, places: Collection[Place], spec: OffsetSpec) -> dict[Place, int]:
        """Return the offsets that Kafka answers, negative for none. Hidden partitions are left out. Raises Unavailable."""
        found: dict[Place, int] = {}
        left = set(places)

        # A new client replaces its first connection at once; a request in flight would be repeated after one or three seconds. After a
        # failure, the client would ask the former leaders.
        look = set() if self._looked else {next(iter(left))[0]}

        def ask(timeout_s: float) -> None:
            nonlocal look
            for topic in look:
                self._admin.list_topics(topic, timeout=timeout_s)
            self._looked, look = True, {topic for topic, _ in left}
            failure = self._ask_once(left, spec, found, timeout_s)
            if failure is not None:
                raise failure

        try:
            ask_in_tries(self._deadline_s, ask)
        except KafkaException as error:
            raise Unavailable(f"the offsets of partitions cannot be read: {words(error)}") from error
        return found

    def _ask_once(self, left: set[Place], spec: OffsetSpec, found: dict[Place, int], timeout_s: float) -> KafkaException | None:
        """Move partitions from ``left`` to ``found`` as Kafka answers. Return an error of those that remain. Raises KafkaException."""
        failure = None
        asked = self._admin.list_offsets({TopicPartition(*place): spec for place in left}, request_timeout=timeout_s)
        for at, future in asked.items():
            place = at.topic, at.partition
            try:
                offset = int(future.result().offset)
            except KafkaException as error:
                if error.args[0].code() not in _HIDDEN:
                    failure = error
                    continue
            else:
                # The client returns this offset like an answer if the connection broke before the answer.
                if offset == OFFSET_INVALID:
                    failure = KafkaException(KafkaError(KafkaError._TRANSPORT))
                    continue
                found[place] = offset
            left.discard(place)
        return failure
