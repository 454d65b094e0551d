"""The stored format of positions."""

from __future__ import annotations

import json

import pytest

from bascule.writer.position import POSITION_PARTITIONS, Position, PositionLost, lag_group, position_key, position_partition

POSITION = Position("topic", "id", 2, 17, 3, 4, ("x",), ("d", "e"), "driver.1.1")


def test_position_is_read_as_it_was_written() -> None:
    assert Position.decode(POSITION.encode()) == POSITION


def test_position_of_the_first_release_has_no_version() -> None:
    assert "version" not in json.loads(POSITION.encode())
    assert Position.decode(json.dumps({**json.loads(POSITION.encode()), "version": 1}).encode()) == POSITION


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_position_of_another_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(PositionLost, match=r"position format .*this Bascule reads 1"):
        Position.decode(json.dumps({**json.loads(POSITION.encode()), "version": version}).encode())


@pytest.mark.parametrize("value", [b"", b"[]", b"no JSON", b'{"topic": "t"}', b'{"unknown": 1}', b"\xff"])
def test_damaged_position_is_refused(value: bytes) -> None:
    with pytest.raises(PositionLost):
        Position.decode(value)


def test_position_without_members_and_owner_is_vacant() -> None:
    assert Position("topic", "id", 0, 1).vacant
    assert not Position("topic", "id", 0, 1, owner="me").vacant
    assert not Position("topic", "id", 0, 1, members=("d",)).vacant


def test_keys_are_spread_over_the_partitions() -> None:
    keys = [position_key("ingress:a", "topic", number) for number in range(200)]
    assert {position_partition(key) for key in keys} == set(range(POSITION_PARTITIONS))
    assert keys[0] == "ingress:a/topic/0"
    assert lag_group("bascule", "b1", "diverts") == "bascule.b1.diverts"
