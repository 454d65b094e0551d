"""Hostile peers of a broker with users, tokens and permissions: before they have logged in, and as a user who may do nothing.

A peer without a login, or without permissions, changes nothing, besides what the other tests of hostile peers check.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine

import pytest

from bascule.testing.broker import Sender, message_bytes
from tests.property.guarded import NOBODY, Guarded
from tests.property.test_hostile_fields import OPENINGS, PLACES, pieces
from tests.property.test_hostile_peers import Peer, complaints
from tests.support.costs import LEFT_BYTES_MAX, left_bytes, quiet
from tests.support.hostile_login import HostileLogins
from tests.support.provider import Provider

LOGINS_OF_ONE_TEST = 150
SEEDS_OF_ONE_TEST = 15
#: Turns of the loop that the broker may need after a connection has ended.
TURNS = 50
#: In the usual test, one value of this many is sent in each field.
STEP = 97


class LoginPeer(Peer):
    """A peer that waits for the check of each login."""

    async def tell(self, data: bytes) -> None:
        """Send bytes, and wait until the broker has decided about a login."""
        self.say(data)
        while self.connection._login is not None and not self.connection.client.lost:
            await asyncio.sleep(0)
        self.served.broker.settle()
        self.served.send_output()
        self.check_frames()


def guarded(provider: Provider, talk: Callable[[Guarded], Coroutine[None, None, None]]) -> None:
    """Talk to a broker, which must serve another client, change nothing else, and log no unexpected error."""

    async def run() -> None:
        with complaints() as found, Guarded(provider) as served:
            canary = served.canary()
            link = canary.consumer("canary", 10)
            before = served.state()
            await talk(served)
            assert served.state() == before
            served.broker.send("canary", message_bytes("alive"), Sender(), 1)
            served.settle(canary)
            assert canary.received(link) == 1
            canary.connection.connection_lost(None)
            served.broker.settle()
            assert served.usage.users == {}
            assert served.contained == []
            assert served.check_audit()
        assert found == []

    with quiet():
        asyncio.run(run())


async def log_in(served: Guarded, seed: int, provider: Provider) -> None:
    """Let a peer try to log in, without valid credentials."""
    served.forget_failures()
    peer = LoginPeer(served, seed)
    for piece in HostileLogins(seed, provider).pieces():
        await peer.tell(piece)
    client = peer.connection.client
    assert (client.user, len(client.sessions), len(client.links)) == ("", 0, 0), f"seed {seed}: logged in"
    peer.connection.connection_lost(None)
    served.broker.settle()


async def use_nothing(served: Guarded, seed: int) -> None:
    """Let a user without permissions send hostile frames."""
    served.certified = NOBODY
    peer = Peer(served, seed, mechanism=b"EXTERNAL")
    peer.talk()
    peer.connection.connection_lost(None)
    served.broker.settle()


@pytest.mark.parametrize("first", range(0, 2 * LOGINS_OF_ONE_TEST, LOGINS_OF_ONE_TEST))
def test_hostile_peer_before_its_login_changes_nothing(first: int, provider: Provider) -> None:
    async def talk(served: Guarded) -> None:
        for seed in range(first, first + LOGINS_OF_ONE_TEST):
            await log_in(served, seed, provider)

    guarded(provider, talk)


@pytest.mark.parametrize("first", range(0, 2 * SEEDS_OF_ONE_TEST, SEEDS_OF_ONE_TEST))
def test_hostile_user_without_permissions_changes_nothing(first: int, provider: Provider) -> None:
    async def talk(served: Guarded) -> None:
        for seed in range(first, first + SEEDS_OF_ONE_TEST):
            await use_nothing(served, seed)

    guarded(provider, talk)


def send_fields(provider: Provider, places: list[str], step: int) -> None:
    async def talk(served: Guarded) -> None:
        served.certified = NOBODY
        for place in places:
            for name, said in pieces(place, step, mechanism=b"EXTERNAL"):
                before, peer = served.state(), Peer(served, 0)
                try:
                    for piece in said:
                        peer.say(piece)
                    peer.connection.connection_lost(None)
                    served.broker.settle()
                    assert served.state() == before
                except Exception as error:
                    raise AssertionError(f"{place}, {name}: {error!r}") from error

    guarded(provider, talk)


def test_sampled_hostile_field_values_of_a_user_without_permissions_change_nothing(provider: Provider) -> None:
    send_fields(provider, [*OPENINGS, *PLACES], STEP)


def test_peers_that_could_not_log_in_or_may_do_nothing_leave_no_memory_behind(provider: Provider) -> None:
    async def run() -> None:
        with Guarded(provider) as served:

            async def talk() -> None:
                for seed in range(20):
                    await log_in(served, seed, provider)
                for seed in range(3):
                    await use_nothing(served, seed)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                served.certified = None
                served.check_audit()

            assert await left_bytes(talk, served.broker.log) < LEFT_BYTES_MAX
            assert served.engine.memory.used_bytes == 0

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", [*OPENINGS, *PLACES])
def test_all_hostile_field_values_of_a_user_without_permissions_change_nothing(place: str, provider: Provider) -> None:
    send_fields(provider, [place], 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_peers_without_login_or_permissions_change_nothing(provider: Provider) -> None:
    """BASCULE_HOSTILE_SEEDS is the number of seeds, BASCULE_HOSTILE_FIRST the first of them."""
    first, count = int(os.environ.get("BASCULE_HOSTILE_FIRST", "10000")), int(os.environ.get("BASCULE_HOSTILE_SEEDS", "3000"))

    async def talk(served: Guarded) -> None:
        for seed in range(first, first + count):
            served.certified = None
            await log_in(served, seed, provider)
            await use_nothing(served, seed)

    guarded(provider, talk)
