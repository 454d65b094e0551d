"""Digests of message ids contain the user. Those of earlier versions do not, and are looked up until they have expired."""

from __future__ import annotations

import json
import struct

import pytest

from bascule.broker.duplicates import WINDOW_MS
from tests.unit.broker.conftest import Bench


def restart(bench: Bench, *, of_an_earlier_version: bool = False) -> None:
    """Restart from a snapshot; an earlier version did not store until when there are digests without users."""
    bench.broker.take_snapshot()
    bench.broker.settle()
    if of_an_earlier_version:
        name, data = bench.broker.snapshots.popitem()
        (length,) = struct.unpack_from(">I", data)
        head = json.loads(data[4 : 4 + length])
        del head["plain_until_ms"]
        encoded = json.dumps(head).encode()
        bench.broker.snapshots[name] = struct.pack(">I", len(encoded)) + encoded + data[4 + length :]
    bench.crash()


@pytest.mark.parametrize("snapshot", [False, True])
def test_send_stored_by_an_earlier_version_is_recognised_when_its_user_repeats_it(bench: Bench, snapshot: bool) -> None:
    bench.fill("first", message_id="a")  # an earlier version stored the same digest for each user
    restart(bench, of_an_earlier_version=True) if snapshot else bench.crash()
    bench.fill("again", message_id="a", user="ann")
    bench.now_ms += WINDOW_MS // 2
    restart(bench)
    bench.fill("once more", message_id="a", user="ann")
    assert bench.waiting(bench.queue()) == ["first"]
    assert bench.sender.accepted_tokens == ["first", "again", "once more"]


def test_digests_without_users_are_not_looked_up_once_those_of_an_earlier_version_have_expired(bench: Bench) -> None:
    bench.fill("first", message_id="a")
    restart(bench, of_an_earlier_version=True)
    bench.now_ms += WINDOW_MS + 1
    bench.fill("of nobody", message_id="b")
    bench.fill("of ann", message_id="b", user="ann")
    restart(bench)
    bench.fill("of bob", message_id="b", user="bob")
    assert bench.waiting(bench.queue()) == ["first", "of nobody", "of ann", "of bob"]


def test_digests_without_users_are_not_looked_up_behind_a_snapshot_of_this_version(bench: Bench) -> None:
    bench.fill("of nobody", message_id="a")
    restart(bench)
    bench.fill("of ann", message_id="a", user="ann")
    assert bench.waiting(bench.queue()) == ["of nobody", "of ann"]


def test_message_recognised_by_an_earlier_digest_leaves_no_other_one(bench: Bench) -> None:
    bench.fill("first", message_id="a")
    restart(bench, of_an_earlier_version=True)
    bench.fill("again", message_id="a", user="ann")
    bench.fill("new", message_id="b", user="ann")
    bench.fill("of nobody", message_id="b")
    assert len(bench.engine.windows.by_address["q"].digests) == 3
    assert bench.waiting(bench.queue()) == ["first", "new", "of nobody"]
