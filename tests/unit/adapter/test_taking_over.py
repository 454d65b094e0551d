"""The offset at which a new owner begins to read, and transactions that a new owner cannot finish."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bascule.adapter.inbound import InboundLog
from bascule.adapter.inbound.performing import BlockingTakeover
from bascule.adapter.inbound.state import FLIGHT, Flights, Place, Ref, key_of
from bascule.adapter.inbound.taking_over import ClaimOfOthers, Run, take_over
from bascule.core.effects import run_blocking
from bascule.core.kafka_records import GroupOffset
from bascule.core.xid import Xid
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.log import LogState
from bascule.xa.xid import branch, new_gtrid

PLACE = Place("payments", 0)


class FixedLog:
    """An inbound log with a given state."""

    def __init__(self, flights: Flights) -> None:
        self.flights_now = flights
        self.taken: list[str | None] = []

    def owner(self, _place: Place) -> str:
        return "before"

    def take(self, _place: Place, after: str | None) -> str:
        self.taken.append(after)
        return "own"

    def flights(self, _place: Place) -> Flights:
        return self.flights_now


def taken_over(log: FixedLog, held: GroupOffset | None, spec: Any = None) -> Run[Any]:
    run = Run[Any](PLACE)
    assert run_blocking(take_over(run, BlockingTakeover(spec, cast("Any", log), run, lambda _: held))) is not None
    return run


@pytest.mark.parametrize(
    ("held", "read_to", "begins"),
    [
        (GroupOffset(7), None, 7),
        (GroupOffset(7), 5, 7),
        (GroupOffset(3), 5, 5),  # a delayed commit of a member has reset the group
        (GroupOffset(3, by_member=False), 5, 3),  # an operator has reset the group
    ],
)
def test_new_owner_starts_at_larger_offset_of_group_and_log_unless_operator_set_it(
    held: GroupOffset, read_to: int | None, begins: int
) -> None:
    assert taken_over(FixedLog(Flights({}, {}, {}, read_to)), held).next_offset == begins


def test_partition_assigned_to_other_member_is_not_taken() -> None:
    log, run = FixedLog(Flights({}, {}, {})), Run[Any](PLACE)
    assert run_blocking(take_over(run, BlockingTakeover(cast("Any", None), cast("Any", log), run, lambda _: None))) is None
    assert (run.token, log.taken) == ("", [])


class Shop:
    """An endpoint with a transaction manager, and a partition with the claim of a transaction."""

    def __init__(self, claimed_by: str, *, transacted: bool = True, log_id: str = "") -> None:
        self.decisions = ModelLog(LogState(log_id="aaaaaaaa"))
        self.xid = branch(new_gtrid(claimed_by, 0, log_id), "inbound")
        log, kafka = InboundLog("inbound", {}, group="shop"), cast("Any", ModelResource("kafka"))
        manager = TransactionManager("shop", self.decisions, [cast("Any", Prepared(self.xid)), kafka])
        xa = cast("Any", Claims(manager, log, kafka)) if transacted else None
        self.spec = cast("Any", type("Spec", (), {"group": "shop", "transacted": xa}))
        self.log = FixedLog(Flights({5: (key_of(FLIGHT, Ref(PLACE, "old", 5)),)}, {5: 0}, {self.xid: 5}))
        self.run = Run[Any](PLACE)

    def take(self) -> Flights | None:
        effects = BlockingTakeover(self.spec, cast("Any", self.log), self.run, lambda _: GroupOffset(6))
        return run_blocking(take_over(self.run, effects))


class Claims:
    """The fields of ``Xa``."""

    def __init__(self, manager: TransactionManager, log: InboundLog, kafka: Any) -> None:
        self.manager, self.log, self.kafka = manager, log, kafka


class Prepared(ModelResource):
    """The inbound log as a resource in recovery, with one claim."""

    def __init__(self, xid: Xid) -> None:
        super().__init__("inbound")
        self.claims = [xid]

    def recover(self) -> list[Xid]:
        return list(self.claims)

    def rollback(self, xid: Xid) -> None:
        self.claims.remove(xid)


def test_takeover_rolls_back_undecided_transaction_of_earlier_owner() -> None:
    shop = Shop("shop")
    assert shop.take() is None
    assert not shop.run.blocked
    assert list(shop.decisions.read().decisions) == [shop.xid.gtrid]


@pytest.mark.parametrize("transacted", [True, False])
def test_takeover_is_blocked_by_claim_of_other_manager_until_it_is_finished(transacted: bool) -> None:
    """The other manager may use another decision log, so nobody else knows the outcome of its transaction."""
    shop = Shop("store", transacted=transacted)
    who = "manager 'shop'" if transacted else "an endpoint without a transaction manager"
    with pytest.raises(ClaimOfOthers, match=rf"of manager 'store' claim its records, and {who} cannot finish them; run `bascule xa"):
        shop.take()
    assert shop.run.blocked
    assert not shop.decisions.read().decisions
    shop.log.flights_now = Flights({}, {}, {})
    assert shop.take() is not None
    assert not shop.run.blocked


def test_takeover_is_blocked_by_claim_of_same_manager_name_with_other_decision_log() -> None:
    shop = Shop("shop", log_id="bbbbbbbb")
    with pytest.raises(ClaimOfOthers, match="of manager 'shop' with decision log bbbbbbbb claim its records"):
        shop.take()
    assert shop.run.blocked
    assert not shop.decisions.read().decisions
