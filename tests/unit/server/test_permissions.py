"""Every operation in which a client or an administrator names an address checks a permission, and answers a refusal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from bascule.amqp.errors import UNAUTHORIZED_ACCESS
from bascule.amqp.events import Detached, Dispositioned
from bascule.amqp.performatives import Coordinator, Rejected, Source, Target
from bascule.amqp.types import Int
from bascule.broker.addresses import TEMPORARY_PREFIX
from bascule.broker.errors import ResourceLimit
from bascule.core.access import AccessRule, AccessRules
from bascule.core.destination import Routing
from bascule.core.permissions import MANAGEMENT_ADDRESS, AllowAll, Permission, Unauthorized
from bascule.core.roles import UserRoles
from bascule.jms.message import JmsMessage, encode_message
from bascule.server import management
from bascule.server.actions import ACTIONS, act
from bascule.server.admin_access import ROLE_PERMISSIONS
from bascule.testing.broker import message_bytes
from tests.unit.server.served import QUEUE, TOPIC, Client, Served, run_async

TEMPORARY = TEMPORARY_PREFIX + "…"
Q = "existing"
PAGE = Path(__file__).parents[3] / "docs" / "internals" / "permissions.md"


class Denies:
    """Permissions that deny one permission on one address. All temporary destinations count as one."""

    def __init__(self, permission: Permission, address: str) -> None:
        self.denied = (permission, address)
        self.asked: list[tuple[str, Permission, str]] = []

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        self.asked.append((user, permission, address))
        if (permission, TEMPORARY if address.startswith(TEMPORARY_PREFIX) else address) == self.denied:
            raise Unauthorized(user, permission, address)

    def owns(self, _user: str, _owner: str) -> bool:
        return True


def request(**properties: Any) -> bytes:
    fields = {"type": management.TYPE, "formatId": Int(7), "gtrid": "67", "bqual": "62", **properties}
    return encode_message(JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties=fields))


def produces(address: str | None, capabilities: Any = QUEUE, **target: Any) -> Callable[[Client], None]:
    def attach(client: Client) -> None:
        client.session.attach_sender("producer", Source(), Target(address, capabilities=capabilities, **target))

    return attach


def consumes(address: str | None, capabilities: Any = QUEUE, **source: Any) -> Callable[[Client], None]:
    def attach(client: Client) -> None:
        client.session.attach_receiver("name", Source(address, capabilities=capabilities, **source), Target())

    return attach


def relays(address: str, kind: str = "queue") -> Callable[[Client], None]:
    def send(client: Client) -> None:
        link = client.session.attach_sender("relay", Source(), Target())
        client.served.settle(client)
        link.send(encode_message(JmsMessage(destination=address, destination_kind=kind, body_kind="text", body="x")))

    return send


def relays_request(client: Client) -> None:
    link = client.session.attach_sender("relay", Source(), Target())
    client.served.settle(client)
    link.send(request(operation="recover"))


def manages(body: bytes) -> Callable[[Client], None]:
    def send(client: Client) -> None:
        client.producer(MANAGEMENT_ADDRESS).send(body)

    return send


def subscribes(client: Client, address: str) -> None:
    consumes(address, TOPIC, durable=2, expiry_policy="never")(client)
    client.served.settle(client)
    next(iter(client.session.links.values())).detach(closed=False)
    client.served.settle(client)


def unsubscribes(client: Client) -> None:
    subscribes(client, "news")
    client.session.attach_receiver("name", None, Target())


def resubscribes(client: Client) -> None:
    subscribes(client, "news")
    consumes("sport", TOPIC, durable=2, expiry_policy="never")(client)


def recreates(client: Client) -> None:
    """Send to a queue that was deleted after the producer attached."""
    queue = client.served.engine.queue("gone")
    link = client.producer("gone")
    client.served.engine.delete_queue(queue)
    client.served.broker.settle()
    link.send(message_bytes("x"))


class Place(NamedTuple):
    """An operation in which a client names an address, and a permission that it needs."""

    name: str
    does: Callable[[Client], None]
    permission: Permission
    address: str


P = Permission
DURABLE: Any = {"durable": 2, "expiry_policy": "never"}
SHARED: Any = (*TOPIC, "shared")
PLACES = [
    Place("producer of a queue", produces(Q), P.SEND, Q),
    Place("producer of a topic", produces("news", TOPIC), P.SEND, "news"),
    Place("producer creates an address", produces("new"), P.CREATE_ADDRESS, "new"),
    Place("producer creates a queue", produces("new"), P.CREATE_DURABLE_QUEUE, "new"),
    Place("producer creates a topic", produces("news", TOPIC), P.CREATE_ADDRESS, "news"),
    Place("message creates a queue again", recreates, P.CREATE_DURABLE_QUEUE, "gone"),
    Place("consumer of a queue", consumes(Q), P.CONSUME, Q),
    Place("consumer creates an address", consumes("new"), P.CREATE_ADDRESS, "new"),
    Place("consumer creates a queue", consumes("new"), P.CREATE_DURABLE_QUEUE, "new"),
    Place("consumer of dead letters", consumes("DLQ"), P.CONSUME, "DLQ"),
    Place("browser", consumes(Q, distribution_mode="copy"), P.BROWSE, Q),
    Place("browser creates a queue", consumes("new", distribution_mode="copy"), P.CREATE_DURABLE_QUEUE, "new"),
    Place("subscriber", consumes("news", TOPIC), P.CONSUME, "news"),
    Place("subscriber creates a topic", consumes("news", TOPIC), P.CREATE_ADDRESS, "news"),
    Place("subscriber creates a queue", consumes("news", TOPIC), P.CREATE_NON_DURABLE_QUEUE, "news"),
    Place("durable subscriber", consumes("news", TOPIC, **DURABLE), P.CONSUME, "news"),
    Place("durable subscriber creates a queue", consumes("news", TOPIC, **DURABLE), P.CREATE_DURABLE_QUEUE, "news"),
    Place("shared subscriber creates a queue", consumes("news", SHARED), P.CREATE_NON_DURABLE_QUEUE, "news"),
    Place("shared durable subscriber creates a queue", consumes("news", SHARED, **DURABLE), P.CREATE_DURABLE_QUEUE, "news"),
    Place("subscriber of another topic deletes the queue", resubscribes, P.DELETE_DURABLE_QUEUE, "news"),
    Place("subscriber of another topic creates a queue", resubscribes, P.CREATE_DURABLE_QUEUE, "sport"),
    Place("unsubscribe", unsubscribes, P.DELETE_DURABLE_QUEUE, "news"),
    Place("temporary queue of a producer", produces(None, dynamic=True), P.CREATE_NON_DURABLE_QUEUE, TEMPORARY),
    Place("temporary topic of a producer", produces(None, TOPIC, dynamic=True), P.CREATE_ADDRESS, TEMPORARY),
    Place("sending to a temporary queue", produces(None, dynamic=True), P.SEND, TEMPORARY),
    Place("temporary queue of a consumer", consumes(None, dynamic=True), P.CREATE_NON_DURABLE_QUEUE, TEMPORARY),
    Place("consuming from a temporary queue", consumes(None, dynamic=True), P.CONSUME, TEMPORARY),
    Place("temporary topic of a consumer", consumes(None, TOPIC, dynamic=True), P.CREATE_NON_DURABLE_QUEUE, TEMPORARY),
    Place("message of an anonymous producer", relays(Q), P.SEND, Q),
    Place("message of an anonymous producer creates a queue", relays("new"), P.CREATE_DURABLE_QUEUE, "new"),
    Place("message of an anonymous producer to a topic", relays("news", "topic"), P.SEND, "news"),
    Place("message of an anonymous producer to the management node", relays_request, P.MANAGE, MANAGEMENT_ADDRESS),
    Place("producer of the management node", produces(MANAGEMENT_ADDRESS), P.MANAGE, MANAGEMENT_ADDRESS),
    Place("reply address of a request", manages(request(operation="recover")), P.SEND, "answers"),
    Place("reply address of a request creates a queue", manages(request(operation="recover")), P.CREATE_DURABLE_QUEUE, "answers"),
]


def refusals(client: Client) -> list[str]:
    """Return the error conditions that a client got for links and messages."""
    links = [event.error.condition for event in client.events_of(Detached) if event.error is not None]
    states = [event.state for event in client.events_of(Dispositioned)]
    return links + [state.error.condition for state in states if isinstance(state, Rejected) and state.error is not None]


@pytest.mark.parametrize("place", PLACES, ids=[f"{place.name} needs {place.permission.value}" for place in PLACES])
@pytest.mark.parametrize("denies", [False, True], ids=["allowed", "denied"])
@run_async
async def test_a_client_without_the_permission_is_refused(place: Place, denies: bool) -> None:
    served = Served()
    served.engine.queue(Q)
    served.broker.settle()
    permissions = Denies(place.permission, place.address if denies else "nothing")
    served.permissions = permissions
    client = Client(served)
    place.does(client)
    served.settle(client)
    assert refusals(client) == ([UNAUTHORIZED_ACCESS] if denies else [])
    assert {user for user, _, _ in permissions.asked} == {"anonymous"}


@run_async
async def test_a_refused_client_creates_nothing() -> None:
    served = Served()
    served.permissions = Denies(Permission.SEND, "new")
    client = Client(served)
    client.producer("new")
    relays("new")(client)
    served.settle(client)
    assert "new" not in served.engine.addresses
    assert refusals(client) == [UNAUTHORIZED_ACCESS] * 2


@pytest.mark.parametrize("options", [{}, DURABLE, {"capabilities": SHARED}], ids=["subscriber", "durable", "shared"])
@run_async
async def test_no_wildcard_leads_to_messages_of_an_address_that_the_client_may_not_consume(options: dict[str, Any]) -> None:
    served = Served()
    of_readers = {
        each: frozenset({"anybody"}) for each in (P.CONSUME, P.CREATE_ADDRESS, P.CREATE_DURABLE_QUEUE, P.CREATE_NON_DURABLE_QUEUE)
    }
    secret = AccessRule("news.secret", {P.CONSUME: frozenset({"board"})})
    served.permissions = AccessRules([AccessRule("#", of_readers), secret], UserRoles({"anybody": ["anonymous"]}))
    client = Client(served)
    for number, address in enumerate(("news.*", "#", "*.secret", "news.secret", "sport.*")):
        chosen = {"capabilities": TOPIC, **options}
        client.session.attach_receiver(f"name{number}", Source(address, **chosen), Target())
    served.settle(client)
    assert refusals(client) == [UNAUTHORIZED_ACCESS] * 4
    assert {queue.address for queue in served.engine.addresses.subscriptions.values()} == {"sport.*"}


@pytest.mark.parametrize(("does", "permission"), [(produces(None, dynamic=True), P.SEND), (consumes(None, dynamic=True), P.CONSUME)])
@run_async
async def test_temporary_queue_of_refused_link_is_deleted_even_if_client_is_lost(
    does: Callable[[Client], None], permission: Permission
) -> None:
    served = Served()
    permissions = served.permissions = Denies(permission, TEMPORARY)
    client = Client(served)
    does(client)
    client.say()
    client.connection.connection_lost(None)
    served.broker.settle()
    assert permission in {asked for _, asked, _ in permissions.asked}
    assert [name for name in served.engine.addresses.anycast if name.startswith(TEMPORARY_PREFIX)] == []


@pytest.mark.parametrize(
    "does",
    [consumes("news", TOPIC), consumes("news", SHARED), consumes(None, TOPIC, dynamic=True)],
    ids=["subscriber", "shared subscriber", "temporary topic"],
)
@run_async
async def test_non_durable_queue_is_deleted_if_its_consumer_cannot_be_attached(
    does: Callable[[Client], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served()

    def refuse(*_: object) -> None:
        raise ResourceLimit("no more consumers")

    monkeypatch.setattr(served.engine, "attach", refuse)
    client = Client(served)
    does(client)
    served.settle(client)
    assert len(refusals(client)) == 1
    assert not served.engine.addresses.subscriptions


@run_async
async def test_permissions_of_a_producer_with_a_fixed_address_are_checked_at_its_attach() -> None:
    served = Served()
    permissions = served.permissions = Denies(Permission.SEND, "other")
    client = Client(served)
    link = client.producer("q")
    asked = len(permissions.asked)
    for _ in range(10):
        link.send(message_bytes("x"))
    served.settle(client)
    assert len(permissions.asked) == asked
    assert served.engine.queue("q").held_messages == 10


def test_without_restrictions_everything_is_allowed() -> None:
    for permission in Permission:
        AllowAll().authorize("", permission, "any")


def test_a_refusal_names_user_permission_and_address() -> None:
    assert str(Unauthorized("ann", Permission.SEND, "q")) == "user 'ann' has no permission 'send' on address 'q'"
    assert str(Unauthorized("", Permission.BROWSE, "q")) == "an anonymous client has no permission 'browse' on address 'q'"


# -- actions of administrators -------------------------------------------------------------------------------------------


class AdminPlace(NamedTuple):
    action: str
    arguments: dict[str, Any]
    needs: list[tuple[Permission, str]]


class DeniedAdministrator:
    """An administrator without one permission."""

    name = "ann"

    def __init__(self, denied: tuple[Permission, str]) -> None:
        self._denies = Denies(*denied)

    def authorize(self, permission: Permission, address: str) -> None:
        self._denies.authorize(self.name, permission, address)

    @property
    def asked(self) -> list[tuple[str, Permission, str]]:
        return self._denies.asked


ADMIN_PLACES = [
    AdminPlace("queues/create", {"name": "new"}, [(P.CREATE_ADDRESS, "new"), (P.CREATE_DURABLE_QUEUE, "new")]),
    AdminPlace("queues/delete", {"name": Q}, [(P.DELETE_DURABLE_QUEUE, Q), (P.DELETE_ADDRESS, Q)]),
    AdminPlace("queues/purge", {"name": Q}, [(P.EDIT, Q)]),
    AdminPlace(
        "queues/move", {"name": Q, "to": "new"},
        [(P.EDIT, Q), (P.SEND, "new"), (P.CREATE_ADDRESS, "new"), (P.CREATE_DURABLE_QUEUE, "new")],
    ),
    AdminPlace("queues/move", {"name": Q, "to": "DLQ"}, [(P.EDIT, Q), (P.SEND, "DLQ")]),
    AdminPlace("queues/purge", {"name": "ann.sub"}, [(P.EDIT, "news")]),
    AdminPlace("dead-letters/return", {}, [(P.EDIT, "DLQ")]),
    AdminPlace("subscriptions/delete", {"name": "ann.sub"}, [(P.DELETE_DURABLE_QUEUE, "news")]),
    AdminPlace(
        "subscriptions/create", {"name": "new", "topic": "new", "client_id": "ann"},
        [(P.CREATE_ADDRESS, "new"), (P.CREATE_DURABLE_QUEUE, "new")],
    ),
    AdminPlace("subscriptions/create", {"name": "new", "topic": "news", "client_id": "ann"}, [(P.CREATE_DURABLE_QUEUE, "news")]),
    AdminPlace("connections/close", {"id": "127.0.0.1:1"}, [(P.MANAGE, MANAGEMENT_ADDRESS)]),
    AdminPlace("branches/commit", {"xid": "7:67:62"}, [(P.MANAGE, MANAGEMENT_ADDRESS)]),
    AdminPlace("branches/rollback", {"xid": "7:67:62"}, [(P.MANAGE, MANAGEMENT_ADDRESS)]),
    AdminPlace("branches/forget", {"xid": "7:67:62"}, [(P.MANAGE, MANAGEMENT_ADDRESS)]),
    AdminPlace("ingress/reset", {}, [(P.MANAGE, MANAGEMENT_ADDRESS)]),
    AdminPlace("messages/send", {"to": Q}, [(P.SEND, Q)]),
    AdminPlace("messages/send", {"to": "new"}, [(P.SEND, "new"), (P.CREATE_ADDRESS, "new"), (P.CREATE_DURABLE_QUEUE, "new")]),
]  # fmt: skip


def administered() -> Any:
    """Return the part of a node that actions use, over a broker with a queue, a subscription and a queue of dead letters."""
    served = Served()
    served.engine.queue(Q)
    served.engine.queue("DLQ")
    served.engine.create_queue("ann.sub", "news", Routing.MULTICAST, subscription="sub")
    served.broker.settle()
    return SimpleNamespace(
        engine=served.engine, serving=True, trouble="", asked=[],
        settings=SimpleNamespace(broker=SimpleNamespace(dead_letter_address="DLQ")),
    )  # fmt: skip


@pytest.mark.parametrize("place", ADMIN_PLACES, ids=[f"{place.action} {place.arguments}" for place in ADMIN_PLACES])
def test_an_action_is_refused_without_each_of_its_permissions(place: AdminPlace) -> None:
    assert place.needs
    for denied in place.needs:
        node, administrator = administered(), DeniedAdministrator(denied)
        before = set(node.engine.addresses.queues)
        with pytest.raises(Unauthorized):
            asyncio.run(_act(node, administrator, place))
        assert administrator.asked == [("ann", *need) for need in place.needs[: place.needs.index(denied) + 1]]
        assert set(node.engine.addresses.queues) == before


def _act(node: Any, principal: Any, place: AdminPlace) -> Awaitable[Any]:
    return act(node, principal, place.action, place.arguments)


@pytest.mark.parametrize("place", ADMIN_PLACES, ids=[f"{place.action} {place.arguments}" for place in ADMIN_PLACES])
def test_the_role_of_an_action_has_its_permissions(place: AdminPlace) -> None:
    assert {permission for permission, _ in place.needs} <= ROLE_PERMISSIONS[ACTIONS[place.action].role]


def test_permission_table_covers_every_admin_action() -> None:
    assert {place.action for place in ADMIN_PLACES} == set(ACTIONS)


def test_permissions_page_lists_each_operation_with_its_permissions() -> None:
    needs: dict[str, set[str]] = {}
    for place in PLACES:
        needs.setdefault(place.name, set()).add(place.permission.value)
    for action, _, needed in ADMIN_PLACES:
        needs.setdefault(f"`{action}`", set()).update(permission.value for permission, _ in needed)
    rows = re.findall(r"^\| (.+) \| (`.+`) \|$", PAGE.read_text(), re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", permissions)) for name, permissions in rows} == needs


@run_async
async def test_the_coordinator_and_an_attach_without_an_address_need_no_permission() -> None:
    served = Served()
    permissions = served.permissions = Denies(Permission.SEND, "nothing")
    client = Client(served)
    client.session.attach_sender("coordinator", Source(), Coordinator())
    client.session.attach_sender("relay", Source(), Target())
    served.settle(client)
    assert (refusals(client), permissions.asked) == ([], [])
