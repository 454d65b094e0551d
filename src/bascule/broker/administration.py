"""What an administrator does with a queue: purge, move, return dead letters, delete.

Long actions are generators: each step is whole in itself (a message is in one queue or in the other, in memory and in the journal), takes
little time, and yields how far the action has come; between steps the shell lets clients have their turn. What arrives after an action
began is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bascule.broker.containment import ErrorKind
from bascule.broker.engine import Engine
from bascule.broker.errors import BodyUnavailable, QueueFull, UnknownAddress
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.message import BrokerMessage
from bascule.broker.order import FRONT, place_of
from bascule.broker.queue import BrokerQueue
from bascule.broker.sending import move_steps
from bascule.broker.transactions import Draft
from bascule.broker.turns import TURN_STEPS, Allowance
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, InvalidInput
from bascule.jms.annotate import (
    DELIVERIES,
    MOVED_AT,
    ORIGINAL_ADDRESS,
    ORIGINAL_EXPIRY,
    ORIGINAL_QUEUE,
    ORIGINAL_ROUTING,
    REASON,
    annotated,
)
from bascule.jms.ids import message_id_text
from bascule.jms.sections import TIME_MAX_MS, message_annotation, property_fields_of
from bascule.jms.selector import Selector

#: The address in the journal of a message that goes to one queue by name: no pattern of a divert matches it.
NOWHERE = "."
#: One step: about a hundredth of a second, and so much in flight to the journal.
STEP_MESSAGES = 250
STEP_BYTES = 8 << 20
#: Steps of dealing with a message, at least.
ACT_STEPS = 40
#: Characters of an annotation text in a list of dead letters. One answer lists up to a thousand dead letters.
TEXT_MAX = 1_000
#: Why a message is left of which the broker could not dispose.
FAILED = "the broker failed; see the broker's log"


class InUse(InvalidInput):
    """The queue has messages or consumers; deleting it needs ``force``."""

    condition = "amqp:resource-locked"
    http_status = 409


@dataclass(slots=True)
class Progress:
    """How far an action has come: messages dealt with, and how many were left where they are, by the reason."""

    done: int = 0
    left: dict[str, int] = field(default_factory=dict)


#: Deals with one message that waits, taking it out of its queue; raises BasculeError, having done nothing, to leave it.
_Act = Callable[[BrokerMessage], None]


def _any_queue(_queue: BrokerQueue) -> None:
    """The caller may return messages to any queue."""


def purge(engine: Engine, queue: BrokerQueue, selector: Selector | None = None) -> Iterator[Progress]:
    """Messages that nobody holds are gone, also those that wait for their time."""

    def act(message: BrokerMessage) -> None:
        engine.gone(queue, message)
        queue.take_out(message)

    return _steps(engine, queue, selector, act)


def move(engine: Engine, queue: BrokerQueue, address: str, selector: Selector | None = None) -> Iterator[Progress]:
    """Messages that wait go to another queue, as if sent there now: diverts of that address see them. What is delayed stays delayed.

    Raises InvalidInput, UnknownAddress, ResourceLimit.
    """
    target = engine.queue(address)
    if target is queue:
        raise InvalidInput(f"source and target are the same queue {address!r}")

    def act(message: BrokerMessage) -> None:
        _check_room(target)
        copy = BrokerMessage(engine.bodies.read(message), message.priority, message.expiry_ms, message.group)
        engine.pass_on(queue, message, copy, address, queue.first_due_ms(message))
        queue.take_out(message)

    return _steps(engine, queue, selector, act)


def return_dead_letters(
    engine: Engine, queue: BrokerQueue, selector: Selector | None = None, check: Callable[[BrokerQueue], None] = _any_queue
) -> Iterator[Progress]:
    """Return dead letters to the queue or subscription that they came from, and to no other.

    Diverts do not see them again: they had the message when it was sent. ``check`` raises a BasculeError for a queue to which the caller
    may return no message.
    """

    def act(message: BrokerMessage) -> None:
        body = engine.bodies.read(message)
        target = _origin(engine, body)
        check(target)
        _check_room(target)
        now_ms = engine.clock()
        expiry_ms = message_annotation(body, ORIGINAL_EXPIRY)
        lives = isinstance(expiry_ms, int) and now_ms < expiry_ms <= TIME_MAX_MS  # any client may have set the annotation
        engine.turns.left -= move_steps(message)
        copy = BrokerMessage(annotated(body, {}), message.priority, int(expiry_ms) if lives else 0, message.group)
        draft = Draft(copy, NOWHERE, target.routing, engine.bodies.read(copy), message.durable, "")
        engine.put_into(queue, message, draft, target)
        queue.take_out(message)

    return _steps(engine, queue, selector, act)


def delete(engine: Engine, queue: BrokerQueue, *, force: bool = False) -> None:
    """The queue and what it holds are gone. Raises InUse, unless forced, while it has messages or consumers."""
    messages = queue.held_messages + queue.incoming
    if not force and (queue.consumers or messages):
        raise InUse(f"queue {queue.name!r} has {messages} messages and {len(queue.consumers)} consumers; use force to delete it")
    engine.delete_queue(queue)


def create(engine: Engine, name: str) -> BrokerQueue:
    """The queue of a name, which stays from now on though nobody uses it. Raises ResourceLimit, InvalidInput."""
    if name in engine.addresses.anycast:
        raise InvalidInput(f"queue {name!r} already exists")
    return engine.create_queue(name, name, Routing.ANYCAST)


def dead_letter(engine: Engine, message: BrokerMessage) -> dict[str, Any]:
    """What a dead letter says of itself, by plain names; what it does not say, or cannot be read, is None.

    Any client may send a message with these annotations.
    """
    try:
        body = engine.bodies.read(message)
    except BodyUnavailable:
        body = b""

    def said(name: str) -> Any:
        try:
            return _plain(message_annotation(body, name))
        except BasculeError:
            return None

    try:
        identity = property_fields_of(body)[0]
    except BasculeError:
        identity = None
    message_id = None if identity is None else message_id_text(identity)
    return {
        "message_id": _plain(message_id), "address": said(ORIGINAL_ADDRESS), "queue": said(ORIGINAL_QUEUE),
        "routing": {0: "anycast", 1: "multicast"}.get(said(ORIGINAL_ROUTING)), "reason": said(REASON), "deliveries": said(DELIVERIES),
        "moved_at_ms": said(MOVED_AT), "bytes": message.size_bytes,
    }  # fmt: skip


def _plain(value: Any) -> str | int | None:
    """A value as JSON holds it, its text cut off where it is long."""
    if value is None:
        return None
    if isinstance(value, int):
        return int(value)
    text = value if isinstance(value, str) else repr(value)
    return text[:TEXT_MAX].encode(errors="backslashreplace").decode()


# -- how ---------------------------------------------------------------------------------------------------------------


def _steps(engine: Engine, queue: BrokerQueue, selector: Selector | None, act: _Act) -> Iterator[Progress]:
    """Go through the messages that wait now, in their order, and then through those that wait for their time."""
    progress = Progress()
    end = engine.next_position
    step_messages = STEP_MESSAGES
    if selector is not None:
        step_messages = max(1, min(STEP_MESSAGES, TURN_STEPS // (EVALUATION_STEPS + selector.steps)))
    for after in (queue.after, queue.delayed.after):
        place = FRONT
        while not queue.deleted and (waiting := after(place, step_messages)):
            size_bytes, steps = 0, Allowance()
            for message in waiting:
                place = place_of(message)
                if message.position >= end:
                    continue  # it came later
                if selector is None or engine.matches(selector, message, steps):
                    size_bytes += message.size_bytes
                    _deal_with(engine, queue, message, act, progress, steps)
                if size_bytes > STEP_BYTES or steps.left <= 0:
                    break
            yield progress


def _deal_with(engine: Engine, queue: BrokerQueue, message: BrokerMessage, act: _Act, progress: Progress, steps: Allowance) -> None:
    """Act on a message, and count what has become of it."""
    turns = engine.turns
    before = turns.left
    try:
        act(message)
        progress.done += 1
    except BasculeError as error:
        progress.left[str(error)] = progress.left.get(str(error), 0) + 1
    except Exception as error:
        engine.journaling.errors.contain(ErrorKind.MOVE, error, queue=queue.name, mid=message.mid)
        progress.left[FAILED] = progress.left.get(FAILED, 0) + 1
    steps.left -= ACT_STEPS + queue.ready.take_steps + before - turns.left


def _check_room(queue: BrokerQueue) -> None:
    if queue.full():
        raise QueueFull(f"queue {queue.name!r} is full")


def _origin(engine: Engine, body: bytes) -> BrokerQueue:
    """Where a dead letter came from. Raises UnknownAddress, ResourceLimit."""
    address, name = message_annotation(body, ORIGINAL_ADDRESS), message_annotation(body, ORIGINAL_QUEUE)
    if not isinstance(address, str) or not isinstance(name, str):
        raise UnknownAddress("a client sent the message to this queue; the message has no original address")
    if message_annotation(body, ORIGINAL_ROUTING) != Routing.MULTICAST:
        return engine.queue(address)
    subscription = engine.addresses.subscriptions.get(name)
    if subscription is None:
        raise UnknownAddress(f"subscription {name!r} no longer exists")
    return subscription
