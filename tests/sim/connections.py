"""Connections of clients to a broker of the simulation, and their links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from bascule.broker.message import BrokerMessage
from bascule.broker.queue import QueueConsumer
from bascule.broker.transactions import LocalTransaction
from bascule.core.errors import BasculeError
from tests.sim.world import Promise

if TYPE_CHECKING:
    from tests.sim.broker import Broker

#: Silence after which a client takes the connection for broken.
SILENCE_MS: Final = 300.0
#: How long a client's output may be delayed on its way. Its connection may be gone by then.
HOLD_UP_MS: Final = 120.0


class ConnectionLost(Exception):
    """Raised when the connection is gone, and with it every answer."""


class Connection:
    """A client's connection, with messages in flight in both directions, in order."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.world = broker.world
        self.name = name
        self.lost: Promise[None] = Promise()
        self.closed_by_broker = False
        self.slowness = 0.0  # how often the client's output is delayed
        self.consumers: list[Port] = []
        self.transactions: dict[bytes, LocalTransaction] = {}
        self._process = broker.process
        self._engine = broker.engine
        self._asked: dict[Promise[Any], None] = {}
        self._up_ms = self._down_ms = 0.0

    def up(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at the broker, after the way there."""
        self._up_ms = max(self._up_ms, self.world.now_ms + self.world.random.random())
        if self.world.chance(self.slowness):
            self.world.note("hold up manager", self.name)
            self._up_ms += self.world.random.random() * HOLD_UP_MS
        self._process.after(self._up_ms - self.world.now_ms, self._at_broker, action, arguments)

    def _at_broker(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.closed_by_broker and self.broker.engine is self._engine and self.broker.serving and self.broker.awake():
            action(*arguments)
            self.broker.dispatch()

    def down(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at the client, after the way there."""
        self._down_ms = max(self._down_ms, self.world.now_ms + self.world.random.random())
        self.world.after(self._down_ms - self.world.now_ms, self._at_client, action, arguments)

    def _at_client(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.lost.done:
            action(*arguments)

    async def ask(self, action: Callable[..., None], *arguments: Any) -> Any:
        """Ask the broker, and wait until it keeps the promise that is the last argument. Raises ConnectionLost."""
        promise: Promise[Any] = Promise()
        if self.lost.done:
            raise ConnectionLost
        self._asked[promise] = None
        self.up(action, *arguments, promise)
        self.world.after(SILENCE_MS, self._still_open, promise)
        try:
            return await promise
        finally:
            self._asked.pop(promise, None)

    def _still_open(self, promise: Promise[Any]) -> None:
        if not promise.done:
            self.drop()

    def drop(self) -> None:
        """Close the client's end, or break the network. The broker's end hears of it later."""
        if not self.lost.done:
            self._forget()
            gone_ms = max(self._up_ms, self.world.now_ms + self.world.random.random() * 20)
            self._process.after(gone_ms - self.world.now_ms, self._gone)

    def _forget(self) -> None:
        self.lost.keep(None)
        for port in self.consumers:
            port.arrived.keep(None)
        for promise in list(self._asked):
            promise.fail(ConnectionLost())

    def close_by_broker(self) -> None:
        """Close the connection because the broker's epoch, or its process, has ended."""
        if not self.closed_by_broker:
            self.closed_by_broker = True
            self.world.after(self.world.random.random() * 3, self._forget)

    def end(self) -> None:
        """End the connection by a broker that continues."""
        self._gone()
        self.world.after(self.world.random.random() * 3, self._forget)

    def _gone(self) -> None:
        if self.closed_by_broker or self.broker.engine is not self._engine:
            return
        self.closed_by_broker = True
        self.broker.connections.pop(self, None)
        for transaction in self.transactions.values():
            self._engine.rollback(transaction)
        for port in self.consumers:
            self._engine.detach(port.consumer, failed=False)
        self.broker.dispatch()

    # The producer's link, as the broker sees it. Tokens are promises of the client.

    def accepted(self, token: Promise[None]) -> None:
        """Tell the client that the message is stored."""
        self.down(token.keep, None)

    def refused(self, token: Promise[None], error: BasculeError) -> None:
        """Tell the client that the message is refused."""
        self.down(token.fail, error)


class Port:
    """A consumer's link. The broker's messages go down the connection, into the client's inbox."""

    def __init__(self, connection: Connection, credit: int) -> None:
        self.connection = connection
        self.credit = credit
        self.inbox: deque[tuple[BrokerMessage, int]] = deque()
        self.arrived: Promise[None] = Promise()
        self.consumer: QueueConsumer

    def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
        """Deliver a message at the broker. Return the credit that is left."""
        self.credit -= 1
        broker = self.connection.broker
        if broker.replaced_unawares:
            broker.on_stale_delivery(message.mid)
        broker.on_delivery(broker.epoch, self.consumer.queue.id, message.mid, delivery_count)
        self.connection.down(self._take, message, delivery_count)
        return self.credit

    def _take(self, message: BrokerMessage, delivery_count: int) -> None:
        self.inbox.append((message, delivery_count))
        arrived, self.arrived = self.arrived, Promise()
        arrived.keep(None)

    def dispatched(self) -> None:
        """Do nothing: no client drains here."""

    def ended(self, error: BasculeError) -> None:
        """Fail: no queue is deleted here while it has consumers."""
        raise AssertionError(error)
