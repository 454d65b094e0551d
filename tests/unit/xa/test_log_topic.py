"""The decision log in a topic: the decision that counts, and the content that a reader gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from bascule.core.effects import run_blocking
from bascule.core.xa_codes import Code
from bascule.xa import log_topic
from bascule.xa.log import FORMAT, Decision, Heuristic, LogDamaged, Outcome, decode, encode
from bascule.xa.log_topic import LogRecord, LogTopicViolation
from bascule.xa.xid import branch, new_gtrid

GTRID = new_gtrid("shop", 0)


class Topic:
    """A topic in memory. It stores the first ``unknown`` appends without telling the client their offsets."""

    def __init__(self, unknown: int = 0) -> None:
        self.table: dict[bytes, LogRecord] = {}
        self.unknown = unknown
        self.end = 0

    def new_key(self) -> bytes:
        return b"%d" % self.end

    async def append(self, key: bytes, value: bytes) -> int | None:
        self.post(key, value)
        if self.unknown:
            self.unknown -= 1
            return None
        return self.end - 1

    async def reach(self, offset: int) -> Mapping[bytes, LogRecord]:
        assert offset < self.end
        return dict(self.table)

    async def tail(self, *, barrier: bool = True) -> Mapping[bytes, LogRecord]:
        return dict(self.table)

    def known(self) -> Iterable[bytes]:
        return list(self.table)

    def post(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self.table.pop(key, None)
        else:
            self.table[key] = LogRecord(value, self.end)
        self.end += 1


def decided(topic: Topic, outcome: Outcome, *violations: LogTopicViolation, by: str = "") -> Outcome:
    decision = Decision(GTRID, outcome, ("db",), 0, by)
    return run_blocking(log_topic.decide(topic, decision, violations=violations)).outcome


def test_first_decision_stands_for_deciders_and_readers() -> None:
    topic = Topic()
    assert decided(topic, Outcome.ROLLBACK) is Outcome.ROLLBACK
    assert decided(topic, Outcome.COMMIT) is Outcome.ROLLBACK
    assert run_blocking(log_topic.read(topic)).decisions[GTRID].outcome is Outcome.ROLLBACK


@pytest.mark.parametrize("violation", [LogTopicViolation.LAST_DECISION_STANDS, LogTopicViolation.OWN_DECISION_STANDS])
def test_simulated_log_violation_lets_two_outcomes_stand(violation: LogTopicViolation) -> None:
    topic = Topic()
    assert decided(topic, Outcome.ROLLBACK, violation) is Outcome.ROLLBACK
    assert decided(topic, Outcome.COMMIT, violation) is Outcome.COMMIT


def test_decision_at_unknown_offset_is_stored_again_and_first_record_counts() -> None:
    topic = Topic(unknown=2)
    assert decided(topic, Outcome.COMMIT) is Outcome.COMMIT
    assert len(topic.table) == 3
    assert decided(topic, Outcome.ROLLBACK) is Outcome.COMMIT


def test_forgotten_decision_is_deleted_with_all_its_records() -> None:
    topic = Topic(unknown=1)
    decided(topic, Outcome.COMMIT)
    log_topic.forget(topic, [GTRID])
    assert topic.table == {}


def test_heuristic_outcome_is_read_until_it_is_forgotten() -> None:
    topic = Topic()
    heuristic = Heuristic(branch(GTRID, "db"), Code.XA_HEURRB, Outcome.COMMIT, "by hand", 0)
    run_blocking(log_topic.store_heuristic(topic, heuristic))
    assert run_blocking(log_topic.read(topic)).heuristics == {heuristic.xid: heuristic}
    log_topic.forget_heuristic(topic, heuristic.xid)
    assert run_blocking(log_topic.read(topic)).heuristics == {}


def test_first_log_id_stands_and_survives_forget() -> None:
    calls = Topic()
    run_blocking(log_topic.identify(calls, "aaaaaaaa", 0))
    run_blocking(log_topic.identify(calls, "bbbbbbbb", 0))
    log_topic.forget(calls, [GTRID])
    assert run_blocking(log_topic.read(calls)).log_id == "aaaaaaaa"


def test_damaged_entry_is_named_by_offset_and_key() -> None:
    topic = Topic()
    topic.post(GTRID + b"#x", b"{")
    with pytest.raises(LogDamaged, match=r"offset 0, key b'shop/"):
        decided(topic, Outcome.COMMIT)
    with pytest.raises(LogDamaged, match="unreadable entry"):
        run_blocking(log_topic.read(topic))


def test_heuristic_under_the_key_of_a_decision_is_damage() -> None:
    topic = Topic()
    heuristic = Heuristic(branch(GTRID, "db"), Code.XA_HEURRB, Outcome.COMMIT, "by hand", 0)
    topic.post(GTRID + b"#x", encode(heuristic))
    with pytest.raises(LogDamaged, match="the entry is not a decision"):
        decided(topic, Outcome.COMMIT)


def test_log_entry_keeps_tokens_and_old_format_has_none() -> None:
    decision = Decision(GTRID, Outcome.COMMIT, ("db", "jms"), 17, "host/1", ("4711", ""))
    assert decode(encode(decision)) == decision
    assert (decision.token("db"), decision.token("jms"), decision.token("kafka")) == ("4711", "", "")
    old = decode(b'{"gtrid":"shop/1","outcome":"commit","resources":["db"],"by":"host/1","at_ms":17}')
    assert old == Decision(b"shop/1", Outcome.COMMIT, ("db",), 17, "host/1")


def test_log_entry_of_later_format_is_refused() -> None:
    later = encode(Decision(GTRID, Outcome.COMMIT, (), 0, "")).replace(b'"format":%d' % FORMAT, b'"format":%d' % (FORMAT + 1))
    with pytest.raises(LogDamaged, match=f"the format of the entry is {FORMAT + 1}"):
        decode(later)
