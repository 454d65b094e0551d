"""The opening or refusal of a client's connection."""

from __future__ import annotations

from typing import Any

from bascule.amqp.connection import Connection
from bascule.amqp.errors import CONNECTION_FORCED, INVALID_FIELD, UNAUTHORIZED_ACCESS, AmqpError
from bascule.amqp.events import ConnectionClosed, Opened
from bascule.amqp.performatives import Role
from bascule.amqp.sasl import AnonymousClient, SaslClient
from bascule.amqp.types import Symbol
from bascule.core.access import AccessRules
from bascule.core.destination import Routing
from bascule.core.roles import UserRoles
from tests.support.costs import calls_of
from tests.unit.server.served import Client, Served, Wire, run_async

SOLE_CONNECTION = "sole-connection-for-container"
FAILED = Symbol("amqp:connection-establishment-failed")


class Opening(Client):
    """A client that has sent only its open."""

    def __init__(self, served: Served, container: str = "client", *wanted: str) -> None:
        self.served, self.wire, self.events = served, Wire(), []
        self.connection = served.connection()
        wire: Any = self.wire
        self.connection.connection_made(wire)
        self.amqp = Connection(Role.CLIENT, container_id=container, sasl=SaslClient([AnonymousClient()]))
        self.amqp.open(desired_capabilities=wanted)
        self.run()

    @property
    def offered(self) -> list[str]:
        return [str(each) for each in self._answer.offered_capabilities]

    @property
    def properties(self) -> dict[Any, Any]:
        return dict(self._answer.properties or {})

    @property
    def _answer(self) -> Any:
        (event,) = self.events_of(Opened)
        return event.open

    @property
    def refusal(self) -> AmqpError | None:
        """Return why the broker has closed the connection."""
        return next((event.error for event in self.events_of(ConnectionClosed)), None)


@run_async
async def test_open_reports_product_and_capabilities_of_the_broker() -> None:
    client = Opening(Served())
    assert client.offered == [SOLE_CONNECTION, "ANONYMOUS-RELAY", "DELAYED_DELIVERY", "SHARED-SUBS"]
    assert client.properties[Symbol("product")] == "Bascule"
    assert FAILED not in client.properties
    assert client.refusal is None


@run_async
async def test_connected_client_id_is_refused_with_the_invalid_field() -> None:
    served = Served()
    first, second = Opening(served, "shop", SOLE_CONNECTION), Opening(served, "shop", SOLE_CONNECTION)
    assert second.properties[FAILED] is True
    assert "SHARED-SUBS" in second.offered
    assert second.refusal is not None
    assert (second.refusal.condition, second.refusal.info) == (INVALID_FIELD, {Symbol("invalid-field"): Symbol("container-id")})
    assert second.refusal.description == "client id 'shop' is already connected"
    assert first.refusal is None


@run_async
async def test_client_id_may_be_connected_twice_without_the_sole_connection_capability() -> None:
    served = Served()
    clients = [Opening(served, "shop", SOLE_CONNECTION), Opening(served, "shop"), Opening(served, "other", SOLE_CONNECTION)]
    assert [client.refusal for client in clients] == [None] * 3


@run_async
async def test_client_id_is_free_when_its_connection_is_closed() -> None:
    served = Served()
    first = Opening(served, "shop", SOLE_CONNECTION)
    first.amqp.close()
    first.run()
    assert Opening(served, "shop", SOLE_CONNECTION).refusal is None


@run_async
async def test_client_id_of_a_closed_connection_with_an_open_socket_is_free() -> None:
    served = Served()
    closed = [Opening(served, "shop") for _ in range(3)]
    for client in closed:
        client.amqp.close()
        client.run()
    assert Opening(served, "shop", SOLE_CONNECTION).refusal is None
    assert Opening(served, "shop", SOLE_CONNECTION).refusal is not None
    for client in closed:
        client.connection.connection_lost(None)
    assert Opening(served, "shop", SOLE_CONNECTION).refusal is not None


@run_async
async def test_client_without_id_opens_while_other_connections_have_not_opened() -> None:
    served = Served()
    wire: Any = Wire()
    served.connection().connection_made(wire)
    assert Opening(served, "", SOLE_CONNECTION).refusal is None


@run_async
async def test_cost_of_opening_does_not_depend_on_the_number_of_connections() -> None:
    served = Served()
    few = calls_of(lambda: Opening(served, "first"))
    others = [Opening(served, f"other-{number}") for number in range(100)]
    assert calls_of(lambda: Opening(served, "last")) < few + len(others)


@run_async
async def test_connection_is_refused_with_the_reason_while_the_broker_does_not_serve() -> None:
    served = Served()
    served.reason = "Kafka does not answer"
    client = Opening(served)
    assert client.refusal is not None
    assert (client.refusal.condition, client.refusal.description) == (CONNECTION_FORCED, "Kafka does not answer")


@run_async
async def test_client_gets_the_list_of_failover_brokers() -> None:
    served = Served()
    served.failover = [{"network-host": "b", "port": 5672}]
    others = Opening(served).properties[Symbol("failover-server-list")]
    assert others == [{"network-host": "b", "port": 5672}]
    assert all(isinstance(field, Symbol) for field in others[0])


@run_async
async def test_client_id_with_durable_subscriptions_of_another_user_is_refused_until_they_are_gone() -> None:
    served = Served()
    queue = served.engine.create_queue("shop.news", "news", Routing.MULTICAST, subscription="news", user="ann")
    first = Opening(served, "shop", SOLE_CONNECTION)
    assert first.refusal is None  # without permissions
    served.permissions = AccessRules([], UserRoles({}))
    others = [Opening(served, *wanted) for wanted in (("shop",), ("other", SOLE_CONNECTION))]
    assert [other.refusal for other in others] == [None, None]
    for client in (first, *others):
        client.connection.connection_lost(None)
    refused = Opening(served, "shop", SOLE_CONNECTION)
    assert refused.refusal is not None
    assert refused.refusal.condition == UNAUTHORIZED_ACCESS
    refused.connection.connection_lost(None)
    served.engine.delete_queue(queue)
    assert Opening(served, "shop", SOLE_CONNECTION).refusal is None
