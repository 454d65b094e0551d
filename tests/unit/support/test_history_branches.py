"""The checker judges branches by the calls on them. It finds every planted fault, and no fault in a correct history."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.history import Tally
from tests.support.history_branches import NEVER_MS, Branch, End, Listing, Said, Wanted, judge
from tests.support.operations import Operation, Place


def branch(*ends: End, prepared_ms: float = 10, decided: Wanted = "commit", forget_ms: float = NEVER_MS) -> Branch:
    return Branch("b", Place("in"), ("1",), {"out": ("2",)}, decided, prepared_ms, forget_ms=forget_ms, ends=list(ends))


def end(wanted: Wanted, said: Said | None = "done", asked_ms: float = 20, *, forced: bool = False) -> End:
    return End(wanted, asked_ms, NEVER_MS if said is None else asked_ms + 5, said, forced)


def taken(id: str, source: str, begun_ms: float, ended_ms: float) -> Operation:
    return Operation("taker", (id,), "ok", source=source, op="receive", begun_ms=begun_ms, ended_ms=ended_ms)


def found(each: Branch, operations: Sequence[Operation] = (), listings: Sequence[Listing] = ()) -> list[str]:
    tally = Tally()
    judge(tally, operations, [each], listings)
    return [str(anomaly) for anomaly in tally.anomalies]


@pytest.mark.parametrize(
    "each",
    [
        branch(end("commit")),
        branch(end("commit", None), end("commit", "committed", 30)),
        branch(end("commit", None), end("commit", "unknown", 30)),
        branch(end("rollback", "committed", 40), end("commit")),  # by a late recovery, without effect
        branch(end("rollback", "unknown", asked_ms=5), decided="rollback", prepared_ms=NEVER_MS),
        branch(end("commit", "forced-commit", forced=True), end("rollback", "rolled-back", 90), forget_ms=60),
    ],
)
def test_branch_that_ends_as_decided_has_no_anomaly(each: Branch) -> None:
    operations = [taken("1", "in", 0, 5), taken("2", "out", 20, 30)]
    assert found(each, operations, [Listing(10, 15, frozenset("b")), Listing(15, 25, frozenset())]) == []


@pytest.mark.parametrize("said", ["unknown", "committed"])
def test_prepared_branch_unknown_before_its_end_is_lost(said: Said) -> None:
    assert found(branch(end("commit", said))) == ["lost: 1 branches that are prepared, or ended by an administrator, are unknown (b)"]


def test_prepared_branch_missing_from_the_listing_is_lost() -> None:
    assert found(branch(end("commit")), listings=[Listing(12, 18, frozenset())]) == [
        "lost: 1 branches that are prepared, or ended by an administrator, are not listed (b)"
    ]


def test_branch_ended_by_administrator_must_be_known_until_forgotten() -> None:
    forced = branch(end("commit", "forced-commit", forced=True), end("rollback", "unknown", 40))
    unknown, unlisted = (
        f"lost: 1 branches that are prepared, or ended by an administrator, are {what} (b)" for what in ("unknown", "not listed")
    )
    listing = Listing(50, 55, frozenset())
    assert found(forced, listings=[listing]) == [unknown, unlisted]
    forced.forget_ms = 52
    assert found(forced, listings=[listing]) == [unknown]
    forced.forget_ms = 40
    assert found(forced, listings=[listing]) == []


def test_branch_listed_after_its_end_or_after_forgetting_is_unexpected() -> None:
    again = ["unexpected: 1 branches are listed after their end (b)"]
    early, late = (Listing(asked_ms, asked_ms + 5, frozenset("b")) for asked_ms in (21, 50))
    assert found(branch(end("commit")), listings=[early]) == []
    assert found(branch(end("commit")), listings=[late]) == again
    forced = branch(end("commit", forced=True), end("commit", "forced-commit", 30), forget_ms=35)
    assert found(forced, listings=[late]) == []
    forced.forgotten_ms = 40
    assert found(forced, listings=[late]) == again


def test_branch_that_ends_against_the_decision_is_an_xa_split() -> None:
    split = ["xa-split: 1 branches have ended otherwise than was decided (b)"]
    assert found(branch(end("commit", None), end("commit", "rolled-back", 30))) == split
    assert found(branch(end("rollback", None), end("rollback", "committed", 30), decided="rollback")) == split


def test_message_sent_by_branch_and_delivered_before_its_end_is_found() -> None:
    early = ["unexpected: 1 given out before the end of their branch (2)"]
    assert found(branch(end("commit")), [taken("2", "out", 12, 18)]) == early
    assert found(branch(prepared_ms=NEVER_MS), [taken("2", "out", 12, 18)]) == early


def test_message_taken_by_prepared_branch_and_delivered_elsewhere_is_found() -> None:
    again = ["duplicated: 1 given out while a prepared branch had them (1)"]
    assert found(branch(end("rollback", asked_ms=20), decided="rollback"), [taken("1", "in", 12, 18)]) == again
