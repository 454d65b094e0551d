from __future__ import annotations

from itertools import pairwise

import pytest

from bascule.broker.duplicates import DuplicateWindow, DuplicateWindows, digest_of
from bascule.broker.errors import JournalUnavailable
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.remembered_ids import SEGMENT_IDS
from bascule.jms.errors import MalformedMessage
from tests.unit.broker.conftest import Bench


def test_a_duplicate_is_answered_once_the_original_is_stored_and_is_not_stored_again(bench: Bench) -> None:
    bench.put(1, message_id="a")
    bench.broker.flush()
    bench.put(1, message_id="a")
    assert bench.sender.answers == []
    bench.broker.settle()
    assert bench.sender.accepted_tokens == [1, 1]
    assert bench.waiting(bench.queue()) == [1]


def test_a_duplicate_of_a_stored_message_is_answered_at_once(bench: Bench) -> None:
    bench.fill(1, message_id="a")
    bench.put(1, message_id="a")
    assert bench.sender.accepted_tokens == [1, 1]
    assert bench.waiting(bench.queue()) == [1]


def test_a_send_repeated_after_a_crash_is_stored_once(bench: Bench) -> None:
    for stored in (0, 1):
        content = f"message {stored}"
        bench.put(content, message_id=content)
        bench.broker.flush()
        bench.crash(stored)
        bench.fill(content, message_id=content)
    assert bench.waiting(bench.queue()) == ["message 0", "message 1"]


def test_same_message_id_from_other_client_or_to_other_queue_is_not_duplicate(bench: Bench) -> None:
    bench.put(1, message_id="a", container="me")
    bench.put(2, message_id="a", container="you")
    bench.put(3, message_id="a", container="me", to="q2")
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == [1, 2]
    assert bench.waiting(bench.queue("q2")) == [3]


def test_messages_without_an_id_are_never_duplicates(bench: Bench) -> None:
    bench.fill(1)
    bench.fill(1)
    assert bench.waiting(bench.queue()) == [1, 1]


def test_a_duplicate_id_counts_for_any_sender_and_any_message_id(bench: Bench) -> None:
    bench.put("first", message_id="a", container="me", properties={"_AMQ_DUPL_ID": "order-1"})
    bench.put("again", message_id="b", container="you", properties={"_AMQ_DUPL_ID": "order-1"})
    bench.put("other", message_id="c", container="you", properties={"_AMQ_DUPL_ID": "order-2"})
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["first", "other"]
    assert len(bench.sender.accepted_tokens) == 3


def test_message_id_and_duplicate_id_property_survive_crash(bench: Bench) -> None:
    bench.fill("first", message_id="a", properties={"_AMQ_DUPL_ID": "order-1"})
    bench.crash()
    bench.fill("same message", message_id="a")
    bench.fill("same order", message_id="b", properties={"_AMQ_DUPL_ID": "order-1"})
    assert bench.waiting(bench.queue()) == ["first"]


def test_only_duplicate_id_property_counts_within_transaction(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    for content in ("one", "two"):
        bench.put(content, message_id="a", transaction=transaction)
    bench.put("three", properties={"_AMQ_DUPL_ID": "x"}, transaction=transaction)
    bench.put("four", properties={"_AMQ_DUPL_ID": "x"}, transaction=transaction)
    bench.engine.commit(transaction, lambda error: None)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["one", "two", "three"]


def test_rolled_back_send_does_not_use_up_its_duplicate_id(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put("lost", properties={"_AMQ_DUPL_ID": "x"}, transaction=transaction)
    bench.engine.rollback(transaction)
    bench.fill("kept", properties={"_AMQ_DUPL_ID": "x"})
    assert bench.waiting(bench.queue()) == ["kept"]


def window_id(name: object) -> bytes:
    """Return a digest of the size that windows use."""
    return str(name).encode().ljust(16, b".")


def test_duplicate_window_forgets_ids_beyond_count() -> None:
    window = DuplicateWindow(count_max=2)
    for name in "abc":
        window.add(window_id(name), 0)
    assert [window_id(name) in window for name in "abc"] == [False, True, True]


def test_duplicate_window_forgets_ids_after_period() -> None:
    window = DuplicateWindow(period_ms=100)
    assert window.admit((window_id("a"),), 0)
    assert not window.admit((window_id("a"),), 100)
    assert window.admit((window_id("a"),), 101)


def test_an_expired_id_is_new_even_if_one_send_does_not_remove_all_expired_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.duplicates.SWEEP_STEPS", 3)
    window = DuplicateWindow(period_ms=100)
    for number in range(10):
        window.add(window_id(number), 0)
    window.add(window_id("young"), 90)
    assert window.admit((window_id("x"),), 150)
    assert len(window.digests) == 9
    assert window.admit((window_id(9),), 150)
    assert window.digests == {window_id("young"), window_id("x"), window_id(9)}
    assert not window.admit((window_id("young"),), 150)


def test_a_refused_duplicate_leaves_no_new_ids() -> None:
    window = DuplicateWindow()
    assert window.admit((window_id("a"),), 0)
    assert not window.admit((window_id("new"), window_id("a")), 0)
    assert window.admit((window_id("new"),), 0)


def test_least_recently_used_addresses_lose_their_duplicate_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.duplicates.WINDOWS_MAX", 4)
    windows = DuplicateWindows()
    for now_ms, address in enumerate(("old", "older", "busy", "new")):
        windows.window(address).admit((window_id("a"),), now_ms)
    windows.window("old").admit((window_id("b"),), 10)
    windows.window("one more").admit((window_id("a"),), 11)
    assert set(windows.by_address) == {"old", "new", "one more"}


def test_ids_expire_without_sends_in_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.duplicates.SWEEP_STEPS", 10)
    bench = Bench(Policy(AddressPolicy(duplicate_ms=90_000)))
    for number in range(30):
        bench.fill(number, to=f"q{number % 3}", message_id=f"id {number}")
    bench.now_ms += 50_000
    bench.fill("young", to="q0", message_id="young")
    bench.now_ms += 50_000
    schedule, windows, left = bench.engine.schedule, bench.engine.windows, []
    while schedule.next_ms is not None and schedule.next_ms <= bench.now_ms:
        bench.engine.tick()
        left.append(sum(len(window.digests) for window in windows.by_address.values()))
    assert all(before - after <= 10 for before, after in pairwise([31, *left]))
    assert {address: len(window.digests) for address, window in windows.by_address.items()} == {"q0": 1}


def test_duplicate_digest_separates_its_parts() -> None:
    assert digest_of("a b", "c", b"d") != digest_of("a", "b c", b"d")


def test_a_message_with_an_unreadable_duplicate_id_is_refused_and_leaves_no_trace(bench: Bench) -> None:
    body = bench.encode("x", message_id="a", properties={"_AMQ_DUPL_ID": "xyz"}).replace(b"xyz", b"\xff\xfe\xfd")
    with pytest.raises(MalformedMessage, match="section application-properties"):
        bench.broker.send("q", body, bench.sender, "broken")
    bench.fill("good", message_id="a")
    assert bench.waiting(bench.queue()) == ["good"]


def test_the_limits_of_the_window_are_configurable() -> None:
    bench = Bench(Policy(AddressPolicy(duplicate_count=1)))
    bench.fill(1, message_id="a")
    bench.fill(2, message_id="b")
    bench.fill(1, message_id="a")
    assert bench.waiting(bench.queue()) == [1, 2, 1]


def test_duplicate_digests_match_those_in_earlier_journals() -> None:
    """A broker with another algorithm would store a repetition of a message from before its upgrade."""
    assert digest_of("orders", "client-1", b"\xa1\x04ID:1").hex() == "2d863df3a4b292c64a7e64bd22cf4676"
    assert digest_of("orders", "client-1", b"\xa1\x04ID:1", "ann").hex() == "c1087d918e8e141026dd4b37b466e4d0"
    assert digest_of("orders", "_AMQ_DUPL_ID", b"flight-7").hex() == "3135301f5a475ed156edd704d6581c96"


def test_a_duplicate_of_a_message_in_flight_is_answered_with_the_original_even_during_a_stall(bench: Bench) -> None:
    bench.put("x", message_id="a")
    bench.broker.flush()
    bench.engine.stalled = JournalUnavailable("Kafka is away")
    bench.put("x", message_id="a")
    bench.put("new", message_id="b")
    assert [(token, error is None) for token, error in bench.sender.answers] == [("new", False)]
    bench.engine.stalled = None
    bench.broker.settle()
    assert [token for token, error in bench.sender.answers if error is None] == ["x", "x"]
    assert bench.waiting(bench.queue()) == ["x"]


@pytest.mark.parametrize("before", [0, 1, SEGMENT_IDS - 1, SEGMENT_IDS, SEGMENT_IDS + 1, 2 * SEGMENT_IDS - 1])
def test_ids_of_a_reverted_message_are_forgotten_and_earlier_ids_are_kept(before: int) -> None:
    window = DuplicateWindow(10 * SEGMENT_IDS)
    known = [number.to_bytes(16, "big") for number in range(before)]
    for digest in known:
        assert window.admit((digest,), 1)
    fresh = (b"a" * 16, b"b" * 16)
    assert window.admit(fresh, 2)
    window.take_back(fresh)
    assert [digest for digest, _ in window.remembered().ids()] == known
    assert window.admit(fresh, 3)
    assert not window.admit(fresh[:1], 4)
    assert all(not window.admit((digest,), 5) for digest in known)
