"""Actions of an administrator on a queue: purge, move, return dead letters, delete.

Long actions are generators. Each step is complete in itself (a message is in one queue or in the other, in memory and in the journal),
takes little time, and yields the progress of the action. The shell serves clients between the steps. Messages that arrive, or whose delay
ends, after an action began are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bascule.broker.containment import ErrorKind
from bascule.broker.engine import Engine
from bascule.broker.errors import BodyUnavailable, QueueFull, UnknownAddress
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.message import BrokerMessage
from bascule.broker.order import FRONT, QueuePlace, place_of
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
from bascule.jms.sections import TIME_MAX_MS, message_annotations, property_fields_of
from bascule.jms.selector import Selector

#: The journal address of a message that goes to one queue by name. No pattern of a divert matches this address.
NOWHERE = "."
#: Limits of one step: about 10 ms, and this many bytes in flight to the journal.
STEP_MESSAGES = 250
STEP_BYTES = 8 << 20
#: Least steps to process one message.
ACT_STEPS = 40
#: Maximum number of characters of a text in the description of a dead letter: one answer lists up to a thousand dead letters.
TEXT_MAX = 1_000
#: Reasons that an answer lists, because a client can give each of its messages another one, for example another original address.
REASONS_MAX: Final = 100
#: The reason reported for messages whose own reason is not listed.
OTHER: Final = "other reasons"
#: The reason reported for a message that was left because of an unexpected error.
FAILED = "the broker failed; see the broker's log"


#: The annotations by which a dead letter is returned, and those that its description needs.
_ORIGIN: Final = (ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, ORIGINAL_EXPIRY)
_DESCRIBED: Final = (ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, REASON, DELIVERIES, MOVED_AT)
#: The reason reported for a chosen message that neither waits nor is delayed any more.
GONE: Final = "not in the queue any more, or held by a consumer"


class ChosenMessage(NamedTuple):
    """The place of a message that an administrator has chosen."""

    delayed: bool
    place: QueuePlace

    def found_in(self, queue: BrokerQueue) -> BrokerMessage | None:
        """Return the message at this place of a queue; None if there is none."""
        priority, position = self.place
        after = queue.delayed.after if self.delayed else queue.after
        found = after(QueuePlace(priority, position - 1), 1)
        return found[0] if found and place_of(found[0]) == self.place else None


#: The messages that an action concerns: those that match a selector, those that were chosen, or all (None).
Choice = Selector | tuple[ChosenMessage, ...] | None


class InUse(InvalidInput):
    """Raised if a queue with messages or consumers is deleted without ``force``."""

    condition = "amqp:resource-locked"
    http_status = 409


@dataclass(slots=True)
class Progress:
    """The progress of an action: the number of processed messages, and of messages left in place, by reason."""

    done: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def leave(self, reason: str) -> None:
        """Count a message that is left in place."""
        if reason not in self.left and len(self.left) >= REASONS_MAX:
            reason = OTHER
        self.left[reason] = self.left.get(reason, 0) + 1


#: Processes one waiting message and takes it out of its queue. Raises BasculeError, without any change, to leave the message.
_Act = Callable[[BrokerMessage], None]


def _any_queue(_queue: BrokerQueue) -> None:
    """Allow the caller to return messages to any queue."""


def purge(engine: Engine, queue: BrokerQueue, choice: Choice = None) -> Iterator[Progress]:
    """Remove all messages that nobody holds, delayed messages included."""

    def act(message: BrokerMessage) -> None:
        engine.gone(queue, message)
        queue.take_out(message)

    return _steps(engine, queue, choice, act)


def move(engine: Engine, queue: BrokerQueue, address: str, choice: Choice = None) -> Iterator[Progress]:
    """Move waiting messages to another queue as if they were sent there now: diverts of that address see them. Delays are kept.

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

    return _steps(engine, queue, choice, act)


def return_dead_letters(
    engine: Engine, queue: BrokerQueue, choice: Choice = None, check: Callable[[BrokerQueue], None] = _any_queue
) -> Iterator[Progress]:
    """Return dead letters to the queue or subscription that they came from.

    Diverts do not see the messages again: they had each message when it was sent. ``check`` raises a BasculeError for a queue to which the
    caller may not return messages.
    """

    def act(message: BrokerMessage) -> None:
        body = engine.bodies.read(message)
        engine.turns.left -= 2 * move_steps(message)  # the annotations are read, and left out of the copy
        origin = message_annotations(body, _ORIGIN)
        target = _origin(engine, origin)
        check(target)
        _check_room(target)
        now_ms = engine.clock()
        expiry_ms: Any = origin.get(ORIGINAL_EXPIRY)
        lives = isinstance(expiry_ms, int) and now_ms < expiry_ms <= TIME_MAX_MS  # any client may have set the annotation
        copy = BrokerMessage(annotated(body, {}), message.priority, int(expiry_ms) if lives else 0, message.group)
        draft = Draft(copy, NOWHERE, target.routing, engine.bodies.read(copy), message.durable, "")
        engine.put_into(queue, message, draft, target)
        queue.take_out(message)

    return _steps(engine, queue, choice, act)


def delete(engine: Engine, queue: BrokerQueue, *, force: bool = False) -> None:
    """Delete a queue with its messages. Raises InUse if the queue has messages or consumers, unless ``force`` is true."""
    messages = queue.held_messages + queue.incoming
    if not force and (queue.consumers or messages):
        raise InUse(f"queue {queue.name!r} has {messages} messages and {len(queue.consumers)} consumers; use force to delete it")
    engine.delete_queue(queue)


def create(engine: Engine, name: str) -> BrokerQueue:
    """Create a queue that stays while it is unused. Raises ResourceLimit, InvalidInput."""
    if name in engine.addresses.anycast:
        raise InvalidInput(f"queue {name!r} already exists")
    return engine.create_queue(name, name, Routing.ANYCAST)


def subscribe(engine: Engine, queue: str, topic: str, subscription: str, **options: Any) -> BrokerQueue:
    """Create a durable subscription without a consumer. ``options`` are those of ``create_queue``. Raises ResourceLimit, InvalidInput."""
    if queue in engine.addresses.subscriptions:
        raise InvalidInput(f"subscription {queue!r} already exists")
    engine.check_topic(topic)
    made = engine.create_queue(queue, topic, Routing.MULTICAST, subscription=subscription, **options)
    engine.look_for_use(made)
    return made


def dead_letter(engine: Engine, message: BrokerMessage) -> dict[str, Any]:
    """Return the description of a dead letter, by plain names. A value that is missing or cannot be read is None.

    Any client may send a message with these annotations, so the values are not trustworthy.
    """
    try:
        body = engine.bodies.read(message)
    except BodyUnavailable:
        body = b""

    try:
        annotations = message_annotations(body, _DESCRIBED)
    except BasculeError:
        annotations = {}

    def said(name: str) -> Any:
        return _plain(annotations.get(name))

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
    """Return a value as JSON can hold it. Long texts are truncated to ``TEXT_MAX`` characters."""
    if value is None:
        return None
    if isinstance(value, int):
        return int(value)
    text = value if isinstance(value, str) else repr(value)
    return text[:TEXT_MAX].encode(errors="backslashreplace").decode()


# -- how ---------------------------------------------------------------------------------------------------------------


def _steps(engine: Engine, queue: BrokerQueue, choice: Choice, act: _Act) -> Iterator[Progress]:
    """Process the chosen messages, or those that wait now, in their order, and then the delayed messages."""
    if isinstance(choice, tuple):
        return _chosen_steps(engine, queue, choice, act)
    return _matching_steps(engine, queue, choice, act)


def _chosen_steps(engine: Engine, queue: BrokerQueue, chosen: tuple[ChosenMessage, ...], act: _Act) -> Iterator[Progress]:
    progress, steps = Progress(), Allowance()
    for each in chosen:
        message = None if queue.deleted else each.found_in(queue)
        if message is None:
            progress.leave(GONE)
            continue
        _deal_with(engine, queue, message, act, progress, steps)
        steps.left -= message.size_bytes * TURN_STEPS // STEP_BYTES
        if steps.left <= 0:
            steps = Allowance()
            yield progress
    yield progress


def _matching_steps(engine: Engine, queue: BrokerQueue, selector: Selector | None, act: _Act) -> Iterator[Progress]:
    progress = Progress()
    end, leaving = engine.next_position, queue.delayed.leaving
    step_messages = STEP_MESSAGES
    if selector is not None:
        step_messages = max(1, min(STEP_MESSAGES, TURN_STEPS // (EVALUATION_STEPS + selector.steps)))
    for after in (queue.after, queue.delayed.after):
        place = FRONT
        while not queue.deleted and (waiting := after(place, step_messages)):
            size_bytes, steps = 0, Allowance()
            for message in waiting:
                place = place_of(message)
                if message.position >= end and message is not leaving:
                    continue  # it arrived after the action began
                if selector is None or engine.matches(selector, message, steps):
                    size_bytes += message.size_bytes
                    _deal_with(engine, queue, message, act, progress, steps)
                if size_bytes > STEP_BYTES or steps.left <= 0:
                    break
            yield progress


def _deal_with(engine: Engine, queue: BrokerQueue, message: BrokerMessage, act: _Act, progress: Progress, steps: Allowance) -> None:
    """Process a message, and count the result."""
    turns = engine.turns
    before = turns.left
    try:
        act(message)
        progress.done += 1
    except BasculeError as error:
        progress.leave(str(error))
    except Exception as error:
        engine.journaling.errors.contain(ErrorKind.MOVE, error, queue=queue.name, mid=message.mid)
        progress.leave(FAILED)
    steps.left -= ACT_STEPS + queue.ready.take_steps + before - turns.left


def _check_room(queue: BrokerQueue) -> None:
    if queue.full():
        raise QueueFull(f"queue {queue.name!r} is full")


def _origin(engine: Engine, origin: Mapping[str, Any]) -> BrokerQueue:
    """Return the queue or subscription that a dead letter came from. Raises UnknownAddress, ResourceLimit."""
    address, name = origin.get(ORIGINAL_ADDRESS), origin.get(ORIGINAL_QUEUE)
    if isinstance(address, str) and name is None and origin.get(ORIGINAL_ROUTING) == Routing.MULTICAST:
        raise UnknownAddress(f"the message never reached a subscription of topic {address!r}, because its sender may not send to it")
    if not isinstance(address, str) or not isinstance(name, str):
        raise UnknownAddress("a client sent the message to this queue; the message has no original address")
    if origin.get(ORIGINAL_ROUTING) != Routing.MULTICAST:
        return engine.queue(address)
    subscription = engine.addresses.subscriptions.get(name)
    if subscription is None:
        raise UnknownAddress(f"subscription {name!r} no longer exists")
    return subscription
