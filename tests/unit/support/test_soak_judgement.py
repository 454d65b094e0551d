"""The judgement of a whole soak finds every planted anomaly that its page names, and no anomaly in a correct history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from bascule.core.destination import Routing
from bascule.jms.lookup import selector_lookup
from bascule.journal.records import Kind, Op, Send, SendFlag, ack_entry, encode_record, json_entry, mid_of, send_entry
from tests.soak.clients import ID
from tests.soak.plan import DIVERTS, EXPIRED, MOVED, NEWS, ORDERS, PAYMENTS, REGIONAL, SELECTOR, TIMED
from tests.soak.run import AFTERMATH_MS, Evidence
from tests.support.history import ANOMALIES, Audit, Facts, Operation, Outcome, Place
from tests.support.history_audit import JournalAudit
from tests.support.journal import text_message

HEALED_MS = 10_000.0
SOME, ALL = "python-news.durable", "python-news-all.durable"
HIGH, TAKEN_AWAY = {"n": 9, "region": "US"}, {"n": 0, "region": "EU"}


def sent(id: str, to: str, at_ms: float, outcome: Outcome = "ok", **facts: object) -> Operation:
    facts_by_id = {id: Facts(**facts)}  # type: ignore[arg-type]
    return Operation("sender", (id,), outcome, target=to, op="send", begun_ms=at_ms, ended_ms=at_ms + 1, facts=facts_by_id)


def moved(id: str, at_ms: float, outcome: Outcome = "ok") -> Operation:
    return Operation("mover", (id,), outcome, ORDERS, MOVED, "move", begun_ms=at_ms, ended_ms=at_ms + 1)


def taken(id: str, source: str, at_ms: float, outcome: Outcome = "ok", subscription: str = "") -> Operation:
    client = f"taker of {source}{subscription}"
    return Operation(client, (id,), outcome, source=source, op="receive", begun_ms=at_ms, ended_ms=at_ms + 1, subscription=subscription)


def subscribed(subscription: str, at_ms: float, selector: str = "") -> Operation:
    return Operation(
        f"taker of {NEWS}{subscription}", (), "ok", source=NEWS, op="subscribe", begun_ms=at_ms, ended_ms=at_ms + 1,
        subscription=subscription, selector=selector,
    )  # fmt: skip


OPERATIONS = (
    subscribed(SOME, 0, SELECTOR),
    sent("n1", NEWS, 10, properties=HIGH), sent("n2", NEWS, 12, properties={"n": 1}),
    subscribed(ALL, 20),
    sent("n3", NEWS, 30, properties=HIGH),
    taken("n1", NEWS, 40, subscription=SOME), taken("n3", NEWS, 42, subscription=SOME), taken("n3", NEWS, 44, subscription=ALL),
    sent("o1", ORDERS, 50), sent("o2", ORDERS, 52), moved("o1", 60), moved("o2", 62), taken("o1", MOVED, 70), taken("o2", MOVED, 72),
    sent("r1", REGIONAL, 80, properties=TAKEN_AWAY), sent("r2", REGIONAL, 82, properties=HIGH), taken("r2", REGIONAL, 90),
    sent("t1", TIMED, 100), sent("t2", TIMED, 102, due_ms=500), sent("t3", TIMED, 104, expiry_ms=300),
    taken("t1", TIMED, 110), taken("t2", TIMED, 600), taken("t3", EXPIRED, 700),
    taken("p1", PAYMENTS, 800), taken("p2", PAYMENTS, 810),
)  # fmt: skip
COPIES = {"orders": ["o1", "o2"], "moved": ["o1", "o2"], "regional": ["r1"], "news": ["n1", "n2", "n3"], "returned": []}
AUDIT = Audit(
    {NEWS: {"n1", "n2", "n3"}, ORDERS: {"o1", "o2"}, MOVED: {"o1", "o2"}, REGIONAL: {"r1", "r2"}, TIMED: {"t1", "t2", "t3"}},
    {
        Place(NEWS, SOME): {"n1", "n3"}, Place(NEWS, ALL): {"n3"}, Place(ORDERS): {"o1", "o2"}, Place(MOVED): {"o1", "o2"},
        Place(REGIONAL): {"r2"}, Place(TIMED): {"t1", "t2", "t3"}, Place(EXPIRED): {"t3"}, Place(PAYMENTS): {"p1", "p2"},
    },
)  # fmt: skip


def topics(copies: Mapping[str, list[str]]) -> dict[str, object]:
    return {"diverted": {f"soak.{name}": DIVERTS[name]._replace(ids=ids) for name, ids in copies.items()}}


CORRECT = Evidence(OPERATIONS, topics(COPIES)["diverted"], {PAYMENTS: ["p1", "p2"]}, {}, HEALED_MS, AUDIT)  # type: ignore[arg-type]
Plant = Callable[[Evidence], Evidence]


def found(evidence: Evidence) -> list[str]:
    return [str(anomaly) for anomaly in evidence.judge().anomalies]


def also(*operations: Operation) -> Plant:
    return lambda evidence: replace(evidence, operations=(*evidence.operations, *operations))


def forgotten(id: str, place: Place) -> Plant:
    def plant(evidence: Evidence) -> Evidence:
        return replace(evidence, operations=[each for each in evidence.operations if each.place != place or id not in each.ids])

    return plant


def copied(topic: str, *ids: str) -> Plant:
    return lambda evidence: replace(evidence, **topics({**COPIES, topic: list(ids)}))  # type: ignore[arg-type]


def unknown(*, sent: Mapping[str, set[str]] | None = None, taken: Mapping[Place, set[str]] | None = None) -> Plant:
    return lambda evidence: replace(evidence, journal=Audit({**AUDIT.sent, **(sent or {})}, {**AUDIT.taken, **(taken or {})}))


def left(place: str, *ids: str) -> Plant:
    return lambda evidence: replace(evidence, left={place: ids})


PLANTED: list[tuple[str, Plant]] = [
    ("lost: 1 sent and never given out from orders (o3)", also(sent("o3", ORDERS, 900))),
    ("duplicated: 1 given out again from moved after they had been acknowledged (o2)", also(taken("o2", MOVED, 900))),
    ("unexpected: 1 in moved without having been sent (x)", also(taken("x", MOVED, 900))),
    (
        "torn-tx: 1 taken from orders and never seen in moved (o3)",
        also(sent("o3", ORDERS, 900), moved("o3", 910, "indeterminate")),
    ),
    (
        "redelivered-unmarked: 1 second time from regional (r3)",
        also(sent("r3", REGIONAL, 900, properties=HIGH), taken("r3", REGIONAL, 910, "fail"), taken("r3", REGIONAL, 920)),
    ),
    ("out-of-order: 1 late in topic soak.orders (o1)", copied("orders", "o2", "o1")),
    ("sub-gap: 1 sent and never given out from topic:news/python-news-all.durable (n3)", forgotten("n3", Place(NEWS, ALL))),
    (
        "sub-ghost: 1 in topic:news/python-news-all.durable, sent before it existed (n1)",
        also(taken("n1", NEWS, 900, subscription=ALL)),
    ),
    (
        "selector-leak: 1 from topic:news/python-news.durable to who did not ask for them (n2)",
        also(taken("n2", NEWS, 900, subscription=SOME)),
    ),
    ("selector-miss: 1 sent and never given out from topic:news/python-news.durable (n3)", forgotten("n3", Place(NEWS, SOME))),
    ("divert-loss: 1 in orders and missing in topic soak.orders (o2)", copied("orders", "o1")),
    ("divert-dup: 1 twice in topic soak.orders (o2)", copied("orders", "o1", "o2", "o2")),
    ("divert-dup: 1 in topic soak.regional and given out from regional as well (r1)", also(taken("r1", REGIONAL, 900))),
    ("ingress-loss: 1 Kafka records never given out from payments (p2)", forgotten("p2", Place(PAYMENTS))),
    ("ingress-dup: 1 Kafka records given out again from payments (p2)", also(taken("p2", PAYMENTS, 900))),
    ("loop: 1 diverted to Kafka and back in payments (r1)", also(taken("r1", PAYMENTS, 900))),
    ("loop: 1 from Kafka and back in topic soak.returned (p1)", copied("returned", "p1")),
    ("zombie-ack: 1 sent to orders, answered, and not in the journal (o2)", unknown(sent={ORDERS: {"o1"}})),
    ("zombie-ack: 1 acknowledged at moved and not in the journal (o2)", unknown(taken={Place(MOVED): {"o1"}})),
    ("expired-delivered: 1 from timed (t3)", also(taken("t3", TIMED, 900))),
    ("early-delivered: 1 from timed (t4)", also(sent("t4", TIMED, 900, due_ms=5_000), taken("t4", TIMED, 910))),
    ("stuck: 2 waiting in DLQ at the end (message 1, message 2)", left("DLQ", "message 1", "message 2")),
    (
        "stuck: 1 without an answer though all was well (o3)",
        also(sent("o3", ORDERS, HEALED_MS + AFTERMATH_MS + 1, "indeterminate")),
    ),
]


def test_correct_soak_has_no_anomaly() -> None:
    tally = CORRECT.judge()
    assert tally.anomalies == []
    assert tally.unjudged == set()


@pytest.mark.parametrize(("text", "plant"), PLANTED, ids=[text.partition(" (")[0] for text, _ in PLANTED])
def test_anomaly_planted_in_a_soak_is_found(text: str, plant: Plant) -> None:
    assert text in found(plant(CORRECT))


def test_every_documented_anomaly_is_planted_in_a_test() -> None:
    assert {text.partition(":")[0] for text, _ in PLANTED} == set(ANOMALIES)


def test_operation_begun_before_the_final_healing_may_stay_unanswered() -> None:
    assert found(also(sent("o3", ORDERS, HEALED_MS + AFTERMATH_MS, "indeterminate"))(CORRECT)) == []


def test_answers_are_not_judged_without_an_audit_of_the_journal() -> None:
    tally = replace(CORRECT, journal=None, gap="trimmed").judge()
    assert tally.unjudged == {"zombie-ack"}
    assert str(tally).endswith("no anomaly (not judged: zombie-ack)")


# -- expired messages -


@pytest.mark.parametrize(
    ("plant", "texts"),
    [
        (forgotten("t3", Place(EXPIRED)), ["lost: 1 sent and never given out from timed (t3)"]),
        (also(taken("t3", EXPIRED, 900)), ["duplicated: 1 given out again from ExpiryQueue after they had been acknowledged (t3)"]),
        (also(taken("t3", TIMED, 200)), ["duplicated: 1 given out again from timed after they had been acknowledged (t3)"]),
        # The delivery was rolled back, and the message expired before it was redelivered.
        (also(taken("t3", TIMED, 200, "fail")), []),
        (also(sent("t4", TIMED, 900, expiry_ms=2_000), taken("t4", TIMED, 910)), []),
        (also(sent("t4", TIMED, 900, "indeterminate", expiry_ms=2_000)), []),
    ],
)
def test_message_with_ttl_is_delivered_in_time_or_goes_to_the_expiry_queue(plant: Plant, texts: list[str]) -> None:
    assert [text for text in found(plant(CORRECT)) if "zombie-ack" not in text] == texts


def test_expired_message_in_dead_letter_queue_counts_as_lost_and_as_stuck() -> None:
    assert found(left("DLQ", "message 1")(forgotten("t3", Place(EXPIRED))(CORRECT))) == [
        "lost: 1 sent and never given out from timed (t3)",
        "stuck: 1 waiting in DLQ at the end (message 1)",
    ]


def test_unexpired_message_in_the_expiry_queue_is_unexpected() -> None:
    misrouted = also(taken("t1", EXPIRED, 120), sent("t4", TIMED, 900, expiry_ms=5_000), taken("t4", EXPIRED, 910))
    assert "unexpected: 2 in ExpiryQueue without having expired (t1, t4)" in found(misrouted(forgotten("t1", Place(TIMED))(CORRECT)))


# -- the audit of the journal -------------------------------------------------------------------------------------------------------------


def message(id: str, address: str, routing: Routing = Routing.ANYCAST, flags: int = SendFlag.DURABLE) -> bytes:
    return send_entry(Send(flags, routing, 4, 0, 0, 0, address, (1,), (), (), None, text_message(id, properties={ID: id})))


def test_audit_has_the_valid_journal_entries_and_none_of_a_replaced_broker() -> None:
    audit = JournalAudit(lambda body: str(selector_lookup(body)(ID)))
    queue = json_entry(Op.QUEUE_CREATED, {"id": 1, "routing": int(Routing.ANYCAST), "address": "orders", "name": "orders"})
    news = json_entry(Op.QUEUE_CREATED, {"id": 2, "routing": int(Routing.MULTICAST), "address": "news", "name": SOME})
    records = {
        0: (Kind.EPOCH, 0, 0, b""),
        1: (Kind.DATA, 0, 1, queue + news + message("a", "orders") + message("b", "news", Routing.MULTICAST)),
        2: (Kind.DATA, 0, 2, message("c", "orders", flags=SendFlag.PIPELINES_ONLY)),
        3: (Kind.EPOCH, 0, 0, b""),
        4: (Kind.DATA, 0, 3, message("of a zombie", "orders")),
        5: (Kind.STATE, 3, 3, ack_entry(1, [mid_of(1, 0)]) + ack_entry(2, [mid_of(1, 1)])),
        6: (Kind.DATA, 3, 3, message("twice", "orders")),
    }
    for offset, (kind, epoch, sequence, body) in records.items():
        audit.take(offset, encode_record(kind, epoch, sequence, body))
    audit.take(7, b"somebody else's")
    assert audit.result() == Audit({"orders": {"a"}, NEWS: {"b"}}, {Place("orders"): {"a"}, Place(NEWS, SOME): {"b"}})
