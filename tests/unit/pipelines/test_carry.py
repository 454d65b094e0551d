"""Records that the target topic refuses, moved positions, kept writers, and timestamps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bascule.core.destination import Routing
from bascule.core.effects import run_blocking
from bascule.core.errors import Denied, TopicMissing, Unavailable
from bascule.core.kafka_records import KafkaRecord, Output
from bascule.jms.record_headers import TIMESTAMP_HEADER
from bascule.journal.records import Send, SendFlag
from bascule.pipelines import carry
from bascule.pipelines.carry import Carrier, held_position
from bascule.pipelines.divert import DivertEngine, WantedMessage
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec, TransactionLimits
from bascule.pipelines.timestamps import Timestamps
from bascule.writer.claims import Claim
from bascule.writer.errors import Unwritable, WriteDenied
from bascule.writer.incarnation import FIRST_PAUSE_S
from bascule.writer.lineage import READ_ANYWHERE, SeenRecord
from bascule.writer.position import Position, PositionLost
from tests.support.journal import text_message

START = Position("journal", "id", 0, 0, epoch=-1, sequence=0)


class Cluster:
    """The topics of a Kafka that allows nobody to write to the topic "closed"."""

    journal_id = "id"

    def partitions(self) -> dict[str, int]:
        return dict.fromkeys(("dead", "open", "closed"), 1)

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        return {topic: self.journal_id for topic in topics if self.journal_id}

    def config(self, topic: str) -> dict[str, str]:
        raise Unavailable(f"topic {topic!r} cannot be described")

    def check_writable(self, topic: str) -> None:
        if topic == "closed":
            raise Denied(topic, "may not be written")


class Writer:
    """A writer that keeps the output of its transactions in memory."""

    def __init__(self, key: str = "") -> None:
        self.topics: list[str] = []
        self.key = key
        self.closed = False

    def current(self) -> Position:
        return START

    def close(self) -> None:
        self.closed = True

    def write(self, outputs: Sequence[Output], *_: Position, confirm: object = None) -> None:
        self.topics += [output.topic for output in outputs]

    def prepare(self) -> None:
        """Do nothing: a next transaction is always possible."""

    def begins_in_s(self) -> float:
        """A transaction can always begin."""
        return 0.0

    def ahead(self, *_: object) -> None:
        """Everything is written at the commit."""

    abandon = prepare


class Lineage:
    """A lineage whose leader never changes."""

    def check_read(self, at: Position, leader_epoch: int, *_: object) -> int:
        return START.leader_epoch if leader_epoch == READ_ANYWHERE else leader_epoch

    def leader_epoch(self) -> int:
        return START.leader_epoch

    def confirms(self, *_: object) -> bool:
        return True

    def check_tail(self, position: Position) -> int:
        return position.leader_epoch


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    writer = Writer()
    monkeypatch.setattr(carry, "Topics", lambda _: Cluster())
    monkeypatch.setattr(carry, "targets_for", carry.Targets)
    monkeypatch.setattr(carry, "writer_for", lambda *_: writer)
    monkeypatch.setattr(carry, "_kept", carry._Tools())
    monkeypatch.setattr(carry, "lineage_of", lambda *_: Lineage())
    return writer


def carrier(*, unseen: bool = False) -> Carrier:
    claim = Claim("diverts/journal/0", "journal", "id", 0, "me")
    return Carrier(PipelinesSpec("bridge", {}, target_partitions=0), claim, START, unseen=unseen)


class OtherRecords(Lineage):
    """The lineage of a leader that has other records than those that a former leader returned, in the epoch of the position."""

    def check_read(self, at: Position, leader_epoch: int, *_: object) -> int:
        if leader_epoch == READ_ANYWHERE:
            raise Unavailable("the record at offset 0 has changed")
        return leader_epoch


def commit_one(carrier: Carrier) -> None:
    with carrier:
        carrier.add(Output("open", b"", b"x", []), lambda error: pytest.fail(str(error)))
        carrier.reach(SeenRecord(0, b"d", b"x"))
        carrier.commit()


def test_first_records_that_spark_has_read_from_a_former_leader_are_not_written(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "lineage_of", lambda *_: OtherRecords())
    with pytest.raises(Unavailable, match="has changed"):
        commit_one(carrier(unseen=True))
    assert writer.topics == []
    commit_one(carrier())  # whose reader knows its leader
    assert writer.topics == ["open"]


@pytest.mark.parametrize("journal_id", ["another", ""])
def test_records_that_spark_has_read_from_a_recreated_topic_are_not_written(
    writer: Writer, journal_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_one(carrier(unseen=True))
    assert writer.topics == ["open"]
    monkeypatch.setattr(Cluster, "journal_id", journal_id)
    with pytest.raises(Unavailable, match="recreated"):
        commit_one(carrier(unseen=True))
    assert writer.topics == ["open"]


class MovedLeader(Lineage):
    """A lineage whose leader has changed since the position, and has all records. It confirms at the attempt ``confirmed_at``."""

    def __init__(self, confirmed_at: int = 1) -> None:
        self.confirmed_at = confirmed_at
        self.patience_s: list[float] = []
        self.open = False

    def check_read(self, at: Position, leader_epoch: int, *_: object) -> int:
        assert not self.open, "others wait for the end of the transaction"
        return leader_epoch + 1

    def confirms(self, leader_epoch: int, _offset: int, timeout_s: float) -> bool:  # type: ignore[override]
        self.patience_s.append(timeout_s)
        return leader_epoch == 7 and len(self.patience_s) > self.confirmed_at


def commit_under(lineage: MovedLeader, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Position], list[float]]:
    """Commit a record. Return the positions written, and the pauses before each further attempt."""
    written: list[Position] = []
    pauses_s: list[float] = []

    def write(outputs: Sequence[Output], before: Position, after: Position, confirm: Any) -> None:
        lineage.open = True
        try:
            run_blocking(confirm())
        finally:
            lineage.open = False
        written.append(after)

    monkeypatch.setattr(writer, "write", write)
    monkeypatch.setattr(carry, "lineage_of", lambda *_: lineage)
    monkeypatch.setattr(carry.time, "sleep", pauses_s.append)
    at = replace(START, leader_epoch=6)
    with Carrier(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me"), at) as carrying:
        carrying.reach(SeenRecord(0, None, b""))
        carrying.commit()
        assert carrying.position == replace(at, offset=1, leader_epoch=7)
    return written, pauses_s


def test_position_names_the_leader_that_was_found_after_the_transaction_was_aborted(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, pauses_s = commit_under(MovedLeader(), writer, monkeypatch)
    assert [position.leader_epoch for position in written] == [7]
    assert pauses_s == [FIRST_PAUSE_S]


def test_leader_that_does_not_confirm_in_time_gets_more_time_after_each_abort_and_a_pause(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = MovedLeader(confirmed_at=5)
    written, pauses_s = commit_under(lineage, writer, monkeypatch)
    assert lineage.patience_s == [2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert pauses_s == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert len(written) == 1


def test_leader_that_never_confirms_ends_the_task(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = MovedLeader(confirmed_at=100)
    with pytest.raises(Unavailable, match="journal-0: no leader has confirmed the records in 8 attempts"):
        commit_under(lineage, writer, monkeypatch)
    assert len(lineage.patience_s) == carry.DOUBTS_MAX


def carry_messages(divert: DivertSpec, *addresses: str, dead_letter_topic: str | None = "dead") -> None:
    engine = DivertEngine("bridge", ("journal", 0), dead_letter_topic)
    with carrier() as carrying:
        for offset, address in enumerate(addresses):
            send = Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 1, 0, 0, address, (), (), (), None, text_message("m"))
            taken = WantedMessage(offset, 0, offset + 1, 0, send, [divert], {})
            for _, output in engine.outputs(taken):
                carrying.add(output, partial(engine.dead_letter, taken, divert, "KAFKA_PRODUCE"))
            carrying.reach(SeenRecord(offset, None, b""))
        carrying.commit()


@pytest.mark.parametrize("target", ["${rest}", "${address}"])
def test_message_with_missing_or_denied_target_topic_is_dead_lettered_and_others_are_carried(writer: Writer, target: str) -> None:
    addresses = ["open", "missing", "open", "closed", "open"]
    carry_messages(DivertSpec("by-message", "#", target), *addresses)
    assert writer.topics == ["open", "dead", "open", "dead", "open"]


@pytest.mark.parametrize(("topic", "error"), [("missing", TopicMissing), ("closed", Denied)])
def test_missing_or_denied_configured_topic_stops_task(writer: Writer, topic: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"topic '{topic}'"):
        carry_messages(DivertSpec("fixed", "#", topic), "a")
    assert writer.topics == []


def test_dead_letter_topic_with_too_small_record_limit_is_named_in_error(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(outputs: Sequence[Output], *_: Position, confirm: object = None) -> None:
        raise Unwritable({0: KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)})

    monkeypatch.setattr(writer, "write", refuse)
    with pytest.raises(Unwritable, match=r"topic 'dead' refused a dead letter.* too large.*\. Raise max\.message\.bytes"):
        carry_messages(DivertSpec("fixed", "#", "open"), "a")


def passing_over(end: int, *answers: int | Exception) -> Position:
    """Return the position after it was moved from offset 4, with these answers about the tail of the source."""
    known = replace(START, offset=4)
    left = iter(answers)

    def check_tail(_self: Lineage, _position: Position) -> int:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lineage, "check_tail", check_tail)
        with Carrier(PipelinesSpec("bridge", {}), Claim("ingress:in/t/0", "journal", "id", 0, "me"), known) as carrying:
            carrying.pass_over(end)
            return carrying.position


@pytest.mark.parametrize(("end", "epochs", "reached"), [(9, (3, 3), 9), (4, (3, 3), 4)], ids=["idle", "no end"])
def test_idle_position_is_moved_past_transaction_markers(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, end: int, epochs: tuple[int, int], reached: int
) -> None:
    moves: list[Position] = []
    monkeypatch.setattr(writer, "write", lambda _outputs, _before, after, confirm=None: moves.append(after))
    assert passing_over(end, *epochs).offset == reached
    assert moves == ([replace(START, offset=9, leader_epoch=3)] if reached == 9 else [])


@pytest.mark.parametrize("second", [4, PositionLost("t-0 has lost its tail")], ids=["new leader", "new leader without the markers"])
def test_source_is_read_again_if_its_leader_changes_while_an_idle_position_is_moved(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, second: int | Exception
) -> None:
    monkeypatch.setattr(writer, "write", lambda *_: pytest.fail("it moves"))
    with pytest.raises(Unavailable, match="new leader"):
        passing_over(9, 3, second)


def test_uncommitted_records_are_committed_before_the_position_is_moved_past_them(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    monkeypatch.setattr(writer, "write", lambda _outputs, _before, after, confirm=None: moves.append(after.offset))
    with carrier() as carrying:
        carrying.reach(SeenRecord(0, None, b""))
        carrying.pass_over(9)
    assert moves == [1, 9]


@pytest.mark.parametrize("output", [True, False])
def test_output_is_committed_at_once_and_a_position_without_output_after_a_second(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, output: bool
) -> None:
    now_s = 100.0
    monkeypatch.setattr(carry.time, "monotonic", lambda: now_s)
    with carrier() as carrying:
        if output:
            carrying.add(Output("open", None, b"", []), lambda error: pytest.fail(str(error)))
        carrying.reach(SeenRecord(0, None, b""))
        carrying.rest()
        assert carrying.position.offset == int(output)
        now_s += carry.POSITION_S
        carrying.rest()
        assert carrying.position.offset == 1


def test_task_ends_when_kafka_denies_write_without_naming_topic(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def refuse(*each: object, **_: object) -> None:
        tries.append(each)
        raise WriteDenied("a topic")

    monkeypatch.setattr(writer, "write", refuse)
    with pytest.raises(WriteDenied):
        carry_messages(DivertSpec("fixed", "#", "open"), "a")
    assert len(tries) == 1


@pytest.mark.parametrize("error", [TopicMissing("ingress", "does not exist"), Denied("ingress", "may not be written")])
def test_missing_or_denied_ingress_topic_stops_task_instead_of_dead_lettering(error: Exception) -> None:
    engine = IngressEngine(IngressSpec("in", "queue", ("t",)), "bridge", "ingress", "dead")
    with pytest.raises(type(error)):
        engine.dead_letter(KafkaRecord("t", 0, 1, None, b"v", [], 1), "KAFKA_PRODUCE", error)


@pytest.mark.parametrize("large", [{"value": b"x" * 600}, {"key": b"x" * 600}, {"headers": [("name", b"x" * 300), ("x" * 300, None)]}])
def test_transaction_ends_when_values_keys_and_headers_reach_byte_limit(writer: Writer, large: dict[str, Any]) -> None:
    pipelines = PipelinesSpec("bridge", {}, target_partitions=0, limits=TransactionLimits(size_bytes=1000))
    with Carrier(pipelines, Claim("diverts/journal/0", "journal", "id", 0, "me"), START) as carrying:
        for offset in range(3):
            carrying.add(Output("open", None, b"", [])._replace(**large), lambda error: pytest.fail(str(error)))
            carrying.reach(SeenRecord(offset, None, b""))
        assert len(writer.topics) == 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """The writers that the carriers have made."""
    made: list[Writer] = []

    def writer(_kafka: object, _id: str, _topic: str, key: str, *, readers: object) -> Writer:
        made.append(Writer(key))
        return made[-1]

    monkeypatch.setattr(carry, "_kept", carry._Tools(targets=carry.Targets.__new__(carry.Targets)))
    monkeypatch.setattr(carry, "TransactionalWriter", writer)
    monkeypatch.setattr(carry, "lineage_of", lambda *_: Lineage())
    return made


def take(claim: Claim) -> Carrier:
    pipelines = PipelinesSpec("bridge", {})
    return Carrier(pipelines, claim, held_position(pipelines, claim))


def claims_of(count: int) -> list[Claim]:
    return [Claim(f"ingress:in/t/{partition}", "journal", "id", 0, "") for partition in range(count)]


def test_next_task_of_a_worker_reuses_the_writers(made: list[Writer]) -> None:
    claims = claims_of(12)
    for _task in range(3):
        for claim in claims:
            with take(claim):
                pass
    assert len(made) == len(claims)
    assert not any(each.closed for each in made)


@pytest.mark.parametrize(("hard", "count", "raised"), [(400, 100, [(400, 400)]), (-1, 100, [(4000, -1)]), (4096, 2, [])])
def test_worker_may_open_the_descriptors_of_its_writers(
    monkeypatch: pytest.MonkeyPatch, hard: int, count: int, raised: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(carry.resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(carry.resource, "setrlimit", lambda _, limits: found.append(limits))
    carry.allow_writers(count)
    assert found == raised


# -- timestamps ---------------------------------------------------------------------------------------------------------------


NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class Configured:
    """Topics with settings for timestamps, or topics that nobody can describe."""

    def __init__(self, **settings: str) -> None:
        self.settings = {name.replace("_", "."): value for name, value in settings.items()}

    def config(self, topic: str) -> dict[str, str]:
        if not self.settings:
            raise Unavailable(f"topic {topic!r} cannot be described")
        return self.settings


def timestamps(topics: Configured) -> Timestamps:
    return Timestamps(topics, lambda: NOW_MS / 1000)  # type: ignore[arg-type]


def at(timestamp_ms: int, *headers: tuple[str, bytes]) -> Output:
    return Output("t", None, b"v", list(headers), timestamp_ms)


def test_timestamp_refused_by_topic_is_replaced_by_append_time() -> None:
    known = timestamps(Configured(message_timestamp_after_max_ms=str(HOUR_MS), message_timestamp_before_max_ms=str(2 * HOUR_MS)))
    ahead = at(NOW_MS + 2 * HOUR_MS)
    assert known.fitting(ahead) == ahead, "the limits of the topic are not known yet"
    kept = [(TIMESTAMP_HEADER, str(ahead.timestamp_ms).encode())]
    assert known.refused(ahead) == ahead._replace(timestamp_ms=0, headers=kept)
    assert [known.fitting(at(NOW_MS + hours * HOUR_MS)).timestamp_ms == 0 for hours in (-3, -1, 0, 2)] == [True, False, False, True]
    assert known.fitting(at(2**63 - 1)).timestamp_ms == 0
    assert known.fitting(ahead._replace(topic="other")).timestamp_ms == ahead.timestamp_ms


def test_timestamp_limits_of_topic_with_hidden_settings_are_learnt_from_refusals() -> None:
    known = timestamps(Configured())
    known.refused(at(NOW_MS + 2 * HOUR_MS))
    assert known.fitting(at(NOW_MS + 3 * HOUR_MS)).timestamp_ms == 0
    assert known.fitting(at(NOW_MS + HOUR_MS)).timestamp_ms != 0
    known.refused(at(NOW_MS - HOUR_MS))
    assert known.fitting(at(NOW_MS - 2 * HOUR_MS)).timestamp_ms == 0


@pytest.mark.parametrize("timestamp_ms", [-1, -(2**63)])
def test_timestamp_before_1970_is_replaced(timestamp_ms: int) -> None:
    assert timestamps(Configured()).fitting(at(timestamp_ms)).timestamp_ms == 0


def test_refused_jms_timestamp_needs_no_additional_header() -> None:
    headers = ("jms.JMSTimestamp", b"1")
    assert timestamps(Configured()).refused(at(2**62, headers)) == at(0, headers)


def test_records_and_dead_letters_with_refused_timestamps_are_written(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Output] = []

    def write(outputs: Sequence[Output], *_: Position, confirm: object = None) -> None:
        if late := {place: TIMESTAMP for place, each in enumerate(outputs) if each.timestamp_ms > time.time() * 1000 + HOUR_MS}:
            raise Unwritable({min(late): TIMESTAMP})
        written.extend(outputs)

    monkeypatch.setattr(writer, "write", write)
    ahead_ms = int(time.time() * 1000) + 5 * HOUR_MS
    with carrier() as carrying:
        for offset, topic in enumerate(("open", "closed", "open", "open")):
            output = Output(topic, None, b"v", [], ahead_ms)
            carrying.add(output, lambda error: Output("dead", None, b"v", [("why", str(error).encode())], ahead_ms))
            carrying.reach(SeenRecord(offset, None, b""))
        carrying.commit()
    assert [each.topic for each in written] == ["open", "dead", "open", "open"]
    assert {each.timestamp_ms for each in written} == {0}
    assert all((TIMESTAMP_HEADER, str(ahead_ms).encode()) in each.headers for each in written)


TIMESTAMP = KafkaError(KafkaError.INVALID_TIMESTAMP)
