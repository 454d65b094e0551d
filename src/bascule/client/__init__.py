"""JMS for Python: the simplified API of Jakarta Messaging 3.1, blocking and for asyncio.

    with connect("failover:(amqp://127.0.0.1:5672)") as context:
        context.send(Queue("orders"), Message("order 1", properties={"region": "EU"}))
        for message in context.consumer(Queue("orders")).messages(timeout_s=1):
            print(message.body)

The client works with Bascule and with any broker that supports JMS over AMQP 1.0. See docs/guides/python-client.md.
"""

from bascule.amqp.types import Byte, Char, Float, Int, Short
from bascule.client.aio import AsyncConsumer, AsyncContext, AsyncProducer
from bascule.client.blocking import Consumer, Context, Producer
from bascule.client.destination import Destination, Queue, TemporaryQueue, TemporaryTopic, Topic
from bascule.client.errors import (
    ConnectionLost,
    IllegalState,
    InvalidClientId,
    InvalidDestination,
    InvalidSelector,
    MessageRefused,
    Refused,
    SecurityDenied,
    TimedOut,
    TransactionError,
    TransactionInDoubt,
    TransactionRolledBack,
)
from bascule.client.factory import ConnectionFactory, connect, connect_async
from bascule.client.message import Long, Message
from bascule.client.session_links import Acknowledge

__all__ = [
    "Acknowledge",
    "AsyncConsumer",
    "AsyncContext",
    "AsyncProducer",
    "Byte",
    "Char",
    "ConnectionFactory",
    "ConnectionLost",
    "Consumer",
    "Context",
    "Destination",
    "Float",
    "IllegalState",
    "Int",
    "InvalidClientId",
    "InvalidDestination",
    "InvalidSelector",
    "Long",
    "Message",
    "MessageRefused",
    "Producer",
    "Queue",
    "Refused",
    "SecurityDenied",
    "Short",
    "TemporaryQueue",
    "TemporaryTopic",
    "TimedOut",
    "Topic",
    "TransactionError",
    "TransactionInDoubt",
    "TransactionRolledBack",
    "connect",
    "connect_async",
]
