"""Collection of a snapshot over many turns, with the state at one sequence. Property tests compare the result with the journal."""

from __future__ import annotations

import asyncio

import pytest

from bascule.broker import collecting
from bascule.broker.collecting import LAST_QUEUES, LAST_WINDOWS, Collector
from bascule.broker.errors import BrokerFault
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from tests.support.costs import calls_of
from tests.unit.broker.conftest import Bench
from tests.unit.broker.test_housekeeping import Topics, finish, housekeeping

MANY = 4_000
STEPS = 200


@pytest.fixture
def bench() -> Bench:
    bench = Bench(Policy(AddressPolicy(auto_delete=False)))
    for number in range(MANY):
        bench.put(number)
    bench.broker.settle()
    bench.engine.turns.steps = STEPS
    bench.engine.turns.begin_turn()
    return bench


def turn(bench: Bench) -> None:
    """Run one turn, and store the records in flight."""
    bench.engine.turns.begin_turn()
    bench.broker.flush()
    bench.broker.confirm(len(bench.broker.in_flight))


def loaded(bench: Bench) -> list[object]:
    """Return the messages of a broker that starts from the snapshot."""
    (data,) = bench.broker.snapshots.values()
    loader = bench.broker.replay(data)
    assert loader.announced
    return [bench.content(message) for message in loader.engine.addresses.anycast["q"].ready]


def test_snapshot_of_a_deep_queue_is_collected_in_short_turns_and_others_are_served_meanwhile(bench: Bench) -> None:
    bench.broker.take_snapshot()
    turns = 0
    while not bench.broker.snapshots:
        bench.put(f"to another {turns}", to="other")
        turn(bench)
        assert bench.engine.turns.left > -STEPS  # no piece takes much more than the turn has left
        turns += 1
    assert turns > MANY // collecting.MIDS_PER_STEP // STEPS
    bench.broker.settle()
    assert len(loaded(bench)) == MANY


def test_snapshot_includes_messages_that_arrive_or_leave_during_collection(bench: Bench) -> None:
    consumer = bench.broker.attach(bench.queue(), 20)
    bench.broker.settle()
    bench.broker.take_snapshot()
    turn(bench)
    bench.acknowledge(consumer, 0, 5)
    bench.put("late")
    turn(bench)
    assert not bench.broker.snapshots
    bench.acknowledge(consumer, 1)
    while not bench.broker.snapshots:
        turn(bench)
    bench.broker.settle()
    assert loaded(bench) == [number for number in range(MANY) if number not in (0, 1, 5)] + ["late"]


def test_last_step_of_snapshot_collection_is_short_under_continuous_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "LAST_STEPS", 10)
    collector = Collector(bench.engine, bench.broker.offsets)
    for number, _ in enumerate(collector.walk()):
        bench.fill(f"late {number}")
    copied = sum(len(part.copy.mids) for part in collector._queues.values())
    taken = collector.finish().snapshot()
    assert len(taken.mids[0]) - copied <= 10


def walked(bench: Bench, queues: int) -> Collector:
    """Return a collector whose walk has ended, over some more queues with a message each."""
    for number in range(queues):
        bench.put(number, to=f"q{number}")
    bench.broker.settle()
    collector = Collector(bench.engine, bench.broker.offsets)
    for _ in collector.walk():
        pass
    return collector


def test_last_piece_does_not_look_at_queues_that_have_not_changed(bench: Bench) -> None:
    collector = walked(bench, 500)
    bench.put("late", to="q7")
    bench.put("new", to="new")
    bench.broker.settle()
    assert set(collector._changed) == {bench.queue("q7")}
    assert calls_of(collector.finish) < 200


def test_last_piece_copies_only_windows_that_changed_shortly_before(bench: Bench) -> None:
    windows = [bench.engine.windows.window(f"w{number}") for number in range(1_000)]
    for window in windows:
        window.add(b"0" * 16, bench.now_ms)
    collector, changed = Collector(bench.engine, bench.broker.offsets), False
    for _ in collector.walk():
        if not changed and len(collector._windows) == len(windows):
            changed = True
            for window in windows:
                window.add(b"1" * 16, bench.now_ms)
    assert changed
    windows[7].add(b"2" * 16, bench.now_ms)
    assert calls_of(lambda: [collector._remembered(window) for window in windows]) < 3 * len(windows)
    remembered = collector.finish().snapshot().windows
    assert [len([*remembered[f"w{number}"].ids()]) for number in (6, 7)] == [2, 3]


def test_few_queues_and_windows_are_left_for_the_last_piece_though_all_change_during_the_walk(bench: Bench) -> None:
    """Messages with duplicate ids come to all queues, one for each forty steps of the walk."""
    names, sent, steps_left = [f"w{number}" for number in range(3_000)], 0, 0
    for name in names:
        bench.put("first", to=name, message_id=f"{name}.first")
    bench.broker.settle()
    for window in bench.engine.windows.by_address.values():
        window.add_all([number.to_bytes(16, "big") for number in range(1_000)], bench.now_ms)
    collector = Collector(bench.engine, bench.broker.offsets)
    for steps in collector.walk():
        steps_left += steps
        while steps_left > 0:
            bench.put("next", to=names[sent % len(names)], message_id=f"next.{sent}")
            sent, steps_left = sent + 1, steps_left - 40
        bench.broker.flush()
        bench.broker.confirm(len(bench.broker.in_flight))
    assert sent > len(names)
    changed = [each for each in bench.engine.windows.by_address.values() if collector._windows[each][0] != each.added]
    assert len(collector._changed) <= LAST_QUEUES
    assert len(changed) <= LAST_WINDOWS


def test_snapshot_contains_changes_after_the_copies_were_complete(bench: Bench) -> None:
    collector = walked(bench, 4)
    consumer = bench.broker.attach(bench.queue("q0"), 1)
    bench.put("new", to="new")
    bench.put("late", to="q1")
    bench.engine.delete_queue(bench.queue("q2"))
    bench.broker.settle()
    assert [message for message, _ in consumer.received] != []
    taken = collector.finish().snapshot()
    found = {queue["name"]: (len(mids), queue["reserved"]) for queue, mids in zip(taken.queues, taken.mids, strict=True)}
    assert list(found) == ["q", "q0", "q1", "q3", "new"]
    assert [found[name][0] for name in ("q", "q0", "q1", "q3", "new")] == [MANY, 1, 2, 1, 1]
    assert found["q0"][1] == bench.queue("q0").reserved_mid > -1


def test_snapshot_with_missing_message_is_not_written(bench: Bench) -> None:
    queue = bench.queue()
    collector = Collector(bench.engine, bench.broker.offsets)
    for _ in collector.walk():
        pass
    misplaced = BrokerMessage(b"")
    misplaced.mid = queue.held.newest - 1
    queue.held.remove(misplaced.mid)
    queue.held.add(misplaced)
    with pytest.raises(BrokerFault, match=f"a snapshot would contain {MANY - 1} messages of queue 'q', which holds {MANY}"):
        collector.finish()
    assert queue.held.copy is None


def test_a_stopped_walk_ends_and_detaches_from_its_queues(bench: Bench) -> None:
    collector = Collector(bench.engine, bench.broker.offsets)
    walk = collector.walk()
    next(walk), next(walk)
    assert bench.queue().held.copy is not None
    collector.stop()
    assert list(walk) == []
    assert bench.queue().held.copy is None


def test_housekeeping_round_with_slow_snapshot_fails_and_next_round_succeeds(bench: Bench) -> None:
    async def late() -> None:
        topics = Topics()
        keeping = housekeeping(bench.broker, topics, announce_timeout_s=0.01)
        await keeping.rounds()  # no later turn continues the snapshot
        assert topics.notes == ["housekeeping: the engine has not finished its work within 0.01 s"]
        assert bench.queue().held.copy is None
        await finish(bench.broker, housekeeping(bench.broker, topics).rounds())
        assert len(topics.written) == 1

    asyncio.run(late())
