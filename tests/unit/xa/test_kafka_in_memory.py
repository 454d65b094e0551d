"""Kafka as a resource, and the decision log in Kafka: the clients of the product, on Kafka in memory."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import pytest
from confluent_kafka import KafkaError

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput, TooLarge
from bascule.core.kafka_records import Outgoing
from bascule.kafka import clients
from bascule.kafka.guards import UnsafeTopic
from bascule.threads.clock import elapsed_s
from bascule.xa import Vote, Xid, kafka_clients
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, ResourceError, ResourceFailed, UnknownXid
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from bascule.xa.kafka_protocol import LIMITS, BranchLimits
from bascule.xa.kafka_records import AGES, STARTED, LogEntry, is_about_branch, key_of, told_outcome
from bascule.xa.log import Decision, Heuristic, LogDamaged, Outcome
from bascule.xa.xid import branch, new_gtrid
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

TIMEOUT_S = 30.0 * SLOWNESS
COMMIT = Decision(b"g1", Outcome.COMMIT, ("a", "b"), 1, "one", ("t", ""))
#: Each recovery looks for old messages, and a message is old as soon as it was sent.
OLD_AT_ONCE = BranchLimits(clean_interval_s=0.0, unprepared_kept_s=-60.0)


class Make(Protocol):
    def __call__(self, instance: str, limits: BranchLimits = LIMITS) -> KafkaResource: ...


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    cluster = KafkaInMemory(monkeypatch)
    cluster.create("orders", 1)
    return cluster


@pytest.fixture
def make(kafka: KafkaInMemory) -> Iterator[Make]:
    """Make the resource of a process. All processes share the side topic and the log."""
    made: list[KafkaResource] = []

    def make(instance: str, limits: BranchLimits = LIMITS) -> KafkaResource:
        made.append(KafkaResource("kafka", SETTINGS, prefix="xa", instance=instance, limits=limits))
        return made[-1]

    yield make
    for each in made:
        each.close()
    wait_for(lambda: not kafka.open_clients(), "all clients to be freed")


@contextmanager
def decision_log(*, topic: str = "decisions") -> Iterator[KafkaLog]:
    with closing(KafkaLog(SETTINGS, topic=topic)) as log:
        yield log


def sent(resource: KafkaResource, *values: bytes) -> Xid:
    """Send ``values`` in a branch, end its work, and return its XID."""
    xid = branch(new_gtrid("test", 0), "kafka")
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    for value in values:
        handle.send("orders", value, b"key", headers=[("name", b"header")], timestamp_ms=7)
    resource.end(xid, success=True)
    return xid


def test_records_of_prepared_branch_are_visible_only_after_commit(make: Make, kafka: KafkaInMemory) -> None:
    resource = make("one")
    xid = sent(resource, b"1", b"2")
    assert list(resource.started()) == [xid]
    assert resource.prepare(xid) is Vote.YES
    assert kafka.values("orders") == []
    assert list(resource.recover()) == [xid]
    resource.commit(xid)
    assert kafka.values("orders") == [b"1", b"2"]
    assert list(resource.recover()) == []


def test_prepared_branch_is_committed_once_by_other_process(make: Make, kafka: KafkaInMemory) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1")
    one.prepare(xid)
    assert list(other.recover()) == [xid]
    other.commit(xid)
    with pytest.raises(UnknownXid):
        one.commit(xid)
    assert kafka.values("orders") == [b"1"]
    (copy,) = [record for record in kafka.partition("orders").records.values() if record.value is not None]
    assert (copy.key, copy.headers, copy.timestamp_ms) == (b"key", [("name", b"header")], 7)


def test_process_that_commits_branch_of_other_process_releases_client_with_its_transactional_id(make: Make, kafka: KafkaInMemory) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1")
    one.prepare(xid)
    other.commit(xid)
    wait_for(lambda: max(transactional_ids(kafka).values()) == 1, "the client under the other's id to be freed")


def transactional_ids(kafka: KafkaInMemory) -> Counter[str]:
    """Return the number of clients of each transactional id."""
    gc.collect()
    producers = [client for kind, ref in kafka.made if kind == "producer" and (client := ref()) is not None]
    return Counter(each.settings["transactional.id"] for each in producers if "transactional.id" in each.settings)


def test_records_of_rolled_back_branch_are_never_visible(make: Make, kafka: KafkaInMemory) -> None:
    resource = make("one")
    prepared, active = sent(resource, b"1"), sent(resource, b"2")
    resource.prepare(prepared)
    for xid in (prepared, active):
        resource.rollback(xid)
    assert kafka.values("orders") == []
    assert list(resource.recover()) == []
    assert resource.started() == {}


def test_commit_after_rollback_by_other_process_raises_heuristic(make: Make, kafka: KafkaInMemory) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1")
    one.prepare(xid)
    other.rollback(xid)
    for resource in (one, make("third")):
        with pytest.raises(BranchHeuristic, match=r"another process ended .* by rollback") as raised:
            resource.commit(xid)
        assert raised.value.xa_code is Code.XA_HEURRB
    assert kafka.values("orders") == []


def test_rollback_after_commit_by_other_process_raises_heuristic(make: Make, kafka: KafkaInMemory) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1")
    one.prepare(xid)
    other.commit(xid)
    for resource in (one, make("third")):
        with pytest.raises(BranchHeuristic, match="by commit") as raised:
            resource.rollback(xid)
        assert raised.value.xa_code is Code.XA_HEURCOM
    assert other.started() == {}
    assert kafka.values("orders") == [b"1"]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_one_phase_commit_reports_outcome_forced_by_operator(
    make: Make, kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1")
    finish = one._branches._finish

    async def finish_late(*args: Any, **more: Any) -> None:
        assert list(other.recover()) == [xid]
        (other.commit if outcome is Outcome.COMMIT else other.rollback)(xid)
        await finish(*args, **more)

    monkeypatch.setattr(one._branches, "_finish", finish_late)
    if outcome is Outcome.COMMIT:
        one.commit(xid, one_phase=True)
        assert kafka.values("orders") == [b"1"]
    else:
        with pytest.raises(BranchRolledBack):
            one.commit(xid, one_phase=True)
        assert kafka.values("orders") == []


def test_kafka_branch_without_records_votes_read_only(make: Make) -> None:
    resource = make("one")
    assert resource.prepare(sent(resource)) is Vote.READ_ONLY
    assert list(resource.recover()) == []


def test_kafka_branch_commits_in_one_phase(make: Make, kafka: KafkaInMemory) -> None:
    resource = make("one")
    resource.commit(sent(resource, b"1"), one_phase=True)
    assert kafka.values("orders") == [b"1"]


def test_branches_of_one_process_commit_in_sequence(make: Make, kafka: KafkaInMemory) -> None:
    resource = make("one")
    xids = [sent(resource, str(number).encode()) for number in range(5)]
    for xid in xids:
        resource.prepare(xid)
    for xid in xids:
        resource.commit(xid)
    assert kafka.values("orders") == [b"0", b"1", b"2", b"3", b"4"]


def test_record_that_topic_would_refuse_is_refused_at_send(make: Make, kafka: KafkaInMemory) -> None:
    kafka.create("small", 1, max_message_bytes="1000")
    resource = make("one")
    handle = resource.start(branch(new_gtrid("test", 0), "kafka"), timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidInput, match="topic 'missing' does not exist"):
        handle.send("missing", b"x")
    with pytest.raises(TooLarge, match=r"'small': max\.message\.bytes of the topic is 1000"):
        handle.send("small", bytes(900))
    handle.send("small", bytes(700))
    kafka.topics["small"].config["max.message.bytes"] = "2000"
    handle.send("small", bytes(900))


def test_record_for_topic_without_right_to_write_is_refused_at_send(make: Make, kafka: KafkaInMemory) -> None:
    """Kafka would refuse the commit of the prepared branch, for as long as the right is missing."""
    kafka.denied.add("orders")
    handle = make("one").start(branch(new_gtrid("test", 0), "kafka"), timeout_s=TIMEOUT_S)
    with pytest.raises(ResourceFailed, match="may not be written: Kafka's ACLs do not allow it"):
        handle.send("orders", b"1")
    kafka.denied.discard("orders")
    handle.send("orders", b"1")


def test_changed_rules_of_topic_apply_after_a_time_and_last_ones_while_kafka_is_away(
    make: Make, kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = make("one").start(branch(new_gtrid("test", 0), "kafka"), timeout_s=TIMEOUT_S)
    handle.send("orders", b"1")
    monkeypatch.setattr(kafka_clients, "RULES_KEPT_S", 0.0)
    kafka.topics["orders"].config["cleanup.policy"] = "compact"
    kafka.fail("describe_configs", KafkaError.UNKNOWN)
    handle.send("orders", b"2")
    with pytest.raises(InvalidInput, match="topic 'orders' needs a key"):
        handle.send("orders", b"3")
    kafka.denied.add("orders")
    with pytest.raises(ResourceFailed, match="may not be written"):
        handle.send("orders", b"4", b"key")


def test_branch_beyond_byte_limit_refuses_record(make: Make) -> None:
    handle = make("one", BranchLimits(bytes_max=2000)).start(branch(new_gtrid("test", 0), "kafka"), timeout_s=TIMEOUT_S)
    for _ in range(2):
        handle.send("orders", bytes(600))
    with pytest.raises(InvalidInput, match="the limits are 500,000 records and 0 MiB"):
        handle.send("orders", bytes(900))


def test_resource_fails_when_client_cannot_be_created_and_recovers_later(make: Make, kafka: KafkaInMemory) -> None:
    kafka.fail("admin", KafkaError._INVALID_ARG)
    resource = make("one")
    with pytest.raises(ResourceFailed, match="kafka: "):
        sent(resource, b"1")
    resource.commit(sent(resource, b"1"), one_phase=True)
    assert kafka.values("orders") == [b"1"]


def test_forget_of_kafka_branch_raises_unknown_xid(make: Make) -> None:
    with pytest.raises(UnknownXid):
        make("one").forget(branch(new_gtrid("test", 0), "kafka"))


def test_old_messages_not_needed_by_prepared_branches_are_deleted(make: Make, kafka: KafkaInMemory) -> None:
    resource, dead = make("one", OLD_AT_ONCE), make("dead")
    committed, prepared, abandoned = sent(resource, b"1"), sent(resource, b"2", b"3"), sent(dead, b"4")
    for xid in (committed, prepared):
        resource.prepare(xid)
    resource.commit(committed)
    assert resource.started().keys() == {abandoned}
    assert list(resource.recover()) == [prepared]
    assert resource.started() == {}
    assert on_side(kafka) - {b"4"} == {b"2", b"3"}
    resource.commit(prepared)
    assert kafka.values("orders") == [b"1", b"2", b"3"]
    assert list(resource.recover()) == []
    assert on_side(kafka) == set()


@pytest.mark.parametrize(
    "limits", [BranchLimits(clean_interval_s=0.0), BranchLimits(unprepared_kept_s=OLD_AT_ONCE.unprepared_kept_s)], ids=["young", "not due"]
)
def test_messages_of_branch_that_may_still_be_prepared_are_kept(make: Make, kafka: KafkaInMemory, limits: BranchLimits) -> None:
    resource = make("one")
    xid = sent(resource, b"1")
    assert list(make("other", limits).recover()) == []
    assert resource.started().keys() == {xid}
    assert on_side(kafka) == {b"1"}


def test_cleaner_with_a_fast_wall_clock_keeps_messages_of_a_branch_that_is_prepared_later(
    make: Make, kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource, cleaner = make("one"), make("cleaner", BranchLimits(clean_interval_s=0.0))
    xid = sent(resource, b"1")
    monkeypatch.setattr(cleaner._calls, "now_ms", lambda: time.time_ns() // 1_000_000 + 25 * 3_600_000)
    for _ in range(2):
        assert list(cleaner.recover()) == []
    assert on_side(kafka) == {b"1"}
    assert resource.started().keys() == {xid}
    assert resource.prepare(xid) is Vote.YES
    resource.commit(xid)
    assert kafka.values("orders") == [b"1"]


def test_remains_are_deleted_when_processes_together_have_known_them_for_a_day(make: Make, kafka: KafkaInMemory) -> None:
    """No process runs for a day: each continues the measurement of the one before."""
    dead = make("dead")
    xid = sent(dead, b"1")
    for number in range(8):
        cleaner = make(f"cleaner{number}", BranchLimits(clean_interval_s=0.0))
        cleaner.recover()
        assert on_side(kafka) == {b"1"}, number
        with patch.object(cleaner._calls, "monotonic_s", lambda: elapsed_s() + 3.0 * 3600):
            cleaner.recover()
    assert dead.started() == {}
    assert on_side(kafka) == set()
    with pytest.raises(UnknownXid):
        make("one").commit(xid)


def test_branch_that_took_too_long_by_either_clock_is_not_prepared(make: Make) -> None:
    resource = make("one")
    for clock, value in (("now_ms", time.time_ns() // 1_000_000 - 25 * 3_600_000), ("monotonic_s", elapsed_s() + 3601.0)):
        xid = sent(resource, b"1")
        with patch.object(resource._calls, clock, lambda value=value: value), pytest.raises(BranchRolledBack, match="3600 s have passed"):
            resource.prepare(xid)


def test_outcome_told_by_another_process_is_kept_while_few_are_newer(make: Make, kafka: KafkaInMemory) -> None:
    resource, operator = make("one"), make("operator")
    branches = [sent(resource, b"%d" % number) for number in range(3)]
    for xid in branches:
        resource.prepare(xid)
        operator.rollback(xid)
    cleaner = make("cleaner", BranchLimits(clean_interval_s=0.0, marks_max=2))
    for hours, left in ((0, 3), (23, 3), (25, 2), (26, 2)):
        with patch.object(cleaner._calls, "monotonic_s", lambda hours=hours: elapsed_s() + hours * 3600.0):
            cleaner.recover()
        assert len(marks(cleaner)) == left
    for xid in (each for each in branches if key_of(each) + STARTED in marks(cleaner)):
        with pytest.raises(BranchHeuristic):
            resource.commit(xid)


def test_unreadable_ages_of_messages_are_reported_and_measured_again(
    make: Make, kafka: KafkaInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    resource = make("one")
    resource.recover()
    resource._calls.append(Outgoing("xa.log", AGES, b"{", partition=0))
    assert resource.recover() == []
    assert any(line.startswith("ages of branch messages unreadable, measuring again") for line in caplog.messages)


def marks(resource: KafkaResource) -> list[bytes]:
    table = run_blocking(resource._calls.table())
    return [key for key, entry in table.items() if is_about_branch(key) and key.endswith(STARTED) and told_outcome(entry) is not None]


def test_branches_are_listed_when_kafka_does_not_report_old_offsets(make: Make, kafka: KafkaInMemory) -> None:
    make("one").recover()
    resource = make("one", OLD_AT_ONCE)
    xid = sent(resource, b"1")
    resource.prepare(xid)
    read = resource._calls.table

    async def table() -> Mapping[bytes, LogEntry]:
        found = await read()
        kafka.fail("list_offsets", KafkaError.UNKNOWN, times=100)
        return found

    with patch.object(resource._calls, "table", table):
        assert list(resource.recover()) == [xid]
    kafka.faults["list_offsets"].clear()
    assert on_side(kafka) == {b"1"}
    resource.commit(xid)
    assert kafka.values("orders") == [b"1"]


def test_branch_with_unreadable_messages_stays_prepared(make: Make, kafka: KafkaInMemory) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1")
    one.prepare(xid)
    kafka.denied.add("orders")  # without its messages, the branch would be an empty transaction, which must not commit
    for partition in kafka.topics["xa.side"].partitions:
        partition.delete(partition.end)
    with pytest.raises(ResourceFailed, match=r"kafka: xa\.side"):
        other.commit(xid)
    assert list(other.recover()) == [xid]
    assert kafka.values("orders") == []


def test_branch_too_large_for_memory_is_committed_from_side_topic(make: Make, kafka: KafkaInMemory) -> None:
    resource = make("one", BranchLimits(kept_bytes_max=250))
    xid = sent(resource, bytes(100), b"2" * 100, b"3")
    assert resource._branches._sent[xid].messages is None
    resource.prepare(xid)
    resource.commit(xid)
    assert kafka.values("orders") == [bytes(100), b"2" * 100, b"3"]


def test_branch_with_missing_messages_is_not_partially_committed(make: Make, kafka: KafkaInMemory) -> None:
    one, other = make("one"), make("other")
    xid = sent(one, b"1", b"2")
    one.prepare(xid)
    for partition in kafka.topics["xa.side"].partitions:
        for offset, record in list(partition.records.items()):
            if record.value == b"2":
                del partition.records[offset]
    with pytest.raises(ResourceError, match=r"topic 'xa\.side' has only 1 of 2 messages of branch "):
        other.commit(xid)
    assert list(other.recover()) == [xid]
    assert kafka.values("orders") == []


def on_side(kafka: KafkaInMemory) -> set[bytes | None]:
    """Return the values of the messages on the side topic."""
    return {value for number in range(len(kafka.topics["xa.side"].partitions)) for value in kafka.values("xa.side", number)}


def test_open_transaction_of_dead_process_does_not_block_recovery(make: Make, kafka: KafkaInMemory) -> None:
    """A reader would wait until the open transaction times out."""
    one, dead = make("one"), make("dead")
    xid = sent(dead, b"1")
    dead.prepare(xid)
    slot = clients.producer({**SETTINGS, "transactional.id": "xa.dead.0"})
    slot.init_transactions()
    slot.begin_transaction()
    for partition in range(len(kafka.topics["xa.log"].partitions)):
        slot.produce("xa.log", b"unfinished", b"unfinished", partition=partition)
    assert list(one.recover()) == [xid]
    assert kafka.transactional["xa.dead.0"].open is None


@pytest.mark.usefixtures("kafka")
def test_first_decision_in_kafka_log_stands_in_every_process() -> None:
    with decision_log() as one, decision_log() as other:
        assert one.decide(COMMIT) == COMMIT
        late = Decision(b"g1", Outcome.ROLLBACK, (), 2, "other")
        assert other.decide(late) == COMMIT
        assert other.read().decisions == {b"g1": COMMIT}
        other.forget([b"g1"])
        assert one.read().decisions == {}
        assert other.decide(late) == late


@pytest.mark.usefixtures("kafka")
def test_kafka_log_has_one_id_for_all_processes() -> None:
    with decision_log() as one, decision_log() as other, decision_log(topic="others") as another:
        log_id = one.read().log_id
        assert (other.read().log_id, one.read().log_id) == (log_id, log_id)
        assert another.read().log_id not in ("", log_id)


@pytest.mark.usefixtures("kafka")
def test_replaced_log_topic_is_refused() -> None:
    with decision_log() as other, decision_log() as log:
        other.read()
        log._log_id = "00000000"
        with pytest.raises(LogDamaged, match="decisions': the topic was replaced by another log"):
            log.read()


@pytest.mark.usefixtures("kafka")
def test_heuristic_outcome_stays_in_kafka_log_until_forget() -> None:
    heuristic = Heuristic(Xid(1, b"g", b"b"), Code.XA_HEURRB, Outcome.COMMIT, "rolled back by hand", 5)
    with decision_log() as log:
        log.record(heuristic)
        assert log.read().heuristics == {heuristic.xid: heuristic}
        log.forget_heuristic(heuristic.xid)
        assert log.read().heuristics == {}


def test_unreadable_log_entry_is_named_by_topic_offset_and_key(kafka: KafkaInMemory) -> None:
    with decision_log() as log:
        log.read()
        offset = kafka.put("decisions", b"{", b"foreign")
        with pytest.raises(LogDamaged, match=rf"decision log 'decisions': offset {offset}, key b'foreign': unreadable entry"):
            log.read()
        assert log.decide(COMMIT) == COMMIT
        kafka.put("decisions", b"{", b"g2#foreign")
        with pytest.raises(LogDamaged, match=r"decision log 'decisions': offset .*, key b'g2#foreign'"):
            log.decide(Decision(b"g2", Outcome.COMMIT, (), 3, "one"))


def test_log_topic_that_can_lose_decisions_is_refused(kafka: KafkaInMemory) -> None:
    kafka.create("decisions", 1, cleanup_policy="delete")
    with decision_log() as log, pytest.raises(UnsafeTopic, match="decisions"):
        log.decide(COMMIT)
    assert kafka.values("decisions") == []


def test_settings_of_log_topic_are_checked_at_each_read(kafka: KafkaInMemory) -> None:
    with decision_log() as log:
        log.decide(COMMIT)
        kafka.topics["decisions"].config["cleanup.policy"] = "delete"
        with pytest.raises(UnsafeTopic, match="decisions"):
            log.read()
