"""Limits by role that change while clients are connected: by the file of users, and by the tokens of clients."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from bascule.amqp.events import ConnectionClosed, Detached
from bascule.amqp.sasl import ExternalClient, ExternalServer, SaslClient, SaslServer, TokenIdentity
from bascule.broker.policy import Policy
from bascule.core.roles import UserRoles
from bascule.core.user_limits import LimitRule, LimitRules, UserResource
from bascule.server.allowance import SendAllowance
from bascule.server.links import PRODUCER_CREDIT
from bascule.server.usage import Usage, UsageLimits
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.unit.server import served as serving
from tests.unit.server.served import Served, run_async

BULK = frozenset({"bulk"})


class Broker(Served):
    """A broker whose users have small limits, and larger ones with the role bulk. All clients log in as ann."""

    def __init__(self, few: dict[UserResource, int], many: dict[UserResource, int]) -> None:
        self.roles = UserRoles({})
        rules = LimitRules(few, [LimitRule(frozenset(), BULK, many)], self.roles)
        super().__init__(BrokerInMemory(policy=Policy(user_limits=rules)))
        self.usage = Usage(UsageLimits(of_users=rules), self.roles)
        self.token: frozenset[str] | None = None  # the roles of the token of the next client

    def sasl(self, certified: str | None, peer: str) -> SaslServer:
        exchange = SaslServer({"EXTERNAL": partial(ExternalServer, "ann")})
        if self.token is not None:
            exchange.identity = TokenIdentity("ann", self.token, time.time() + 3600)
        return exchange

    def assign(self, *roles: str) -> None:
        """Change the roles of ann, as the file of users does."""
        self.roles.assign({"ann": roles})
        self.client_turns.in_slices(self.usage.refresh(), self.dispatch)


class Client(serving.Client):
    def __init__(self, served: Broker, name: str, token: frozenset[str] | None = None) -> None:
        served.token = token
        super().__init__(served, name, sasl=SaslClient([ExternalClient()]))

    def attaches(self, number: int) -> bool:
        """Return whether one more consumer of an existing queue is accepted."""
        link = self.consumer("existing", name=f"consumer {number}")
        return not [event for event in self.events_of(Detached) if event.link is link]

    def creates(self, queue: str) -> bool:
        """Return whether one more queue is created."""
        link = self.consumer(queue, name=f"of {queue}")
        return not [event for event in self.events_of(Detached) if event.link is link]


@run_async
async def test_gained_and_lost_role_reach_the_links_and_queues_of_a_connected_client() -> None:
    broker = Broker({UserResource.LINKS: 2, UserResource.QUEUES: 3}, {UserResource.LINKS: 6, UserResource.QUEUES: 5})
    broker.engine.queue("existing")
    client = Client(broker, "client")
    assert [client.attaches(number) for number in range(3)] == [True, True, False]
    broker.assign("bulk")
    assert client.attaches(3)
    assert [client.creates(f"q{number}") for number in range(3)] == [True, True, True]
    broker.assign()
    assert not client.attaches(4), "what is beyond the limit stays, and no more is added"
    assert client.connection.client.links.tally.count == 6
    broker.assign("bulk")
    client.connection.client.links.uncount()  # only the queues count from now on
    assert [client.creates(f"r{number}") for number in range(3)] == [True, True, False], "five queues are the limit of the role"


@run_async
async def test_limits_of_a_user_follow_the_roles_of_the_tokens_of_its_connected_clients() -> None:
    broker = Broker({UserResource.CONNECTIONS: 2, UserResource.LINKS: 1}, {UserResource.CONNECTIONS: 3, UserResource.LINKS: 3})
    broker.engine.queue("existing")
    first, second = Client(broker, "first", frozenset()), Client(broker, "second")
    assert [second.attaches(number) for number in range(2)] == [True, False]
    third = Client(broker, "third", BULK)
    assert not third.events_of(ConnectionClosed), "the token of the client itself counts for its connection"
    assert [second.attaches(number) for number in range(2, 5)] == [True, True, False]
    fourth = Client(broker, "fourth", BULK)
    assert fourth.events_of(ConnectionClosed), "a refused client leaves nothing behind"
    third.connection.connection_lost(None)
    assert not broker.roles.with_lent("ann")
    assert Client(broker, "fifth").events_of(ConnectionClosed), "the role has gone with its client"
    assert not first.events_of(ConnectionClosed)


@run_async
async def test_largest_message_follows_the_roles_for_new_producers() -> None:
    broker = Broker({UserResource.MESSAGE_BYTES: 1_000}, {UserResource.MESSAGE_BYTES: 5_000})
    client = Client(broker, "client")
    assert client.producer("q").remote.max_message_size == 1_000
    broker.assign("bulk")
    assert client.producer("q", name="later").remote.max_message_size == 5_000


@run_async
async def test_producers_that_wait_for_their_allowance_send_on_when_the_limit_ends() -> None:
    broker = Broker({UserResource.MESSAGES_PER_S: 1}, {UserResource.MESSAGES_PER_S: 0})
    client = Client(broker, "client")
    producer = client.producer("q")
    assert producer.credit == 1
    producer.send(message_bytes("x"))
    broker.settle(client)
    assert producer.credit == 0
    broker.assign("bulk")
    async with asyncio.timeout(30):
        while producer.credit < PRODUCER_CREDIT:
            await asyncio.sleep(0)
            broker.settle(client)


class Clock:
    now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


@run_async
async def test_producer_that_waits_gets_its_turn_at_the_new_rate() -> None:
    clock = Clock()
    allowance = SendAllowance(1, clock)
    assert allowance.take(1) == 1
    turn = asyncio.Event()
    allowance.when_allowed("producer", turn.set)
    clock.now_s += 0.001
    allowance.change(10_000)
    clock.now_s += 0.001
    async with asyncio.timeout(30):
        await turn.wait()
    assert allowance.take(100) == 10


def test_allowance_that_becomes_smaller_counts_from_the_change_on() -> None:
    clock = Clock()
    allowance = SendAllowance(0, clock)
    assert allowance.take(5_000) == 5_000
    allowance.change(100)
    assert allowance.take(5_000) == 0
    clock.now_s += 0.05
    assert allowance.take(5_000) == 5
    allowance.change(1_000)
    clock.now_s += 10
    assert sum(allowance.take(5_000) for _ in range(100)) == 1_000
    allowance.change(10)
    allowance.put_back(500)
    assert sum(allowance.take(5_000) for _ in range(100)) == 10
