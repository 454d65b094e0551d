"""The stored format of positions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bascule.writer.position import POSITION_PARTITIONS, UNKNOWN_EPOCH, Position, PositionLost, lag_group, position_key, position_partition

POSITION = Position("topic", "id", 2, 17, 3, 4, ("x",), ("d", "e"), "driver.1.1", 5)
#: Every later version must read the positions in these files.
GOLDEN = Path(__file__).parents[2] / "golden"


def test_position_format_2_is_unchanged() -> None:
    golden = (GOLDEN / "position-v2.bin").read_bytes()
    assert POSITION.encode() == golden
    assert Position.decode(golden) == POSITION


def test_position_format_1_is_read_without_leader_epoch() -> None:
    golden = (GOLDEN / "position-v1.bin").read_bytes()
    assert "version" not in json.loads(golden)
    assert Position.decode(golden) == replace(POSITION, leader_epoch=UNKNOWN_EPOCH)
    assert Position.decode(json.dumps({**json.loads(golden), "version": 1}).encode()) == replace(POSITION, leader_epoch=UNKNOWN_EPOCH)


@pytest.mark.parametrize("version", [3, 0, "1", None, True])
def test_position_of_unknown_format_is_refused(version: object) -> None:
    with pytest.raises(PositionLost, match=r"position format .*this version of Bascule reads 1 to 2"):
        Position.decode(json.dumps({**json.loads(POSITION.encode()), "version": version}).encode())


@pytest.mark.parametrize("value", [b"", b"[]", b"no JSON", b'{"topic": "t"}', b'{"unknown": 1}', b"\xff"])
def test_damaged_position_is_refused(value: bytes) -> None:
    with pytest.raises(PositionLost):
        Position.decode(value)


@pytest.mark.parametrize("name", ["exclusive", "members"])
def test_position_with_number_instead_of_list_is_refused(name: str) -> None:
    with pytest.raises(PositionLost, match="unreadable position"):
        Position.decode(json.dumps({**json.loads(POSITION.encode()), name: 5}).encode())


def test_position_without_members_and_owner_is_vacant() -> None:
    assert Position("topic", "id", 0, 1).vacant
    assert not Position("topic", "id", 0, 1, owner="me").vacant
    assert not Position("topic", "id", 0, 1, members=("d",)).vacant


def test_position_keys_are_spread_over_partitions() -> None:
    keys = [position_key("ingress:a", "topic", number) for number in range(200)]
    assert {position_partition(key) for key in keys} == set(range(POSITION_PARTITIONS))
    assert keys[0] == "ingress:a/topic/0"
    assert lag_group("bascule", "b1", "diverts") == "bascule.b1.diverts"
