"""The messages of a queue for an administrator: pages of them, one in detail, and its body. Nothing is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bascule.broker.administration import ChosenMessage, dead_letter
from bascule.broker.engine import Engine
from bascule.broker.errors import BodyUnavailable, UnknownAddress
from bascule.broker.message import BrokerMessage
from bascule.broker.order import FRONT, QueuePlace, place_of
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Allowance
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.masking import PropertyMask
from bascule.jms.lookup import HEADER_FIELDS
from bascule.jms.selector import Selector, SelectorError, compile_selector
from bascule.server.in_turns import beside
from bascule.server.listing import check_known, number_of
from bascule.server.shown_messages import BrowsedMessage, content, described, searched_places

if TYPE_CHECKING:
    from bascule.server.node import Node

#: Default and maximum number of messages of a page.
PAGE_MESSAGES: Final = 50
PAGE_MESSAGES_MAX: Final = 200
#: Bytes of the messages of a page; one larger message makes a page of its own.
PAGE_BYTES: Final = 4 << 20
#: Messages, and bytes of them, that one request looks at. The answer says where the next request goes on.
LOOKED_AT_MAX: Final = 20_000
LOOKED_AT_BYTES: Final = 64 << 20
#: Messages that one turn of the event loop looks at.
MESSAGES_PER_TURN: Final = 50
#: Characters of a text, or of the encoded bytes, of a body and of a property: in a page, and in detail. The download has the whole body.
SHOWN_MAX: Final = 500
SHOWN_IN_DETAIL_MAX: Final = 256 << 10
#: Maximum number of characters of a text to search for, since each message is searched for it.
TEXT_MAX: Final = 200
#: Maximum number of ids that an action takes.
IDS_MAX: Final = 1_000
#: Bytes of a message in which one turn of the event loop searches for a text. Some texts take 10 ns a byte.
SEARCHED_BYTES_PER_TURN: Final = 1 << 20
#: Bytes of a message that are searched for a text in one step, see bascule.broker.turns.
_SEARCHED_BYTES_PER_STEP: Final = 100


def message_id(engine: Engine, *, delayed: bool, place: QueuePlace) -> str:
    """Return the id of a message in the answers of the admin server. It is valid while the queue holds the message, within one epoch."""
    return f"{engine.journaling.epoch}-{'delayed' if delayed else 'waiting'}-{place.priority}-{place.position}"


def chosen_message(engine: Engine, text: str) -> ChosenMessage:
    """Return the place that an id names. Raises InvalidInput."""
    parts = text.split("-")
    if len(text) > 60 or len(parts) != 4 or parts[1] not in ("waiting", "delayed"):
        raise InvalidInput(f"{text!r:.60} is not an id of a message, as the list of messages has it")
    epoch, priority, position = parts[0], parts[2], parts[3]
    if not all(part.isascii() and part.isdecimal() for part in (epoch, priority, position)) or int(priority) > FRONT.priority:
        raise InvalidInput(f"{text!r:.60} is not an id of a message, as the list of messages has it")
    if int(epoch) != engine.journaling.epoch:
        raise InvalidInput(f"the id {text!r:.60} is from an earlier epoch of the broker; list the messages again")
    return ChosenMessage(parts[1] == "delayed", QueuePlace(int(priority), int(position)))


def chosen_messages(engine: Engine, ids: str) -> tuple[ChosenMessage, ...]:
    """Return the places that ids name, which spaces separate. Raises InvalidInput."""
    found = ids.split()
    if len(found) > IDS_MAX:
        raise InvalidInput(f"ids has {len(found)} ids; at most {IDS_MAX} are allowed")
    return tuple(dict.fromkeys(chosen_message(engine, each) for each in found))


def selector_of(text: str) -> Selector | None:
    """Return the selector of a request, None for an empty text. Raises InvalidInput."""
    try:
        return compile_selector(text) if text.strip() else None
    except SelectorError as error:
        raise InvalidInput(f"selector: column {error.column}: {error.reason}\n{error.caret()}") from None


class _Search(NamedTuple):
    """Which messages are wanted. If ``mark`` is true, the others are listed too, and marked."""

    selector: Selector | None
    text: bytes
    mark: bool
    messages_max: int
    mask: PropertyMask

    @classmethod
    def of(cls, parameters: Mapping[str, str], mask: PropertyMask) -> _Search:
        """Return what the parameters of a request ask for. Raises InvalidInput."""
        check_known(parameters, ("queue", "selector", "text", "mark", "after", "count"))
        text = parameters.get("text", "")
        if len(text) > TEXT_MAX:
            raise InvalidInput(f"text has {len(text)} characters; at most {TEXT_MAX} are allowed")
        mark = parameters.get("mark", "false")
        if mark not in ("true", "false"):
            raise InvalidInput(f"mark {mark!r:.20} must be true or false")
        count = number_of(parameters, "count", PAGE_MESSAGES, 1, PAGE_MESSAGES_MAX)
        selector = selector_of(parameters.get("selector", ""))
        for name in sorted(() if selector is None else selector.identifiers - HEADER_FIELDS):
            if mask.covers(name):
                raise InvalidInput(f"selector: admin.masked_properties hides the values of property {name!r:.60}; select by another one")
        return cls(selector, text.encode(errors="replace"), mark == "true", count, mask)

    async def wants(self, engine: Engine, message: BrokerMessage, allowance: Allowance) -> bool:
        """Return whether a message is one of those. Raises BodyUnavailable."""
        allowance.left -= 10 + engine.bodies.read_steps(message)
        if self.selector is not None and not engine.matches(self.selector, message, allowance):
            return False
        return not self.text or await self._finds(engine.bodies.read(message), allowance)

    async def _finds(self, body: bytes, allowance: Allowance) -> bool:
        """Return whether a message has the text in what the mask does not hide."""
        for start, end in searched_places(body, self.mask):
            for begin in range(start, end, SEARCHED_BYTES_PER_TURN):
                if begin > start:
                    await asyncio.sleep(0)
                behind = min(begin + SEARCHED_BYTES_PER_TURN, end)
                allowance.left -= (behind - begin) // _SEARCHED_BYTES_PER_STEP
                if body.find(self.text, begin, min(behind + len(self.text) - 1, end)) >= 0:
                    return True
        return False


class _Page:
    """The messages of one answer while they are being collected."""

    def __init__(self, engine: Engine, queue: BrokerQueue, search: _Search) -> None:
        self.engine, self.queue, self.search = engine, queue, search
        self.found: list[BrowsedMessage] = []
        self.next = ""
        self.looked_at = self._size_bytes = self._looked_at_bytes = 0

    @property
    def complete(self) -> bool:
        """Return whether the answer has room for no more."""
        return (
            len(self.found) >= self.search.messages_max
            or self._size_bytes >= PAGE_BYTES
            or self.looked_at >= LOOKED_AT_MAX
            or self._looked_at_bytes >= LOOKED_AT_BYTES
        )

    async def look(self, message: BrokerMessage, delayed: bool, allowance: Allowance) -> None:
        """Take a message if it is wanted."""
        self.looked_at += 1
        self._looked_at_bytes += message.size_bytes
        try:
            wanted = await self.search.wants(self.engine, message, allowance)
            if wanted or self.search.mark:
                self.found.append(browsed(self.engine, self.queue, message, delayed, wanted))
                self._size_bytes += message.size_bytes
        except BodyUnavailable:
            return  # the spill file is gone; the journal has the message


def browsed(engine: Engine, queue: BrokerQueue, message: BrokerMessage, delayed: bool, matches: bool = True) -> BrowsedMessage:
    """Return a message with its bytes. Raises BodyUnavailable."""
    return BrowsedMessage(
        message_id(engine, delayed=delayed, place=place_of(message)), message, engine.bodies.read(message),
        queue.delayed.due_ms(message), queue.delivery_count(message), matches,
    )  # fmt: skip


async def messages(node: Node, queue: BrokerQueue, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the waiting and delayed messages of a queue. Raises InvalidInput, Unavailable."""
    mask = _mask_of(node)
    engine, search = node.engine, _Search.of(parameters, mask)
    after = parameters.get("after", "")
    start = chosen_message(engine, after) if after else ChosenMessage(False, FRONT)
    page = _Page(engine, queue, search)
    for delayed, lines in ((False, queue.after), (True, queue.delayed.after)):
        if delayed < start.delayed:
            continue
        place = start.place if delayed == start.delayed else FRONT
        while not page.complete and not queue.deleted and (waiting := lines(place, MESSAGES_PER_TURN)):
            place = await _look_through(page, waiting, delayed)
            await asyncio.sleep(0)
            if node.loaded_engine is not engine:
                raise Unavailable("the broker began another epoch; list the messages again")
        if page.complete:
            page.next = message_id(engine, delayed=delayed, place=place)
            break
    found = await beside(partial(described, page.found, SHOWN_MAX, mask))
    return {"queue": queue.name, "messages": found, "next": page.next, "looked_at": page.looked_at}


def _mask_of(node: Node) -> PropertyMask:
    return PropertyMask(node.settings.admin.masked_properties)


async def _look_through(page: _Page, waiting: list[BrokerMessage], delayed: bool) -> QueuePlace:
    """Look at some messages, and return the place behind the last one."""
    allowance, place = Allowance(), FRONT
    for message in waiting:
        await page.look(message, delayed, allowance)
        place = place_of(message)
        if page.complete or allowance.left <= 0:
            break
    return place


def found_message(engine: Engine, queue: BrokerQueue, text: str) -> BrowsedMessage:
    """Return the message with an id. Raises InvalidInput, UnknownAddress, BodyUnavailable."""
    chosen = chosen_message(engine, text)
    message = chosen.found_in(queue)
    if message is None:
        raise UnknownAddress(f"queue {queue.name!r} no longer has the message {text!r:.60}, or a consumer holds it")
    return browsed(engine, queue, message, chosen.delayed)


async def message_in_detail(node: Node, queue: BrokerQueue, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return one message. Raises InvalidInput, UnknownAddress."""
    check_known(parameters, ("queue", "id"))
    found = found_message(node.engine, queue, parameters.get("id", ""))
    origin = dead_letter(node.engine, found.message)
    (shown,) = await beside(partial(described, [found], SHOWN_IN_DETAIL_MAX, _mask_of(node)))
    return {**shown, "queue": queue.name, "origin": {name: origin[name] for name in ("address", "queue", "reason", "moved_at_ms")}}


async def message_body(node: Node, queue: BrokerQueue, parameters: Mapping[str, str]) -> bytes:
    """Return the whole body of a message: the text of a text message in UTF-8, the bytes of others. Raises BasculeError."""
    check_known(parameters, ("queue", "id"))
    return await beside(partial(content, found_message(node.engine, queue, parameters.get("id", "")).body, _mask_of(node)))
