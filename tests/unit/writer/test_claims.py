"""Claims of positions: positions that a driver claims or leaves to its successor, and tasks that stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bascule.core.effects import run_blocking
from bascule.writer.claims import Claim, Claims, ClaimViolation, generation
from bascule.writer.errors import PositionMoved
from bascule.writer.position import Position, PositionLost, PositionTaken

STORED = Position("topic", "id", 0, 17, members=("d",))


class Writer:
    """A writer with a position that another writer may move before a write."""

    def __init__(self, key: str, position: Position | None) -> None:
        self.key = key
        self.position = position
        self.moves: list[Position] = []

    async def current(self) -> Position | None:
        return self.position

    async def write(self, outputs: Any, before: Position | None, after: Position | None) -> None:
        assert outputs == []
        if self.moves:
            self.position = self.moves.pop(0)
        if self.position != before:
            raise PositionMoved(self.position)
        self.position = after


def take(claims: Claims, writer: Writer, leader: str = "leader") -> Position | None:
    return run_blocking(claims.take(writer, leader))


def test_claimed_position_contains_driver_attempt_and_generation() -> None:
    writer = Writer("leader", replace(STORED, owner="old.5.3"))
    assert take(Claims("new"), writer) == writer.position == replace(STORED, owner="new.1.4")


def test_followers_use_generation_of_leader_and_their_own_attempt() -> None:
    claims, follower = Claims("new"), Writer("other", replace(STORED, owner="old.9.1"))
    take(claims, Writer("leader", replace(STORED, owner="old.1.1")))
    taken = take(claims, follower)
    assert taken is not None
    assert taken.owner == "new.2.2"


@pytest.mark.parametrize("found", [None, Position("topic", "id", 0, 17)])
def test_missing_or_vacant_position_is_not_claimed(found: Position | None) -> None:
    writer = Writer("leader", found)
    assert take(Claims("new"), writer) == found
    assert writer.position == found


def test_position_moved_by_fenced_task_is_claimed_at_new_offset() -> None:
    writer = Writer("leader", replace(STORED, owner="old.1.1"))
    writer.moves = [replace(STORED, owner="old.1.1", offset=20)]
    taken = take(Claims("new"), writer)
    assert taken is not None
    assert (taken.offset, taken.owner) == (20, "new.2.2")


def test_claim_of_position_held_by_successor_is_refused() -> None:
    claims, writer = Claims("first"), Writer("leader", replace(STORED, owner="old.1.1"))
    take(claims, writer)
    take(Claims("second"), writer)
    with pytest.raises(PositionTaken, match="held by another driver of the bridge, 'second"):
        take(claims, writer)


def test_driver_can_claim_its_own_position_again() -> None:
    claims, writer = Claims("first"), Writer("leader", replace(STORED, owner="old.1.1"))
    take(claims, writer)
    assert take(claims, writer) == replace(STORED, owner="first.2.2")


def test_position_of_later_generation_is_not_claimed() -> None:
    claims = Claims("first")
    take(claims, Writer("leader", replace(STORED, owner="old.1.1")))
    with pytest.raises(PositionTaken):
        take(claims, Writer("other", replace(STORED, owner="second.1.3")))


def test_first_generation_claims_any_position() -> None:
    claims = Claims("first")
    take(claims, Writer("leader", None))
    assert take(claims, Writer("other", replace(STORED, owner="old.1.7"))) == replace(STORED, owner="first.1.1")


def test_held_position_of_other_owner_is_not_claimed() -> None:
    claims = Claims("first")
    take(claims, Writer("leader", None))
    claims.hold(["other"])
    with pytest.raises(PositionTaken):
        take(claims, Writer("other", replace(STORED, owner="second.1.1")))


@pytest.mark.parametrize(("owner", "number"), [("", 0), ("driver", 0), ("driver.2.7", 7)])
def test_generation_is_parsed_from_owner_name(owner: str, number: int) -> None:
    assert generation(replace(STORED, owner=owner)) == number


CLAIM = Claim("key", "topic", "id", 0, "me.1.1", ("d",))
HELD = replace(STORED, owner="me.1.1")


def test_claim_check_accepts_unchanged_position() -> None:
    assert CLAIM.check(HELD) == HELD


@pytest.mark.parametrize("found", [replace(HELD, owner="other.1.1"), replace(HELD, members=("d", "e"))])
def test_claim_check_refuses_other_owner_or_members(found: Position) -> None:
    with pytest.raises(PositionTaken, match="'key'"):
        CLAIM.check(found)
    assert CLAIM.check(found, violations=[ClaimViolation.OWNER_NOT_CHECKED]) == found


@pytest.mark.parametrize("found", [None, replace(HELD, topic_id="new")])
def test_claim_of_missing_position_or_recreated_topic_is_lost(found: Position | None) -> None:
    with pytest.raises(PositionLost):
        CLAIM.check(found)


def test_task_starts_at_position_for_any_batch_start() -> None:
    assert CLAIM.begin(HELD, 3) == HELD
    assert CLAIM.begin(HELD, 3, violations=[ClaimViolation.BATCH_START_TRUSTED]).offset == 3
