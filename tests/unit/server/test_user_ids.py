"""``broker.validated_user``: the user that a message names is the user who has sent it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bascule.amqp.errors import UNAUTHORIZED_ACCESS
from bascule.amqp.events import Detached, Dispositioned, Transferred
from bascule.amqp.performatives import (
    Accepted,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Rejected,
    Source,
    Target,
    TransactionalState,
)
from bascule.amqp.sasl import AnonymousClient, AnonymousServer, ExternalClient, ExternalServer, SaslClient, SaslServer
from bascule.amqp.transactions import encode_control
from bascule.broker.administration import move
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.jms.record import kafka_headers
from bascule.server.management import TYPE
from tests.unit.server import served as serving
from tests.unit.server.served import QUEUE, Served, run_async

MODES = ("off", "check", "require", "set")
EXACT = 200


def message(user: str | None, to: str = "q", **fields: Any) -> bytes:
    return encode_message(JmsMessage(user_id=user, destination=to, destination_kind="queue", body_kind="text", body="x", **fields))


class Broker(Served):
    """A broker whose clients log in as ann."""

    def __init__(self, mode: str, login: str | None = "ann") -> None:
        super().__init__()
        self.validated_user = mode
        self.login = login

    def sasl(self, certified: str | None, peer: str) -> SaslServer:
        if self.login is None:
            return SaslServer({"ANONYMOUS": AnonymousServer})
        return SaslServer({"EXTERNAL": partial(ExternalServer, self.login)})


class Client(serving.Client):
    """A client that logs in as the broker says."""

    def __init__(self, served: Broker) -> None:
        super().__init__(served, sasl=SaslClient([ExternalClient() if served.login else AnonymousClient()]))

    def outcome_of(self, body: bytes, to: str | None = "q", **options: Any) -> Any:
        """Send a message, and return the outcome."""
        link = self.session.attach_sender(f"to {to} {len(self.events)}", Source(), Target(to, capabilities=QUEUE))
        self.served.settle(self)
        link.send(body, **options)
        self.served.settle(self)
        return self.events_of(Dispositioned)[-1].state

    def stored(self, address: str = "q") -> list[str | None]:
        """Return the users that the messages of a queue name, which a consumer gets."""
        link = self.consumer(address, 100, name=f"from {address} {len(self.events)}")
        got = [event.payload for event in self.events_of(Transferred) if event.link is link]
        return [decode_message(payload).user_id for payload in got]


def users_of(mode: str, login: str | None, *named: str | None) -> list[str | None]:
    """Send messages that name users; return the users in the accepted messages, and "refused" for the others."""
    client = Client(Broker(mode, login))
    found: list[str | None] = []
    for user in named:
        outcome = client.outcome_of(message(user))
        if isinstance(outcome, Rejected):
            assert outcome.error.condition == UNAUTHORIZED_ACCESS
            found.append("refused")
        else:
            found += client.stored()[-1:]
            client = Client(Broker(mode, login))
    return found


@pytest.mark.parametrize(
    ("mode", "login", "expected"),
    [
        ("off", "ann", ["ann", "mallory", None]),
        ("check", "ann", ["ann", "refused", None]),
        ("require", "ann", ["ann", "refused", "refused"]),
        ("set", "ann", ["ann", "ann", "ann"]),
        ("off", None, ["ann", "mallory", None]),
        ("check", None, ["refused", "refused", None]),
        ("require", None, ["refused", "refused", "refused"]),
        ("set", None, [None, None, None]),
    ],
)
@run_async
async def test_message_names_its_sender_as_the_setting_says(mode: str, login: str | None, expected: list[str | None]) -> None:
    assert users_of(mode, login, "ann", "mallory", None) == expected


@pytest.mark.parametrize("mode", ["check", "require"])
@run_async
async def test_message_that_names_its_sender_keeps_its_bytes(mode: str) -> None:
    client = Client(Broker(mode))
    body = message("ann")
    assert isinstance(client.outcome_of(body), Accepted)
    (kept,) = client.served.engine.queue("q").waiting()
    assert kept.body == body
    assert ("jms.JMSXUserID", b"ann") in kafka_headers(decode_message(kept.body)), "a divert carries the user"


@run_async
async def test_refusal_names_both_users_and_the_setting() -> None:
    outcome = Client(Broker("check")).outcome_of(message("\x1bmallory" * 100))
    assert outcome.error.description.startswith("the message names user '\\x1bmallory\\x1bmallory")
    assert len(outcome.error.description) < 400
    assert outcome.error.description.endswith("but its sender is user 'ann' (broker.validated_user = 'check')")


@pytest.mark.parametrize("mode", MODES)
@run_async
async def test_message_of_an_anonymous_producer_is_validated(mode: str) -> None:
    client = Client(Broker(mode))
    outcome = client.outcome_of(message("mallory", "relayed"), to=None)
    assert isinstance(outcome, Rejected) is (mode in ("check", "require"))
    assert client.served.engine.addresses.anycast.get("relayed") is None or mode in ("off", "set"), "a refused message creates nothing"
    if mode == "set":
        assert client.stored("relayed") == ["ann"]


@pytest.mark.parametrize("mode", ["check", "require", "set"])
@run_async
async def test_message_in_a_transaction_is_validated(mode: str) -> None:
    client = Client(Broker(mode))
    coordinator = client.session.attach_sender("coordinator", Source(), Coordinator())
    client.served.settle(client)
    coordinator.send(encode_control(Declare()))
    client.served.settle(client)
    declared = client.events_of(Dispositioned)[-1].state
    assert isinstance(declared, Declared)
    outcome = client.outcome_of(message("mallory"), state=TransactionalState(declared.txn_id))
    coordinator.send(encode_control(Discharge(declared.txn_id, fail=False)))
    client.served.settle(client)
    result = client.events_of(Dispositioned)[-1].state
    if mode == "set":
        assert isinstance(result, Accepted)
        assert client.stored() == ["ann"]
    else:
        assert isinstance(outcome, Rejected) or isinstance(outcome.outcome, Rejected)
        assert isinstance(result, Rejected), "the transaction can only be rolled back"
        assert client.stored() == []


@pytest.mark.parametrize("mode", MODES)
@run_async
async def test_request_to_the_management_node_is_validated_and_its_answer_names_nobody(mode: str) -> None:
    client = Client(Broker(mode))
    asked = message("mallory", MANAGEMENT_ADDRESS, reply_to="answers", properties={"type": TYPE, "operation": "recover"})
    asked_right = message("ann", MANAGEMENT_ADDRESS, reply_to="answers", properties={"type": TYPE, "operation": "recover"})
    refused = mode in ("check", "require")
    assert isinstance(client.outcome_of(asked, MANAGEMENT_ADDRESS), Rejected) is refused
    assert isinstance(client.outcome_of(asked_right, MANAGEMENT_ADDRESS), Accepted)
    assert client.stored("answers") == [None] * (1 if refused else 2)


@run_async
async def test_message_that_grows_beyond_the_limit_is_refused() -> None:
    broker = Broker("set")
    client = Client(broker)
    body = message(None)
    broker.max_message_bytes = len(body)
    outcome = client.outcome_of(body)
    assert outcome.error.condition == "amqp:link:message-size-exceeded"
    broker.max_message_bytes = len(body) + EXACT
    assert isinstance(client.outcome_of(body), Accepted)


@run_async
async def test_settled_message_that_names_another_user_detaches_its_link() -> None:
    client = Client(Broker("check"))
    link = client.producer("q")
    link.send(message("mallory"), settled=True)
    client.served.settle(client)
    (detached,) = client.events_of(Detached)
    assert detached.error is not None
    assert detached.error.condition == UNAUTHORIZED_ACCESS


@run_async
async def test_moved_message_and_dead_letter_keep_the_user_who_sent_them() -> None:
    client = Client(Broker("set"))
    engine = client.served.engine
    for _ in range(2):
        client.outcome_of(message("mallory"))
    consumer = client.consumer("q", 1)
    (delivered,) = [event for event in client.events_of(Transferred) if event.link is consumer]
    consumer.settle(delivered.delivery_id, Rejected())
    client.served.settle(client)
    for _ in move(engine, engine.queue("q"), "elsewhere"):
        pass
    client.served.settle(client)
    assert client.stored("elsewhere") == ["ann"]
    assert client.stored(engine.policy.of("q").dead_letter_address) == ["ann"]
