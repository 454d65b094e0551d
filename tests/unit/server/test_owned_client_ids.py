"""A client id belongs to the users of its durable subscriptions: others neither connect with it as JMS clients nor subscribe under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bascule.amqp.errors import INVALID_FIELD, UNAUTHORIZED_ACCESS
from bascule.amqp.events import Detached
from bascule.amqp.performatives import Target
from bascule.amqp.sasl import AnonymousServer, SaslServer
from bascule.client import ConnectionFactory, SecurityDenied, Topic
from bascule.client.blocking import Context
from bascule.core.access import AccessRule, AccessRules
from bascule.core.destination import Routing
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.core.roles import UserRoles
from bascule.server.listener_tls import TlsPeer
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import Client, Served, run_async
from tests.unit.server.test_opening import SOLE_CONNECTION, Opening
from tests.unit.server.test_owned_branches import USERS
from tests.unit.server.test_subscriptions import subscribe

__all__ = ["kafka"]
NEWS = Topic("news")
WORDS = ("send", "consume", "createAddress", "createDurableQueue", "deleteDurableQueue")
OWNED: dict[str, Any] = {
    **USERS,
    "permission": [{"match": "$management", "recover": ["recovery"]}, {"match": "#", **{word: ["*"] for word in WORDS}}],
}
REFUSED = r"client id 'shop' has durable subscriptions of another user than 'bob'"
RULES = AccessRules(
    [
        AccessRule("#", dict.fromkeys(Permission, frozenset("*"))),
        AccessRule(MANAGEMENT_ADDRESS, {Permission.RECOVER: frozenset({"recovery"})}),
    ],
    UserRoles({"recovery": ["rex"]}),
)


class Guarded(Served):
    """Permissions for all addresses, and clients of one user at a time."""

    def __init__(self, owner: str = "ann") -> None:
        super().__init__()
        self.permissions = RULES
        self.user = ""
        self.queue = self.engine.create_queue("shop.news", "news", Routing.MULTICAST, subscription="news", user=owner)

    def sasl(self, tls: TlsPeer, peer: str) -> SaslServer:
        user = self.user
        return SaslServer({"ANONYMOUS": lambda: AnonymousServer(user)})

    def client(self, user: str) -> Client:
        """Return a client that has not asked for being the only one with its id."""
        self.user = user
        return Client(self, "shop")

    def refusal(self, user: str) -> str:
        """Return why a JMS client of the user is refused, "" if it is not, and end its connection."""
        self.user = user
        opening = Opening(self, "shop", SOLE_CONNECTION)
        opening.connection.connection_lost(None)
        if opening.refusal is None:
            return ""
        assert opening.refusal.condition == UNAUTHORIZED_ACCESS
        return opening.refusal.description


def refusals(client: Client) -> list[str]:
    return [str(event.error) for event in client.events_of(Detached) if event.error is not None]


@pytest.mark.parametrize(("owner", "user", "refused"), [
    ("ann", "ann", False), ("ann", "bob", True), ("ann", "rex", False), ("", "bob", False), ("ann", "anonymous", True),
    ("anonymous", "bob", False), ("anonymous", "anonymous", False),
])  # fmt: skip
@run_async
async def test_only_its_users_and_those_who_recover_connect_with_a_client_id(owner: str, user: str, refused: bool) -> None:
    assert bool(Guarded(owner).refusal(user)) is refused


@run_async
async def test_each_user_with_a_durable_subscription_of_a_client_id_connects_with_it() -> None:
    served = Guarded()
    assert served.refusal("bob")
    served.engine.create_queue("shop.other", "news", Routing.MULTICAST, subscription="other", user="bob")
    assert [served.refusal(user) for user in ("ann", "bob")] == ["", ""]
    served.engine.delete_queue(served.queue)
    assert [bool(served.refusal(user)) for user in ("ann", "bob")] == [True, False]


@run_async
async def test_a_subscription_without_a_user_opens_its_client_id_beside_those_of_users() -> None:
    served = Guarded()
    assert served.refusal("bob")
    served.engine.create_queue("shop.open", "news", Routing.MULTICAST, subscription="open")
    assert served.refusal("bob") == ""


@pytest.mark.parametrize("user", ["bob", "rex"])
@pytest.mark.parametrize("shared", [False, True])
@run_async
async def test_user_without_the_client_id_makes_no_durable_subscription_under_it(user: str, shared: bool) -> None:
    served = Guarded()
    client = served.client(user)
    subscribe(client, "own", shared=shared)
    (error,) = refusals(client)
    assert f"client id 'shop' has durable subscriptions of another user than {user!r}" in error
    assert list(served.engine.addresses.subscriptions) == ["shop.news"]


@run_async
async def test_subscriptions_that_need_no_client_id_are_not_refused_to_other_users() -> None:
    served = Guarded()
    client = served.client("bob")
    subscribe(client, "every|global", shared=True)
    subscribe(client, "passing|volatile1", durable=False, shared=True)
    subscribe(client, "plain", durable=False)
    assert refusals(client) == []


@run_async
async def test_client_id_is_free_for_another_user_once_its_last_subscription_is_unsubscribed() -> None:
    served = Guarded()
    owner, other = served.client("ann"), served.client("bob")
    subscribe(other, "own")
    assert len(refusals(other)) == 1
    ending = owner.session.attach_receiver("news", None, Target())
    served.settle(owner)
    ending.detach()
    served.settle(owner)
    subscribe(other, "own2")
    assert len(refusals(other)) == 1
    assert list(served.engine.addresses.subscriptions) == ["shop.own2"]


@pytest.mark.parametrize(("user", "in_use"), [("ann", True), ("bob", False), ("rex", False)])
@run_async
async def test_connection_that_has_not_asked_to_be_the_only_one_keeps_the_owner_out_only_if_it_is_the_owners(
    user: str, in_use: bool
) -> None:
    served = Guarded()
    served.client(user)
    served.user = "ann"
    opening = Opening(served, "shop", SOLE_CONNECTION)
    assert (opening.refusal is not None and opening.refusal.condition == INVALID_FIELD) is in_use


@run_async
async def test_sole_connection_of_a_recovery_manager_and_any_connection_with_an_id_without_an_owner_keep_others_out() -> None:
    served = Guarded()
    served.user = "rex"
    assert Opening(served, "shop", SOLE_CONNECTION).refusal is None
    served.user = "bob"
    Opening(served, "till")
    served.user = "ann"
    for container in ("shop", "till"):
        opening = Opening(served, container, SOLE_CONNECTION)
        assert opening.refusal is not None
        assert opening.refusal.condition == INVALID_FIELD


def connected(broker: Broker, user: str) -> Context:
    """Return a connection with the client id; without a login if ``user`` is empty."""
    url, login = f"amqp://127.0.0.1:{broker.ready[-1]}", {"user": user, "password": user[0]} if user else {}
    return ConnectionFactory(url, timeout_s=SOON_S, client_id="shop", **login).connect()


def subscribes(broker: Broker, user: str) -> None:
    with connected(broker, user) as context:
        context.durable_consumer(NEWS, "news").close()


def unsubscribes(broker: Broker, user: str) -> None:
    with connected(broker, user) as context:
        context.unsubscribe("news")


def connects(broker: Broker, user: str) -> None:
    connected(broker, user).close()


@run_async
async def test_client_id_belongs_to_the_login_that_subscribed_also_after_a_restart(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, **OWNED) as broker:
        await called(connects, broker, "bob")
        await called(subscribes, broker, "ann")
        with pytest.raises(SecurityDenied, match=REFUSED):
            await called(connects, broker, "bob")
    async with serving(kafka, tmp_path, **OWNED) as broker:
        with pytest.raises(SecurityDenied, match=REFUSED):
            await called(connects, broker, "bob")
        await called(connects, broker, "rex")
        await called(unsubscribes, broker, "ann")
        await called(subscribes, broker, "bob")


def holds(broker: Broker) -> dict[str, str]:
    """Return the users of the subscriptions."""
    return {name: queue.user for name, queue in broker.node.engine.addresses.subscriptions.items()}


@run_async
async def test_subscription_of_clients_without_a_login_belongs_to_the_first_user_who_uses_it_also_after_a_restart(
    kafka: KafkaInMemory, tmp_path: Path
) -> None:
    def other(broker: Broker) -> None:
        with connected(broker, "") as context:
            context.durable_consumer(NEWS, "other").close()

    async with serving(kafka, tmp_path) as broker:  # before there are users
        await called(subscribes, broker, "")
        await called(other, broker)
        assert holds(broker) == {"shop.news": "anonymous", "shop.other": "anonymous"}
    async with serving(kafka, tmp_path, **OWNED) as broker:
        for user in ("bob", "ann", ""):
            await called(connects, broker, user)
        assert holds(broker) == {"shop.news": "anonymous", "shop.other": "anonymous"}, "who only connects gets nothing"
        await called(subscribes, broker, "ann")
        assert holds(broker) == {"shop.news": "ann", "shop.other": "anonymous"}
        assert broker.node.engine.addresses.durable_subscriptions_of == {"ann": 1, "anonymous": 1}
        with pytest.raises(SecurityDenied, match=REFUSED):
            await called(connects, broker, "bob")
    async with serving(kafka, tmp_path, **OWNED) as broker:
        assert holds(broker) == {"shop.news": "ann", "shop.other": "anonymous"}
        with pytest.raises(SecurityDenied, match=REFUSED):
            await called(connects, broker, "bob")
        await called(unsubscribes, broker, "ann")


@run_async
async def test_user_without_the_permission_to_consume_takes_no_subscription_of_clients_without_a_login(
    kafka: KafkaInMemory, tmp_path: Path
) -> None:
    async with serving(kafka, tmp_path) as broker:
        await called(subscribes, broker, "")
    denied = {**OWNED, "permission": [{"match": "#", "send": ["*"], "createDurableQueue": ["*"], "createAddress": ["*"]}]}
    async with serving(kafka, tmp_path, **denied) as broker:
        with pytest.raises(SecurityDenied, match="has no permission 'consume'"):
            await called(subscribes, broker, "ann")
        assert holds(broker) == {"shop.news": "anonymous"}
