"""Faults planted in what the broker does with transaction branches, and in its manager, are found by the simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bascule.broker import branches
from bascule.broker import engine as engine_module
from bascule.broker.branches import Branch, Branches, ended_entry
from bascule.broker.engine import Engine
from bascule.broker.transactions import Transaction
from bascule.core.xid import Xid
from bascule.journal.branches import Ended, Ending
from bascule.xa.log import Outcome
from bascule.xa.plan import Action, Step
from tests.sim import requests
from tests.sim.managers import Manager
from tests.sim.simulation import Parts
from tests.simulation.planting import Plant, not_found
from tests.support.history import BRANCH_ANOMALIES

TIMEOUT_S = 120


def snapshots_leave_prepared_branches_out(monkeypatch: pytest.MonkeyPatch) -> Parts:
    def entries(known: Branches, at_ms: int) -> bytes:
        return b"".join(ended_entry(xid, ending, at_ms) for xid, ending in known.ended.items())

    monkeypatch.setattr(Branches, "entries", entries)
    return Parts()


def a_branch_is_prepared_until_it_has_ended_twice(monkeypatch: pytest.MonkeyPatch) -> Parts:
    over = Branches.over

    def over_and_back(known: Branches, ended: Ended) -> None:
        branch = None if ended.xid in known.ended else known.prepared.get(ended.xid)
        over(known, ended)
        if branch is not None:
            branch.ending = None
            known.prepared[ended.xid] = branch

    monkeypatch.setattr(Branches, "over", over_and_back)
    return Parts()


def a_prepared_transaction_stays_the_connections(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(requests, "handed_over", lambda connection, name: connection.transactions.get(name))
    return Parts()


def prepared_is_said_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> Parts:
    prepare = branches.prepare

    def prepare_hastily(engine: Engine, transaction: Transaction | None, xid: Xid, container: str, done: Callable[[bool], None]) -> None:
        prepare(engine, transaction, xid, container, done)
        if xid in engine.branches.prepared:
            done(True)  # the client passes the second one over

    monkeypatch.setattr(branches, "prepare", prepare_hastily)
    return Parts()


def sends_of_a_prepared_branch_are_put_in(monkeypatch: pytest.MonkeyPatch) -> Parts:
    prepare = branches.prepare

    def prepare_and_send(engine: Engine, transaction: Transaction | None, *more: Any) -> None:
        drafts = [] if transaction is None else list(transaction.drafts)
        prepare(engine, transaction, *more)
        for draft in drafts:
            engine.sending.put(draft, engine.clock())

    monkeypatch.setattr(branches, "prepare", prepare_and_send)
    return Parts()


def commits_in_one_phase_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(Branches, "remember", lambda *_: None)
    return Parts()


def snapshots_leave_out_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> Parts:
    def entries(known: Branches, _: int) -> bytes:
        forced = (ended_entry(*ended) for ended in known.forced.values())
        return b"".join((*forced, *(branch.entry for branch in known.prepared.values() if branch.stored)))

    monkeypatch.setattr(Branches, "entries", entries)
    return Parts()


def ends_by_force_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> Parts:
    over = Branches.over

    def over_and_forget(known: Branches, ended: Ended) -> None:
        over(known, ended)
        known.forced.pop(ended.xid, None)

    monkeypatch.setattr(Branches, "over", over_and_forget)
    return Parts()


def ends_by_force_are_in_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> Parts:
    entries = Branches.entries

    def entries_without(known: Branches, at_ms: int) -> bytes:
        return entries(Branches(prepared=known.prepared, ended=known.ended), at_ms)

    monkeypatch.setattr(Branches, "entries", entries_without)
    return Parts()


def what_is_forgotten_is_not_journaled(monkeypatch: pytest.MonkeyPatch) -> Parts:
    def forget(engine: Engine, xid: Xid, done: Callable[[], None]) -> None:
        engine.branches.forced.pop(xid, None)
        engine.journaling.then_anew(done)

    monkeypatch.setattr(branches, "forget", forget)
    return Parts()


def commits_under_way_are_not_known(monkeypatch: pytest.MonkeyPatch) -> Parts:
    class Nothing(set[Xid]):
        def add(self, _: Xid) -> None: ...

    monkeypatch.setattr(engine_module, "Branches", lambda: Branches(committing=Nothing()))
    return Parts()


def rollbacks_leave_no_mark(monkeypatch: pytest.MonkeyPatch) -> Parts:
    over = branches._over

    def over_and_unmark(engine: Engine, branch: Branch, *more: Any) -> None:
        over(engine, branch, *more)
        for queue, message in branch.acks:
            queue.counts.pop(message.position, None)

    monkeypatch.setattr(branches, "_over", over_and_unmark)
    return Parts()


def commits_leave_an_acknowledgement_out(monkeypatch: pytest.MonkeyPatch) -> Parts:
    end = branches.end

    def end_most(engine: Engine, xid: Xid, ending: Ending, done: Callable[[], None]) -> None:
        branch = engine.branches.prepared.get(xid)
        if branch is not None and branch.ending is None and ending in branches.COMMITS:
            branch.acks = branch.acks[:-1]
        end(engine, xid, ending, done)

    monkeypatch.setattr(branches, "end", end_most)
    return Parts()


def a_recovery_does_not_ask_the_log_for_its_rollback(monkeypatch: pytest.MonkeyPatch) -> Parts:
    step_of = Manager._step

    async def step_alone(manager: Manager, step: Step) -> None:
        if step.action is Action.ROLLBACK:
            await manager._tell(step.xid, Outcome.ROLLBACK)
        else:
            await step_of(manager, step)

    monkeypatch.setattr(Manager, "_step", step_alone)
    return Parts()


def a_recovery_finds_and_finishes_nothing(monkeypatch: pytest.MonkeyPatch) -> Parts:
    async def pass_over(manager: Manager, step: Step) -> None: ...

    monkeypatch.setattr(Manager, "_step", pass_over)
    return Parts()


#: What is planted, and the anomalies that must show, each of them.
PLANTED: list[tuple[Plant, set[str]]] = [
    (snapshots_leave_prepared_branches_out, {"lost"}),
    (a_branch_is_prepared_until_it_has_ended_twice, {"duplicated"}),
    (a_prepared_transaction_stays_the_connections, {"duplicated"}),
    (prepared_is_said_before_it_is_stored, {"lost"}),
    (sends_of_a_prepared_branch_are_put_in, {"unexpected", "duplicated"}),
    (commits_in_one_phase_are_not_remembered, {"unexpected"}),
    (a_recovery_does_not_ask_the_log_for_its_rollback, {"xa-split"}),
    (a_recovery_finds_and_finishes_nothing, {"xa-stuck"}),
    (snapshots_leave_out_what_has_ended, {"unexpected"}),
    (ends_by_force_are_not_remembered, {"lost"}),
    (ends_by_force_are_in_no_snapshot, {"lost"}),
    (what_is_forgotten_is_not_journaled, {"unexpected"}),
    (commits_under_way_are_not_known, {"unexpected"}),
    (rollbacks_leave_no_mark, {"redelivered-unmarked"}),
    (commits_leave_an_acknowledgement_out, {"zombie-ack"}),
]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("plant", "names"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_the_simulation_finds(plant: Plant, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_found(plant(monkeypatch), names) == set()


def test_every_anomaly_of_branches_alone_is_planted() -> None:
    assert BRANCH_ANOMALIES.keys() <= set().union(*(names for _, names in PLANTED))
