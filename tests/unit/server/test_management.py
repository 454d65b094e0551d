"""Answers about branches contain nothing that another broker may have changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.performatives import Rejected
from bascule.amqp.types import Int
from bascule.broker.policy import Policy
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.user_limits import LimitRules, UserResource
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.server import management
from bascule.testing.broker import BrokerInMemory
from bascule.xa.errors import Code
from tests.unit.server.served import Client, Served, run_async

FIELDS = {"type": management.TYPE, "formatId": Int(7), "gtrid": "67", "bqual": "62"}
ASKED = [
    ("recover", {}, 0),
    ("commit", {}, Code.XAER_NOTA),
    ("rollback", {}, Code.XAER_NOTA),
    ("forget", {}, Code.XAER_NOTA),
    ("prepare", {"txnId": "31"}, Code.XA_RBCOMMFAIL),
    ("commit", {"txnId": "31"}, Code.XA_RBCOMMFAIL),
]


@pytest.mark.parametrize(
    ("given", "correlation_id"), [({"correlation_id": "asked", "message_id": "ID:1"}, "asked"), ({"message_id": "ID:1"}, "ID:1")]
)
@run_async
async def test_answer_is_correlated_with_its_request(given: dict[str, str], correlation_id: str) -> None:
    served = Served()
    client = Client(served)
    client.consumer("answers", credit=1)
    request = JmsMessage(
        destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties={**FIELDS, "operation": "recover"}, **given
    )
    client.producer(MANAGEMENT_ADDRESS).send(encode_message(request), settled=True)
    served.settle(client)
    (event,) = client.events_of(Transferred)
    assert decode_message(event.payload).correlation_id == correlation_id


def answers(client: Client) -> list[Any]:
    return [decode_message(event.payload).properties["xaCode"] for event in client.events_of(Transferred)]


@pytest.mark.parametrize(("operation", "more", "code"), ASKED, ids=[f"{operation} {more}" for operation, more, _ in ASKED])
@run_async
async def test_answers_from_memory_wait_until_a_later_record_is_stored(operation: str, more: dict[str, str], code: int) -> None:
    served = Served()
    client = Client(served)
    client.consumer("answers", credit=10)
    producer = client.producer(MANAGEMENT_ADDRESS)
    request = JmsMessage(
        destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties={**FIELDS, "operation": operation, **more}
    )
    producer.send(encode_message(request), settled=True)
    client.run()
    served.broker.flush()
    client.run()
    assert answers(client) == []  # never, if another broker has the journal: Kafka confirms no more records of this broker
    served.settle(client)
    assert answers(client) == [code]


def recover(reply_to: str) -> bytes:
    properties = {**FIELDS, "operation": "recover"}
    return encode_message(JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to=reply_to, body_kind="message", properties=properties))


@run_async
async def test_queues_created_for_answers_count_for_the_requesting_user() -> None:
    served = Served(BrokerInMemory(policy=Policy(user_limits=LimitRules({UserResource.QUEUES: 2}))))
    client = Client(served)
    producer = client.producer(MANAGEMENT_ADDRESS)
    for number in range(5):
        producer.send(recover(f"answers-{number}"), settled=True)
        served.settle(client)
    assert list(served.engine.addresses.anycast) == ["answers-0", "answers-1"]
    assert served.contained == []


@run_async
async def test_an_answer_is_routed_like_other_messages() -> None:
    served = Served()
    client = Client(served)
    client.consumer("answers", credit=10)
    client.producer(MANAGEMENT_ADDRESS).send(recover("queue://answers"), settled=True)
    served.settle(client)
    assert answers(client) == [0]
    assert list(served.engine.addresses.anycast) == ["answers"]


@pytest.mark.parametrize("reply_to", [MANAGEMENT_ADDRESS, f"queue://{MANAGEMENT_ADDRESS}", "", "queue://", "r" * 1001])
@run_async
async def test_an_undeliverable_answer_creates_no_queue(reply_to: str) -> None:
    served = Served()
    client = Client(served)
    client.producer(MANAGEMENT_ADDRESS).send(recover(reply_to), settled=True)
    served.settle(client)
    assert list(served.engine.addresses.anycast) == []
    assert served.contained == []


@pytest.mark.parametrize("since", [True, "7"])
@run_async
async def test_management_request_with_invalid_since_position_is_refused(since: Any) -> None:
    served = Served()
    client = Client(served)
    client.consumer("answers", credit=1)
    properties = {**FIELDS, "operation": "commit", "since": since}
    request = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties=properties)
    client.producer(MANAGEMENT_ADDRESS).send(encode_message(request), settled=True)
    served.settle(client)
    (event,) = client.events_of(Transferred)
    said = decode_message(event.payload).properties
    assert said["statusCode"] == 400
    assert f"since {since!r} must be the position from an earlier response" in said["statusDescription"]


@pytest.mark.parametrize(
    "long",
    [
        {"operation": "rollback", "txnId": "31" * 10_000}, {"operation": "prepare", "txnId": "31", "joined": "32" * 10_000},
        {"operation": "suspend", "txnId": "31" * 10_000}, {"operation": "commit", "formatId": "7" * 10_000},
        {"operation": "commit", "gtrid": "g" * 10_000}, {"operation": "o" * 10_000}, {"operation": "recover", "since": "7" * 10_000},
    ],
    ids=lambda long: " ".join(long),
)  # fmt: skip
@run_async
async def test_answer_does_not_repeat_a_long_value_of_its_request(long: dict[str, str]) -> None:
    served = Served()
    client = Client(served)
    client.consumer("answers", credit=10)
    request = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties={**FIELDS, **long})
    client.producer(MANAGEMENT_ADDRESS).send(encode_message(request), settled=True)
    served.settle(client)
    (event,) = client.events_of(Transferred)
    assert 0 < len(str(decode_message(event.payload).properties["statusDescription"])) < 500


@run_async
async def test_too_large_request_is_rejected_before_it_is_decoded_and_its_link_continues() -> None:
    served = Served()
    client = Client(served)
    client.consumer("answers", credit=1)
    producer = client.producer(MANAGEMENT_ADDRESS)
    large = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="text", body="x" * management.REQUEST_SIZE_BYTES_MAX)
    producer.send(encode_message(large))
    served.settle(client)
    (answer,) = client.events_of(Dispositioned)
    assert isinstance(answer.state, Rejected)
    assert f"at most {management.REQUEST_SIZE_BYTES_MAX} are allowed" in str(answer.state.error)
    producer.send(recover("answers"), settled=True)
    served.settle(client)
    assert answers(client) == [0]
