"""A repeated send is recognised by the user, the container id and the message id: no user can anticipate the messages of another one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.performatives import ACCEPTED
from bascule.amqp.sasl import AnonymousClient, AnonymousServer, ExternalClient, ExternalServer, SaslClient, SaslServer
from bascule.jms.message import decode_message
from bascule.server.listener_tls import TlsPeer
from bascule.testing.broker import message_bytes
from tests.unit.server.served import Client, Served, run_async

#: The message id of the client whose container id is "c", as a counter gives it.
ID = "ID:c-58"


class Logins(Served):
    """A broker whose next client is ``user``; "" without a login."""

    def __init__(self) -> None:
        super().__init__()
        self.user = ""

    def sasl(self, tls: TlsPeer, peer: str) -> SaslServer:
        return SaslServer({"EXTERNAL": partial(ExternalServer, self.user)} if self.user else {"ANONYMOUS": AnonymousServer})

    def client(self, user: str, container: str = "c") -> Client:
        self.user = user
        return Client(self, container, sasl=SaslClient([ExternalClient() if user else AnonymousClient()]))

    def sends(self, user: str, content: str, *, container: str = "c", **options: Any) -> None:
        """Send as a user on a connection of its own, and check the answer."""
        client = self.client(user, container)
        link = client.producer("q")
        link.send(message_bytes(content, message_id=ID, **options))
        self.settle(client)
        (answer,) = client.events_of(Dispositioned)
        assert answer.state == ACCEPTED
        client.connection.connection_lost(None)

    def stored(self) -> list[Any]:
        client = self.client("ann", "reader")
        link = client.consumer("q", 10)
        return [decode_message(event.payload).body for event in client.events_of(Transferred) if event.link is link]


@pytest.mark.parametrize("stranger", ["bob", ""])
@run_async
async def test_user_with_container_id_and_message_id_of_another_user_does_not_keep_its_message_out(stranger: str) -> None:
    served = Logins()
    served.sends(stranger, "of the stranger", ttl_ms=60_000)
    served.sends("ann", "of ann")
    assert served.stored() == ["of the stranger", "of ann"]
    assert served.engine.counters.duplicates == 0


@pytest.mark.parametrize("user", ["ann", ""])
@run_async
async def test_send_that_its_user_repeats_on_another_connection_is_stored_once_also_after_a_restart(user: str) -> None:
    served = Logins()
    served.sends(user, "first")
    served.sends(user, "again")
    served.broker.start()
    served.sends(user, "after the restart")
    assert served.stored() == ["first"]


@pytest.mark.parametrize("container", ["3 ann c", "c 3 ann", "c 3 ann ", "ann c"])
@run_async
async def test_client_without_a_login_does_not_become_a_user_by_its_container_id(container: str) -> None:
    served = Logins()
    served.sends("", "of the stranger", container=container)
    served.sends("ann", "of ann")
    assert served.stored() == ["of the stranger", "of ann"]
