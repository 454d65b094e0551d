"""The checker finds every planted anomaly, by its name, and no anomaly in a correct history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.history import ANOMALIES, Audit, Divert, Facts, Operation, Outcome, Place, check, read_history


def sent(*ids: str, outcome: Outcome = "ok", to: str = "a", **more: Any) -> Operation:
    return Operation("sender", ids, outcome, target=to, op="send", **more)


def moved(*ids: str, outcome: Outcome = "ok", **more: Any) -> Operation:
    return Operation("mover", ids, outcome, "a", "b", op="move", **more)


def taken(*ids: str, outcome: Outcome = "ok", by: str = "taker", source: str = "b", **more: Any) -> Operation:
    return Operation(by, ids, outcome, source=source, op="receive", **more)


def subscribed(name: str, op: str = "subscribe", **more: Any) -> Operation:
    return Operation(f"client of {name}", (), "ok", source="topic:t", op=op, subscription=name, **more)


def received(name: str, *ids: str, outcome: Outcome = "ok", **more: Any) -> Operation:
    return Operation(f"client of {name}", ids, outcome, source="topic:t", op="receive", subscription=name, **more)


SOUND = [
    sent("1"), sent("2", "3"), sent("4", "5", outcome="indeterminate"), sent("6", outcome="fail"), sent("7", outcome="indeterminate"),
    moved("1", "2", outcome="fail"), moved("1", "2", outcome="indeterminate", redelivered=("1", "2")),
    moved("1", "2", "3", redelivered=("1", "2")),
    moved("4", "5", "4", outcome="fail", redelivered=("4",)), moved("4", "5", outcome="indeterminate", redelivered=("4", "5")),
    taken("1", "2", "3", outcome="indeterminate"), taken("1", "2", redelivered=("1", "2")), taken("3", "4", "5", redelivered=("3",)),
]  # fmt: skip
COPIES = ("1", "2", "3", "4", "5")
BY_KIND = {str(number): Facts(properties={"kind": number % 2}) for number in range(1, 10)}
TOPIC = [
    sent("0", to="topic:t"), subscribed("s", begun_ms=0.5), subscribed("odd", selector="kind = 1"),
    sent("1", "2", to="topic:t", facts=BY_KIND, begun_ms=2.5),
    sent("3", to="topic:t", outcome="indeterminate"), received("s", "1", outcome="indeterminate"),
    received("s", "1", "2", redelivered=("1",)),
    received("odd", "1"), subscribed("s", op="unsubscribe"), sent("4", "5", to="topic:t"), received("odd", "5"),
]  # fmt: skip


def found(operations: Sequence[Operation], **more: Any) -> list[str]:
    return [str(anomaly) for anomaly in check(operations, **more).anomalies]


def test_correct_history_has_no_anomaly() -> None:
    tally = check(SOUND, diverted={"t": ("a", COPIES), "u": Divert("a", COPIES, ordered=True)}, journal=AUDIT, healed_ms=100)
    assert tally.anomalies == []
    assert (tally.sent, tally.maybe_sent, tally.recovered, tally.taken, tally.copies) == (3, 3, 2, 5, {"t": 5, "u": 5})
    assert str(tally) == "3 sent, 3 in doubt (2 arrived), 5 taken, 5 in t, 5 in u: no anomaly"


def test_correct_history_of_subscriptions_has_no_anomaly() -> None:
    assert found(TOPIC) == []


AUDIT = Audit({"a": set("1234567"), "b": set("12345")}, {Place("a"): set("12345"), Place("b"): set("12345")})


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        (sent("8"), "lost: 1 sent and never given out from a (8)"),
        (moved("7", outcome="fail"), "lost: 1 given back to a and never given out again (7)"),
        (moved("7"), "lost: 1 sent and never given out from b (7)"),
        (moved("7", outcome="indeterminate"), "torn-tx: 1 taken from a and never seen in b (7)"),
        (taken("2"), "duplicated: 1 given out again from b after they had been acknowledged (2)"),
        (taken("1", outcome="fail"), "duplicated: 1 given out again from b after they had been acknowledged (1)"),
        (taken("2", by="another"), "duplicated: 1 given out again from b after they had been acknowledged (2)"),
        (taken("99", "99"), "duplicated: 1 given out again from b after they had been acknowledged (99)"),
        (taken("99"), "unexpected: 1 in b without having been sent (99)"),
        (taken("6"), "unexpected: 1 in b without having been sent (6)"),
        (moved("6"), "unexpected: 1 in a without having been sent (6)"),
    ],
)
def test_planted_incorrect_operation_is_found(planted: Operation, text: str) -> None:
    assert text in found([*SOUND, planted])


def test_indeterminate_operation_allows_both_outcomes() -> None:
    doubtful = [sent("1", "2", outcome="indeterminate"), sent("3", outcome="indeterminate")]
    assert found([*doubtful, taken("1", "2", source="a")]) == []
    assert found([*doubtful, taken("3", source="a", outcome="indeterminate")]) == []
    assert found([*doubtful, taken("3", source="a", outcome="indeterminate"), taken("3", source="a", redelivered=("3",))]) == []
    assert found(doubtful, diverted={"t": ("a", ())}) == []
    assert found([*doubtful, moved("1", "2"), taken("1", "2", outcome="indeterminate")], diverted={"t": ("a", ("1", "2"))}) == []


def test_partial_transaction_is_found() -> None:
    operations = [sent("1", "2", "3", outcome="indeterminate"), moved("1", "3"), taken("1", "3")]
    assert found(operations) == ["torn-tx: 1 transactions are there in part, which begin (1)"]


def test_partial_transaction_over_two_destinations_is_found_unless_rolled_back() -> None:
    begun = [sent("1", outcome="indeterminate", transaction="x"), sent("2", to="c", outcome="indeterminate", transaction="x")]
    assert found([*begun, taken("1", source="a"), taken("2", source="c")]) == []
    assert found([*begun, taken("1", source="a")]) == ["torn-tx: 1 transactions are there in part, which begin (1)"]
    assert found(begun, diverted={"t": ("a", ["1"])}) == ["torn-tx: 1 transactions are there in part, which begin (1)"]


@pytest.mark.parametrize(
    ("again", "wanted"),
    [
        (taken("1", source="a"), ["redelivered-unmarked: 1 second time from a (1)"]),
        (taken("1", source="a", redelivered=("1",)), []),
        (taken("1", source="a", begun_ms=2, by="another"), ["redelivered-unmarked: 1 second time from a (1)"]),
        # The same holds if another consumer got the message first.
        (taken("1", source="a", by="another"), ["redelivered-unmarked: 1 second time from a (1)"]),
        (taken("1", source="a", by="another", redelivered=("1",)), []),
    ],
)
def test_redelivery_without_mark_is_found(again: Operation, wanted: list[str]) -> None:
    assert found([sent("1"), taken("1", source="a", outcome="fail"), again]) == wanted


def test_non_persistent_message_that_its_sender_repeats_to_the_next_broker_needs_no_mark() -> None:
    lost = sent("1", facts={"1": Facts(persistent=False)})
    assert found([lost, taken("1", source="a", outcome="indeterminate"), taken("1", source="a", by="another")]) == []


def test_message_out_of_order_is_found() -> None:
    operations = [sent("1"), sent("2", facts={"2": Facts(priority=9)}), sent("3"), sent("4")]
    assert found([*operations, taken("2", "1", "3", "4", source="a")]) == []
    assert found([*operations, taken("2", "3", "1", "4", source="a")]) == ["out-of-order: 1 late from a (1)"]
    # Redelivered messages may be late, and so may messages of another consumer.
    assert (
        found([*operations, taken("1", "2", source="a", outcome="fail"), taken("2", "3", "1", "4", source="a", redelivered=("1", "2"))])
        == []
    )
    assert found([*operations, taken("2", "3", "4", source="a"), taken("1", source="a", by="another")]) == []
    late = {"t": Divert("a", ("1", "3", "2", "4"), ordered=True)}
    assert found([*operations, taken("2", "1", "3", "4", source="a")], diverted=late) == ["out-of-order: 1 late in topic t (2)"]


def test_indeterminate_move_does_not_determine_order_of_another_move() -> None:
    doubtful = moved("2", "1", outcome="indeterminate", begun_ms=0, redelivered=("1", "2"))
    operations = [sent("1", "2"), moved("1", "2"), replace(doubtful, client="another")]
    assert found([*operations, taken("1", "2")]) == []
    assert found([*operations, taken("2", "1")]) == ["out-of-order: 1 late from b (1)"]


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        (sent("7", to="topic:t", facts=BY_KIND), "selector-miss: 1 sent and never given out from topic:t/odd (7)"),
        (received("odd", "2"), "selector-leak: 1 from topic:t/odd to who did not ask for them (2)"),
        (received("s", "0"), "sub-ghost: 1 in topic:t/s, sent before it existed (0)"),
        (received("s", "1"), "duplicated: 1 given out again from topic:t/s after they had been acknowledged (1)"),
        (received("s", "9"), "unexpected: 1 in topic:t/s without having been sent (9)"),
        (subscribed("late"), None),
    ],
)
def test_planted_delivery_or_miss_of_a_subscription_is_found(planted: Operation, text: str | None) -> None:
    assert [each for each in found([*TOPIC, planted]) if "out-of-order" not in each] == ([] if text is None else [text])


def test_gap_in_a_subscription_is_found() -> None:
    operations = [subscribed("s"), sent("1", "2", to="topic:t", begun_ms=0.5), received("s", "2")]
    assert found(operations) == ["sub-gap: 1 sent and never given out from topic:t/s (1)"]
    overlapping = [subscribed("s", ended_ms=5.0), sent("1", to="topic:t", begun_ms=4.0, ended_ms=6.0)]
    assert found(overlapping) == []


def test_delivery_against_the_selector_is_found() -> None:
    operations = [sent("1", "2", facts=BY_KIND), taken("1", source="a"), taken("2", source="a", selector="kind = 1")]
    assert found(operations) == ["selector-leak: 1 from a to who did not ask for them (2)"]


def test_message_that_crash_or_expiry_may_remove_is_not_reported_lost() -> None:
    facts = {"1": Facts(persistent=False), "2": Facts(expiry_ms=50)}
    assert found([sent("1", "2", facts=facts)]) == []
    assert found([sent("1", "2", facts=facts), taken("1", source="a"), taken("1", source="a")]) == [
        "duplicated: 1 given out again from a after they had been acknowledged (1)"
    ]


def test_dead_letter_accounts_for_its_returned_message() -> None:
    operations = [sent("1"), taken("1", source="a", outcome="fail"), taken("1", source="DLQ", by="undertaker")]
    assert found(operations, spills={"a": ("DLQ",)}) == []
    assert "lost: 1 given back to a and never given out again (1)" in found(operations)
    twice = [sent("1"), taken("1", source="a"), taken("1", source="DLQ", by="undertaker")]
    assert found(twice, spills={"a": ("DLQ",)}) == ["duplicated: 1 given out again from a after they had been acknowledged (1)"]


def test_dead_letter_of_one_subscription_does_not_conflict_with_another_subscription() -> None:
    published = [subscribed("s1"), subscribed("s2"), sent("1", to="topic:t"), received("s1", "1", outcome="fail")]
    dead = taken("1", source="DLQ", by="undertaker")
    assert found([*published, received("s2", "1"), dead], spills={"topic:t": ("DLQ",)}) == []
    again = [f"duplicated: 1 given out again from topic:t/{name} after they had been acknowledged (1)" for name in ("s1", "s2")]
    by_both = [received("s1", "1", redelivered=("1",)), received("s2", "1"), dead]
    assert found([*published, *by_both], spills={"topic:t": ("DLQ",)}) == again


@pytest.mark.parametrize(
    ("copies", "texts"),
    [
        ([*COPIES, "3"], ["divert-dup: 1 twice in topic t (3)"]),
        (COPIES[1:], ["divert-loss: 1 in a and missing in topic t (1)"]),
        ([*COPIES, "6"], ["unexpected: 1 in topic t and never sent to a (6)"]),
        ([*COPIES, "7"], ["torn-tx: 1 transactions are there in part, which begin (7)"]),
        (COPIES[:4], ["torn-tx: 1 transactions are there in part, which begin (4)", "divert-loss: 1 in a and missing in topic t (5)"]),
    ],
)
def test_differing_diverted_topic_is_found(copies: Sequence[str], texts: list[str]) -> None:
    assert found(SOUND, diverted={"t": ("a", copies)}) == texts


def test_selectors_and_exclusivity_of_diverts_are_judged() -> None:
    operations = [sent("1", "2", "3", facts=BY_KIND), taken("2", source="a")]
    wanted = Divert("a", ("1", "3"), "kind = 1", exclusive=True)
    assert found(operations, diverted={"t": wanted}) == []
    assert found([*operations, taken("1", source="a", by="another")], diverted={"t": wanted}) == [
        "divert-dup: 1 in topic t and given out from a as well (1)"
    ]
    assert found(operations, diverted={"t": wanted._replace(ids=("3",))}) == ["divert-loss: 1 in a and missing in topic t (1)"]
    assert found(operations, diverted={"t": wanted, "u": Divert("a", ("1", "2", "3"), "kind = 1")}) == [
        "selector-leak: 1 in topic u, which did not ask for them (2)"
    ]


def test_each_ingested_kafka_record_is_delivered_exactly_once() -> None:
    records = {"a": ["k1", "k2"]}
    assert found([taken("k1", "k2", source="a")], ingested=records) == []
    assert found([taken("k1", source="a")], ingested=records) == ["ingress-loss: 1 Kafka records never given out from a (k2)"]
    assert found([taken("k1", "k2", source="a"), taken("k2", source="a")], ingested=records) == [
        "ingress-dup: 1 Kafka records given out again from a (k2)"
    ]


def test_diverted_message_that_returns_to_its_side_is_found() -> None:
    operations = [sent("1", to="b"), taken("1"), taken("k1", "1", source="a")]
    assert found(operations, ingested={"a": ["k1"]}, diverted={"t": ("b", ["1"])}) == ["loop: 1 diverted to Kafka and back in a (1)"]
    operations = [sent("1"), taken("1", "k1", source="a")]
    assert found(operations, ingested={"a": ["k1"]}, diverted={"t": ("a", ["1", "k1"])}) == ["loop: 1 from Kafka and back in topic t (k1)"]


def test_answered_operation_missing_in_the_journal_is_found() -> None:
    without = Audit({"a": set("234567"), "b": set("12345")}, {Place("a"): set("12345"), Place("b"): set("1234")})
    assert found(SOUND, journal=without) == [
        "zombie-ack: 1 sent to a, answered, and not in the journal (1)",
        "zombie-ack: 1 acknowledged at b and not in the journal (5)",
    ]


def test_delivery_after_expiry_or_before_due_time_is_found() -> None:
    facts = {"1": Facts(expiry_ms=1_000), "2": Facts(due_ms=2_000)}

    def at(begun_ms: float, ended_ms: float) -> list[str]:
        took = taken("1", "2", source="a", begun_ms=begun_ms, ended_ms=ended_ms)
        return found([sent("1", "2", facts=facts, begun_ms=0.0, ended_ms=1.0), took], clock_ms=10)

    assert at(1_005, 2_000) == []
    assert at(1_011, 2_000) == ["expired-delivered: 1 from a (1)"]
    expired = [
        sent("1", facts={"1": Facts(expiry_ms=900)}, begun_ms=0, ended_ms=1),
        taken("1", source="expired", begun_ms=2_000, ended_ms=2_000),
    ]
    assert found(expired, spills={"a": ("expired",)}) == []
    assert at(900, 1_989) == ["early-delivered: 1 from a (2)"]


def test_message_or_operation_left_at_the_end_is_found() -> None:
    assert found(SOUND, left={"a": ["7"]}) == ["stuck: 1 waiting in a at the end (7)"]
    assert found(SOUND, healed_ms=0.5) == ["stuck: 5 without an answer though all was well (1, 2, 4, 5, 7)"]


def test_every_anomaly_of_the_history_check_is_planted_in_a_test() -> None:
    source = Path(__file__).read_text()
    assert [name for name in ANOMALIES if f'"{name}: ' not in source] == []


def test_long_list_of_ids_is_truncated() -> None:
    assert found([sent(*map(str, range(10, 20)))]) == ["lost: 10 sent and never given out from a (10, 11, 12, 13, 14, ...)"]


def test_history_is_read_without_events_and_unfinished_lines(tmp_path: Path) -> None:
    lines = [
        {"t": 1, "client": "c", "event": "restored"},
        {"t": 3, "begun": 2, "client": "c", "op": "move", "from": "a", "to": "b", "ids": ["1"], "redelivered": ["1"], "outcome": "ok",
         "tx": "x", "selector": "n = 1", "facts": {"1": {"priority": 9, "expiry": 7, "properties": {"n": 1}}}},
    ]  # fmt: skip
    file = tmp_path / "history"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 4, "cli')
    facts = {"1": Facts(9, True, 7, 0, {"n": 1})}
    move = Operation("c", ("1",), "ok", "a", "b", "move", ("1",), 2, 3, "x", "", "n = 1", facts)
    assert read_history(file) == [move]
    other = tmp_path / "other"
    other.write_text(json.dumps({"t": 2, "client": "d", "op": "send", "to": "a", "ids": ["1"], "outcome": "ok"}) + "\n")
    assert read_history(file, other) == [Operation("d", ("1",), "ok", None, "a", "send", ended_ms=2), move]
