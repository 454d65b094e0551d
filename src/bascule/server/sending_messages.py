"""An administrator's message: made from the arguments of a request, and sent as if a client had sent it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.types import Byte, Float, Int, Short
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, InvalidInput, TooLarge, Unavailable
from bascule.jms.message import NON_PERSISTENT, PERSISTENT, JmsMessage, encode_message
from bascule.jms.record import map_from_json
from bascule.jms.sections import scan
from bascule.server.admin_access import NotAdministrator, Principal, refused_to
from bascule.server.user_ids import OFF, REQUIRE

if TYPE_CHECKING:
    from bascule.server.node import Node

#: Kinds of body that a request can give: its text, its bytes in base64, or a JSON object for a map.
SENT_KINDS: Final = ("text", "bytes", "map", "message")
#: Longest time to live and delay, about a hundred years.
TIME_MS_MAX: Final = 100 * 365 * 86_400_000
#: The arguments whose values the audit and the log do not show, since they are content.
CONTENT_ARGUMENTS: Final = ("body", "properties")


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _bounded(make: Callable[[int], Any], bits: int) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = int(text)
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise ValueError(text)
        return make(value)

    return convert


#: Type of a property -> its value from a text.
PROPERTY_TYPES: Final[Mapping[str, Callable[[str], Any]]] = {
    "string": str, "boolean": _boolean, "byte": _bounded(Byte, 8), "short": _bounded(Short, 16), "int": _bounded(Int, 32),
    "long": _bounded(int, 64), "float": lambda text: Float(float(text)), "double": float,
}  # fmt: skip


class _Outcome:
    """The sender of one message; ``reached`` gets the outcome."""

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def accepted(self, token: Any) -> None:  # noqa: ARG002
        """Handle that the message is stored."""
        if not self.reached.done():
            self.reached.set_result(None)

    def refused(self, token: Any, error: BasculeError) -> None:  # noqa: ARG002
        """Handle that the message was refused."""
        if not self.reached.done():
            self.reached.set_exception(error)


async def send(node: Node, sender: Principal, arguments: Mapping[str, Any]) -> str:
    """Send a message, and return its id when the message is stored. Raises BasculeError."""
    message = replace(made_message(arguments), user_id=user_named(node.validated_user, sender))
    data = encode_message(message)
    if len(data) > node.max_message_bytes:
        raise TooLarge(f"the message has {len(data)} bytes; at most {node.max_message_bytes} are allowed")
    outcome = _Outcome()
    routing = Routing.MULTICAST if arguments["topic"] else Routing.ANYCAST
    with node.audit.changing(sender.name, sender.peer):
        node.engine.send(arguments["to"], routing, data, scan(data), node.container_id, outcome, None)
    node.dispatch()
    timeout_s = node.settings.journal.append_timeout_s
    try:
        await asyncio.wait_for(outcome.reached, timeout_s)
    except TimeoutError:
        raise Unavailable(f"Kafka has not stored the message within {timeout_s:g} s; check later whether it was sent") from None
    return message.message_id or ""


def user_named(mode: str, sender: Principal) -> str | None:
    """Return the user that a message of a sender names by ``broker.validated_user``. Raises NotAdministrator.

    The holder of a token of the settings is no user: a user may have the same name.
    """
    if mode == REQUIRE and not sender.is_user:
        error = NotAdministrator(
            f"{sender.name} is not a user, and each message must name the user who sends it (broker.validated_user = {REQUIRE!r});"
            " log in with a password, a client certificate or a token of a provider"
        )
        raise refused_to(sender.name, error)
    return sender.name if sender.is_user and mode != OFF else None


def made_message(arguments: Mapping[str, Any]) -> JmsMessage:
    """Return the message that the arguments describe. Raises InvalidInput."""
    kind = arguments["kind"]
    if kind not in SENT_KINDS:
        raise InvalidInput(f"kind {kind!r:.60} must be one of {', '.join(SENT_KINDS)}")
    if not 0 <= arguments["priority"] <= 9:
        raise InvalidInput(f"priority {arguments['priority']} must be a number from 0 to 9")
    for name in ("ttl_ms", "delay_ms"):
        if not 0 <= arguments[name] <= TIME_MS_MAX:
            raise InvalidInput(f"{name} {arguments[name]} must be a number from 0 to {TIME_MS_MAX}")
    now_ms = time.time_ns() // 1_000_000
    return JmsMessage(
        message_id=f"ID:{uuid.uuid4()}", correlation_id=arguments["correlation_id"] or None, destination=arguments["to"],
        destination_kind="topic" if arguments["topic"] else "queue", reply_to=arguments["reply_to"] or None,
        reply_to_kind="queue" if arguments["reply_to"] else None, type=arguments["type"] or None,
        delivery_mode=PERSISTENT if arguments["persistent"] else NON_PERSISTENT, priority=arguments["priority"], timestamp_ms=now_ms,
        expiration_ms=now_ms + arguments["ttl_ms"] if arguments["ttl_ms"] else 0,
        delivery_time_ms=now_ms + arguments["delay_ms"] if arguments["delay_ms"] else 0, group_id=arguments["group_id"] or None,
        properties={name: _property(name, each) for name, each in arguments["properties"].items()},
        body_kind=kind, body=_body(kind, arguments["body"]),
    )  # fmt: skip


def _property(name: str, given: object) -> Any:
    """Return a property from a string, or from an object with ``type`` and ``value``, both strings. Raises InvalidInput."""
    if isinstance(given, str):
        return given
    match given:
        case {"type": str() as kind, "value": str() as text} if kind in PROPERTY_TYPES:
            try:
                return PROPERTY_TYPES[kind](text)
            except ValueError:
                raise InvalidInput(f"property {name!r:.60}: {text!r:.60} is not of type {kind}") from None
    raise InvalidInput(
        f'property {name!r:.60} must be a string, or {{"type": TYPE, "value": STRING}} with a TYPE of {", ".join(PROPERTY_TYPES)}'
    )


def _body(kind: str, text: str) -> Any:
    match kind:
        case "text":
            return text
        case "bytes":
            try:
                return base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidInput("body must be base64, because kind is 'bytes'") from None
        case "map":
            try:
                return map_from_json(text.encode() or b"{}")
            except BasculeError as error:
                raise InvalidInput(f"body must be a JSON object, because kind is 'map': {error}") from None
    if text:
        raise InvalidInput("body must be empty, because kind is 'message'")
    return None


def without_content(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as the audit and the log show them."""
    return {name: f"{len(value)} not shown" if name in CONTENT_ARGUMENTS else value for name, value in arguments.items()}
