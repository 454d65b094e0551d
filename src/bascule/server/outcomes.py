"""The effect of each AMQP outcome on a message (AMQP 1.0 part 3, section 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bascule.amqp.performatives import Accepted, Modified, Rejected, Released
from bascule.broker.engine import Engine
from bascule.broker.message import BrokerMessage
from bascule.broker.queue import QueueConsumer
from bascule.broker.transactions import LocalTransaction

#: Applies an outcome, or a delivery state without outcome, to a message.
Settle = Callable[[Engine, QueueConsumer, BrokerMessage, Any], None]


def accept(engine: Engine, consumer: QueueConsumer, message: BrokerMessage, state: Any) -> None:  # noqa: ARG001
    """Acknowledge a message."""
    engine.acknowledge(consumer, message)


def accept_in(transaction: LocalTransaction, engine: Engine, consumer: QueueConsumer, message: BrokerMessage, state: Any) -> None:  # noqa: ARG001
    """Keep an acknowledgement until the commit of its transaction."""
    engine.acknowledge_in(transaction, consumer, message)


def _reject(engine: Engine, consumer: QueueConsumer, message: BrokerMessage, state: Any) -> None:  # noqa: ARG001
    engine.reject(consumer, message)


def _release(engine: Engine, consumer: QueueConsumer, message: BrokerMessage, state: Any) -> None:  # noqa: ARG001
    engine.give_back(consumer, message, failed=False)


def _modify(engine: Engine, consumer: QueueConsumer, message: BrokerMessage, state: Modified) -> None:
    if state.undeliverable_here:
        engine.reject(consumer, message)
    else:
        engine.give_back(consumer, message, failed=bool(state.delivery_failed))


def return_failed(engine: Engine, consumer: QueueConsumer, message: BrokerMessage, state: Any) -> None:  # noqa: ARG001
    """Return a message that was settled without an outcome.

    The source's default outcome for JMS clients is modified with a failed delivery.
    """
    engine.give_back(consumer, message, failed=True)


def bare_outcome(state: Any) -> Any:
    """Return an outcome without the parts that the broker ignores.

    It answers each delivery of a range in a frame of its own, and waits for the journal; a peer's outcome may be as long as a frame.
    """
    if type(state) is Modified:
        return Modified(state.delivery_failed, state.undeliverable_here)
    return Rejected() if type(state) is Rejected else state


def returns_messages(settle: Settle, state: Any) -> bool:
    """Return True if messages go back to their queue with this outcome."""
    return settle in (_release, return_failed) or (settle is _modify and not state.undeliverable_here)


#: By type of the delivery state.
OUTCOMES: dict[type, Settle] = {
    Accepted: accept,
    Rejected: _reject,
    Released: _release,
    Modified: _modify,
}
