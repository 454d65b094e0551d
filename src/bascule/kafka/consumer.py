"""A member of a consumer group: batches of records, explicit commits of offsets, and incremental rebalances."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import GroupOffset, KafkaRecord
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.appender import CLIENT_SETTINGS
from bascule.kafka.errors import passing
from bascule.kafka.history import TopicHistory, content_of, known_offset, readable_headers, taken_at_once
from bascule.kafka.instance import InstanceFence, fenced

#: When records are read again, offsets further apart than this are fetched separately.
GAP_MAX = 1000
#: Timeout, in seconds, for requests for committed offsets and the ends of a topic.
LOOK_TIMEOUT_S = 10.0
#: The metadata of each offset that a member commits. An operator's tool, which sets a group back, commits none.
BY_MEMBER = "bascule"
_SETTINGS: Mapping[str, Any] = {
    **CLIENT_SETTINGS,
    # Members that keep their partitions continue while others join or leave.
    "partition.assignment.strategy": "cooperative-sticky",
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 50,
    "check.crcs": True,
    # The coordinator gets half a second to gather the group in any case.
    "reconnect.backoff.ms": 50,
}
#: Errors that need no report: the first of them is followed by ``on_lost``.
_QUIET = frozenset({KafkaError._MAX_POLL_EXCEEDED, KafkaError._PARTITION_EOF})

Partitions = Callable[[list[tuple[str, int]]], None]

_log = get_log("bascule.kafka.consumer")


class GroupConsumer:
    """Not thread-safe. ``poll`` and ``close`` call ``on_assigned``, ``on_revoked`` (still owned) and ``on_lost`` (no longer owned).

    An assigned partition is paused until ``resume``.
    """

    def __init__(
        self, kafka: Mapping[str, Any], group: str, topics: Collection[str], *, start: str, whole: Collection[str] = (),
        on_assigned: Partitions, on_revoked: Partitions, on_lost: Partitions,
    ) -> None:  # fmt: skip
        """``start`` (``earliest`` or ``latest``) applies if the group has committed nothing. A topic ``^...`` is a pattern.

        Topics in ``whole`` are read from their beginning, whatever ``start`` is.
        """
        # If the committed record was deleted from its topic, reading continues with the next existing record.
        own = {"group.id": group, "enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "earliest"}
        self._settings = {**_SETTINGS, **kafka, **own}
        self._topics = list(topics)
        self._at_end = start == "latest"
        self._whole = frozenset(whole)
        self._failure: KafkaError | None = None
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._held: set[tuple[str, int]] = set()
        self._fence = InstanceFence()
        self._consumer = self._joined()

    def poll(self, count: int, timeout_s: float) -> list[KafkaRecord]:
        """Return the available records, at most ``count``; wait only if there are none.

        Raises Unavailable; SameInstance if another process has taken the name of this member.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if fenced(failure):
                self._join_again()
            raise Unavailable(f"records cannot be read: {failure.str()}")
        messages = taken_at_once(self._consumer, count, timeout_s)
        # An error must not lose the other records: it is raised by the next call.
        return [received_of(message) for message in messages if self._good(message)]

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit the next offset to read of each partition; return when Kafka has stored the offsets.

        Raises Unavailable. The caller retries, unless ``on_lost`` or ``on_revoked`` is called first.
        """
        self._commit([TopicPartition(topic, partition, offset, BY_MEMBER) for (topic, partition), offset in offsets.items()])

    def _commit(self, at: list[TopicPartition]) -> None:
        try:
            for each in self._consumer.commit(offsets=at, asynchronous=False) or []:
                _good(each)
        except KafkaException as error:
            raise Unavailable(f"offsets could not be committed: {error.args[0].str()}") from error

    def hold(self, at: Collection[tuple[str, int]]) -> dict[tuple[str, int], GroupOffset]:
        """Return the group's next offset of each of these paused partitions; the member owned all of them when the call began.

        The call commits the offsets, and the coordinator refuses a commit for partitions that it has given to another member. If nothing
        was committed, the group begins now, and the client at the beginning of the topic: see ``read_on``. Raises Unavailable.
        """
        try:
            found = self._consumer.committed([TopicPartition(*each) for each in at], timeout=LOOK_TIMEOUT_S)
            offsets = [self._begun(each) if each.offset < 0 else each for each in map(_good, found)]
        except KafkaException as error:
            raise Unavailable(f"the offsets of the group cannot be read: {error.args[0].str()}") from error
        # An operator's offset keeps its status until a record is read from there.
        self._commit(offsets)
        return {(each.topic, each.partition): GroupOffset(each.offset, each.metadata == BY_MEMBER) for each in offsets}

    def read_on(self, at: tuple[str, int], offset: int) -> int:
        """Read an active partition from ``offset``, or from its beginning if it ends before that offset; return the offset.

        A partition ends before an offset that was read if its topic was recreated or truncated. Raises Unavailable.
        """
        try:
            first, end = self._ends(TopicPartition(*at))
            offset = offset if offset <= end else first
            self._consumer.seek(TopicPartition(*at, offset))
        except KafkaException as error:
            raise Unavailable(f"{at[0]}-{at[1]} cannot be read from offset {offset}: {error.args[0].str()}") from error
        return offset

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        """Pause partitions; partitions that are not assigned are ignored."""
        self._consumer.pause(self._ours(partitions))

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        """Resume partitions; partitions that are not assigned are ignored."""
        self._consumer.resume(self._ours(partitions))

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    def _joined(self) -> Consumer:
        consumer = clients.consumer(self._settings)
        consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        return consumer

    def _join_again(self) -> None:
        """Replace a fenced client, which reads nothing and loses its partitions without a callback. Raises SameInstance."""
        held, self._held = self._held, set()
        self._on_lost(sorted(held))
        self._fence.meet()
        _log.warning("group gave the name of this member to another client, rejoining", group=self._settings["group.id"])
        self._consumer.close()
        self._consumer = self._joined()

    def _ours(self, partitions: Collection[tuple[str, int]]) -> list[TopicPartition]:
        return [each for each in self._consumer.assignment() if (each.topic, each.partition) in partitions]

    def _good(self, message: Message) -> bool:
        failure = message.error()
        if failure is not None and not passing(failure) and failure.code() not in _QUIET:
            self._failure = failure
        return failure is None

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        consumer.pause(partitions)
        places = [(each.topic, each.partition) for each in partitions]
        self._held.update(places)
        self._on_assigned(places)

    def _begun(self, at: TopicPartition) -> TopicPartition:
        """Return the first offset of the group in a partition without a committed offset. Raises KafkaException."""
        first, end = self._ends(TopicPartition(at.topic, at.partition))
        return TopicPartition(at.topic, at.partition, end if self._at_end and at.topic not in self._whole else first, BY_MEMBER)

    def _ends(self, at: TopicPartition) -> tuple[int, int]:
        """Return the first offset and the next offset to be written. Raises KafkaException."""
        ends = self._consumer.get_watermark_offsets(at, timeout=LOOK_TIMEOUT_S)
        if ends is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return ends

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._on_revoked(self._released(partitions))
        consumer.incremental_unassign(partitions)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._on_lost(self._released(partitions))
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException:
            consumer.unassign()

    def _released(self, partitions: list[TopicPartition]) -> list[tuple[str, int]]:
        places = [(each.topic, each.partition) for each in partitions]
        self._held.difference_update(places)
        return places


def _good(answer: TopicPartition) -> TopicPartition:
    if answer.error is not None:
        raise KafkaException(answer.error)
    return answer


def read_again(kafka: Mapping[str, Any], topic: str, partition: int, offsets: Collection[int]) -> dict[int, KafkaRecord]:
    """Return the records at these offsets that still exist. Raises Unavailable."""
    found: dict[int, KafkaRecord] = {}
    if not offsets:
        return found
    history = TopicHistory({**CLIENT_SETTINGS, **kafka}, topic, partition)
    earliest, wanted = history.earliest(), set(offsets)
    for first, last in _ranges(sorted(offset for offset in wanted if offset >= earliest)):
        for message in history.records(first, last + 1, committed=True):
            if message.offset() in wanted:
                found[message.offset() or 0] = received_of(message)
    return found


def _ranges(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs without large gaps, both ends included.

    >>> _ranges([1, 2, 5, 5000])
    [(1, 5), (5000, 5000)]
    """
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and offset - ranges[-1][1] <= GAP_MAX:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges


def received_of(message: Message) -> KafkaRecord:
    """Return the content of a message of the client."""
    headers = readable_headers(message)
    fault = "the name of a header is no text (UTF-8)" if headers is None else ""
    topic, partition = message.topic(), message.partition()
    if topic is None or partition is None:
        raise Unavailable("the Kafka client returned a record without topic or partition")
    return KafkaRecord(topic, partition, known_offset(message), *content_of(message), headers or (), message.timestamp()[1], fault)
