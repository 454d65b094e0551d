"""The engine against a small model of JMS: random commands, crashes at any record, and a final check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from bascule.broker import branch_entries as branch_entries_module
from bascule.broker import branches
from bascule.broker import collecting as collecting_module
from bascule.broker import commit_plan as commit_plan_module
from bascule.broker import fan_out as fan_out_module
from bascule.broker import held as held_module
from bascule.broker import loading as loading_module
from bascule.broker import local_transactions as local_transactions_module
from bascule.broker import order as order_module
from bascule.broker import planned_sends as planned_sends_module
from bascule.broker import queue as queue_module
from bascule.broker import reservations as reservations_module
from bascule.broker import returns as returns_module
from bascule.broker.branches import Branches
from bascule.broker.collecting import CollectedQueue, Collector
from bascule.broker.delivery import Deliveries
from bascule.broker.dropping import DroppedMessages
from bascule.broker.duplicates import DuplicateWindow
from bascule.broker.engine import Engine
from bascule.broker.expiry import Expiry
from bascule.broker.groups import Groups
from bascule.broker.held import Held
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.local_transactions import LocalTransactions
from bascule.broker.planned_sends import PlannedSends
from bascule.broker.plans import PlanInTurns
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.ready import Ready, SelectorView
from bascule.broker.remembered_ids import RememberedIds
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from tests.property.broker_commands import BranchRun, RefusedRun, Run, SlowRun, SnapshotRun, run_all
from tests.property.broker_model import ALONE, POLICY, RULES
from tests.property.planned_commits import PlannedRun

#: Runs of the slow suite; the default suite has a fifth of them. BASCULE_MODEL_RUNS sets another number.
RUNS = int(os.environ.get("BASCULE_MODEL_RUNS", "5000"))
#: The first seed: another value gives other runs.
FIRST_SEED = int(os.environ.get("BASCULE_MODEL_SEED", "1"))
EACH_LENGTH = pytest.mark.parametrize("runs", [pytest.param(RUNS // 5, id="a fifth"), pytest.param(RUNS, id="all", marks=pytest.mark.slow)])
#: One run in this number has limits so small that they are reached all the time.
SHORT_SHARE = 3
#: A planted fault must show within this number of runs.
PLANTED_RUNS = 1_500
#: The first seed that shows the fault of a search, which few runs trigger.
SEARCH_SEED = 1346
TIMEOUT_S = 120 + RUNS // 20


@EACH_LENGTH
@pytest.mark.timeout(TIMEOUT_S)
def test_random_commands_and_crashes_keep_every_promise_of_the_model(runs: int) -> None:
    run_all(range(FIRST_SEED, FIRST_SEED + runs - runs // SHORT_SHARE))


@EACH_LENGTH
@pytest.mark.timeout(TIMEOUT_S)
def test_promises_hold_when_reservations_are_short_and_records_small(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "RESERVE_AHEAD", 2)
    monkeypatch.setattr(queue_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(reservations_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(order_module, "BLOCK_MESSAGES", 2)
    monkeypatch.setattr(held_module, "BLOCK_MESSAGES", 2)
    run_all(range(FIRST_SEED + runs - runs // SHORT_SHARE, FIRST_SEED + runs))


@EACH_LENGTH
@pytest.mark.timeout(TIMEOUT_S)
def test_promises_hold_when_long_work_is_interleaved_with_other_commands(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, range(FIRST_SEED, FIRST_SEED + runs // SHORT_SHARE))


@EACH_LENGTH
@pytest.mark.timeout(TIMEOUT_S)
def test_snapshot_taken_in_many_steps_is_the_state_at_its_sequence(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, range(FIRST_SEED, FIRST_SEED + runs // SHORT_SHARE), SnapshotRun)


@pytest.mark.interpreted
@EACH_LENGTH
@pytest.mark.parametrize("kind", [SlowRun, SnapshotRun])
@pytest.mark.timeout(TIMEOUT_S)
def test_promises_hold_when_messages_enter_their_queues_one_by_one(runs: int, kind: type[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    enter_one_by_one(monkeypatch)
    monkeypatch.setattr(kind, "modes_in_order", False)
    slowly(monkeypatch, range(FIRST_SEED, FIRST_SEED + runs // 10), kind)


def enter_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out_module, "FAN_OUT_QUEUES", 1)
    monkeypatch.setattr(planned_sends_module, "PIECE_PLACES", 1)
    monkeypatch.setattr(local_transactions_module, "PIECE_PLACES", 1)


@pytest.mark.interpreted
@EACH_LENGTH
@pytest.mark.timeout(TIMEOUT_S)
def test_promises_hold_when_commits_are_planned_between_other_commands(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_all_in_pieces(monkeypatch)
    run_all(range(FIRST_SEED, FIRST_SEED + runs // 10), PlannedRun)


@pytest.mark.interpreted
def test_model_detects_a_commit_that_uses_outdated_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_all_in_pieces(monkeypatch)
    monkeypatch.setattr(PlannedSends, "_known_outdated", lambda *_: False)
    with pytest.raises(AssertionError, match="seed"):
        run_all(range(1, PLANTED_RUNS), PlannedRun)


def plan_all_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PlanInTurns.begin
    monkeypatch.setattr(PlanInTurns, "begin", lambda plan, _: begin(plan, PlannedRun.plan_turns))
    monkeypatch.setattr(local_transactions_module, "PLANNED_STEPS", -1)
    monkeypatch.setattr(local_transactions_module, "PIECE_MESSAGES", 0)
    monkeypatch.setattr(commit_plan_module, "PIECE_STEPS", 1)
    monkeypatch.setattr(planned_sends_module, "PIECE_STEPS", 1)
    monkeypatch.setattr(planned_sends_module, "PIECE_PLACES", 2)
    monkeypatch.setattr(planned_sends_module, "AT_ONCE_STEPS", 20)
    monkeypatch.setattr(commit_plan_module, "ACKS_PER_STEP", 1)
    monkeypatch.setattr(branch_entries_module, "PIECE_SENDS", 1)
    monkeypatch.setattr(branch_entries_module, "PIECE_RECEIVED", 1)


def slowly(monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int], kind: type[Run] = SlowRun) -> None:
    monkeypatch.setattr(order_module, "BLOCK_MESSAGES", 2)
    monkeypatch.setattr(held_module, "BLOCK_MESSAGES", 2)
    monkeypatch.setattr(returns_module, "PIECE_MESSAGES", 1)
    monkeypatch.setattr(collecting_module, "COPY_STEPS", 1)
    monkeypatch.setattr(collecting_module, "PIECE_LOOKS", 1)
    monkeypatch.setattr(collecting_module, "LOOK_STEPS", 5)
    monkeypatch.setattr(collecting_module, "LAST_STEPS", 0)
    run_all(seeds, kind)


@EACH_LENGTH
@pytest.mark.timeout(TIMEOUT_S)
def test_branches_are_prepared_and_ended_once_over_crashes_and_snapshots(runs: int) -> None:
    run_all(range(FIRST_SEED, FIRST_SEED + runs // 5), BranchRun)


def forget_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "add_ack", lambda *_: None)


def forget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "_count", lambda *_: None)


def forget_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "decode_reserve", lambda *_: (0, 0))


def answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "then", lambda _, action, *arguments: action(*arguments))


def append_what_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ready, "put_back", lambda ready, messages: [ready.append(message) for message in messages])


def know_no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DuplicateWindow, "admit", lambda *_: True)


def deliver_delayed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Deliveries, "put_in", lambda engine, message, queues, due_ms=0, put_in=Deliveries.put_in: put_in(engine, message, queues)
    )


def forget_delays_in_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = loading_module.decode_send
    monkeypatch.setattr(loading_module, "decode_send", lambda *place: decode(*place)._replace(delivery_time_ms=0))


def try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AddressPolicy, "redelivery_pause_ms", lambda *_: 0)


def try_again_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AddressPolicy, "redelivery_pause_ms", lambda settings, _: settings.redelivery_delay_ms * 1_000)


def drop_what_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "_expire", Deliveries.gone)


def find_nothing_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "watch", lambda *_: None)


def give_groups_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "_holder", lambda *_: None)


def keep_the_groups_of_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "leave", lambda *_: None)


def serve_every_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "POLICY", Policy(POLICY.defaults, tuple(rule for rule in RULES if rule[0] != ALONE)))


def let_consumers_hold_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tuple((name, {key: value for key, value in rule.items() if key != "prefetch_max"}) for name, rule in RULES)
    monkeypatch.setattr(Run, "POLICY", Policy(POLICY.defaults, rules))


def take_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BrokerQueue, "full", lambda queue: bool(queue.settings.max_messages) and queue.held_messages > queue.settings.max_messages
    )


def drop_persistent_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(dropped: DroppedMessages, queue: BrokerQueue) -> None:
        while queue.settings.when_full == DROP and queue.full() and (waiting := queue.waiting()):
            queue.take_out(waiting[0])
            dropped._deliveries.gone(queue, waiting[0])

    monkeypatch.setattr(DroppedMessages, "drop", drop)


def drop_the_dearest(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(dropped: DroppedMessages, queue: BrokerQueue) -> None:
        while queue.settings.when_full == DROP and queue.full() and (waiting := [each for each in queue.waiting() if each.mid < 0]):
            queue.take_out(waiting[0])
            dropped._deliveries.gone(queue, waiting[0])

    monkeypatch.setattr(DroppedMessages, "drop", drop)


def give_branches_nothing_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "_give_to_branches", lambda _: None)


def leave_branches_out_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branches, "entries", lambda *_: bytes)


def leave_what_branches_hold_out_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(engine: Engine, *arguments: Any, original: Any = branches.prepare) -> None:
        original(engine, *arguments)
        for queue, message in engine.branches.held():
            queue.held.remove(message.mid)

    monkeypatch.setattr(branches, "prepare", prepare)


def take_back_what_branches_held_before_that_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(engine: Engine, xid: Xid, ending: Ending, done: Callable[[], None], end: Any = branches.end) -> None:
        end(engine, xid, ending, done)
        if ending is Ending.ROLLED_BACK:
            engine.take_back(engine.branches.prepared[xid].queues, engine.branches.prepared[xid].acks)
            engine.branches.prepared[xid].acks = []

    monkeypatch.setattr(branches, "end", give)


BRANCH_FAULTS = (
    give_branches_nothing_after_a_crash, leave_branches_out_of_snapshots, leave_what_branches_hold_out_of_snapshots,
    take_back_what_branches_held_before_that_is_stored,
)  # fmt: skip


#: The first seed that shows a fault which few runs trigger: the search begins there, since no run before shows it.
FIRST_SHOWN = {
    "give_branches_nothing_after_a_crash": 173,
    "leave_what_branches_hold_out_of_snapshots": 110,
    "take_back_what_branches_held_before_that_is_stored": 175,
    "append_what_returns": 55,
    "try_again_at_once": 86,
    "try_again_too_late": 86,
    "give_groups_to_anybody": 259,
    "serve_every_consumer": 387,
}


def searched(fault: Callable[[pytest.MonkeyPatch], None]) -> range:
    """Return the seeds among which one must show the fault."""
    first = FIRST_SHOWN.get(fault.__name__, 1)
    return range(first, first + PLANTED_RUNS)


@pytest.mark.interpreted
@pytest.mark.parametrize("fault", BRANCH_FAULTS)
def test_model_detects_planted_branch_fault(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all(searched(fault), BranchRun)


def forget_where_a_search_was_when_messages_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelectorView, "put_back", lambda *_: None)


def behind_the_walk(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str, held_of: Callable[[Any], Held]) -> None:
    """A method of queues that does not report to the copy that a snapshot makes."""

    original = getattr(kind, name)

    def silent(subject: Any, *arguments: Any) -> Any:
        held = held_of(subject)
        copy, held.copy = held.copy, None
        try:
            return original(subject, *arguments)
        finally:
            held.copy = copy

    monkeypatch.setattr(kind, name, silent)


def keep_what_goes_behind_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    behind_the_walk(monkeypatch, Held, "remove", lambda held: held)


def forget_counts_behind_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    behind_the_walk(monkeypatch, BrokerQueue, "set_counts", lambda queue: queue.held)


def forget_ids_behind_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def remembered(collector: Collector, window: DuplicateWindow) -> RememberedIds:
        return collector._windows.setdefault(window, (0, window.remembered()))[1]

    monkeypatch.setattr(Collector, "_remembered", remembered)


def miss_what_comes_behind_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectedQueue, "finish", lambda collected, queue: setattr(collected, "reserved_mid", queue.reserved_mid))


def take_unstored_acknowledgements_for_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "unconfirmed_acks", lambda _: iter(()))


SNAPSHOT_FAULTS = (
    keep_what_goes_behind_the_walk, forget_counts_behind_the_walk, forget_ids_behind_the_walk, miss_what_comes_behind_the_walk,
    take_unstored_acknowledgements_for_stored,
)  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("fault", SNAPSHOT_FAULTS)
def test_model_detects_planted_snapshot_fault(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        slowly(monkeypatch, range(1, PLANTED_RUNS), SnapshotRun)


@pytest.mark.interpreted
def test_model_detects_a_search_that_misses_messages_returned_behind_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_where_a_search_was_when_messages_come_back(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        slowly(monkeypatch, range(SEARCH_SEED, SEARCH_SEED + PLANTED_RUNS))


FAULTS = (
    forget_acknowledgements, forget_counts, forget_reservations, answer_at_once, append_what_returns, know_no_repeats,
    deliver_delayed_at_once, forget_delays_in_a_crash, try_again_at_once, try_again_too_late, drop_what_expires, find_nothing_expired,
    give_groups_to_anybody, keep_the_groups_of_who_left, serve_every_consumer, let_consumers_hold_any_number,
    take_more_than_there_is_room_for, drop_persistent_messages, drop_the_dearest,
)  # fmt: skip


@EACH_LENGTH
def test_promises_hold_when_messages_of_transactions_are_refused(runs: int) -> None:
    run_all(range(FIRST_SEED, FIRST_SEED + runs // SHORT_SHARE), RefusedRun)


@pytest.mark.interpreted
def test_model_detects_an_engine_that_commits_the_rest_of_a_refused_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransactions, "message_refused", lambda *_: None)
    with pytest.raises(AssertionError, match="seed"):
        run_all(range(1, PLANTED_RUNS), RefusedRun)


@pytest.mark.interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_model_detects_planted_engine_fault(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all(searched(fault))
