"""The management node: requests to ``$management``, answers to their reply-to (AMQP Management 1.0, working draft).

The requests are the calls of X/Open XA on transaction branches; ``branch_requests`` has their rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.types import Int
from bascule.broker.branch_requests import NO_XID, OPERATIONS, WITHOUT_XID, Answer, BranchRequest, carry_out, failure
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.xid import Xid
from bascule.jms.message import NON_PERSISTENT, JmsMessage, decode_message, encode_message
from bascule.jms.sections import scan

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection

ADDRESS: Final = "$management"
TYPE: Final = "bascule.xa"


class Request:
    """A request, and its answer, which is given once."""

    def __init__(self, connection: ClientConnection, message: JmsMessage) -> None:
        self.connection = connection
        self.engine = connection.server.engine
        self.message = message

    def carry_out(self) -> None:
        """Do what is asked for, and answer when it is stored."""
        try:
            request = self._request()
        except InvalidInput as error:
            self._answer(failure(error))
        else:
            carry_out(self.engine, request, self._answer)

    def _request(self) -> BranchRequest:
        properties = self.message.properties
        operation = properties.get("operation")
        if properties.get("type") != TYPE or operation not in OPERATIONS:
            raise InvalidInput(f"type {TYPE!r} is known here, with operations {', '.join(OPERATIONS)}")
        xid = NO_XID if operation in WITHOUT_XID else self._xid()
        # A prepare without a transaction may be the repeat of one whose answer was lost.
        name = self._bytes("txnId") if operation == "prepare" or "txnId" in properties else None
        return BranchRequest(operation, xid, self.connection.container, self.connection.transactions, name)

    def _xid(self) -> Xid:
        format_id = self.message.properties.get("formatId")
        if not isinstance(format_id, int):
            raise InvalidInput(f"formatId {format_id!r}: an integer is expected")
        return Xid(format_id, self._bytes("gtrid"), self._bytes("bqual")).checked()

    def _bytes(self, name: str) -> bytes:
        value = self.message.properties.get(name, "")
        try:
            return bytes.fromhex(value)
        except (ValueError, TypeError):
            raise InvalidInput(f"{name} {value!r:.200}: bytes as hexadecimal digits are expected") from None

    def _answer(self, answer: Answer) -> None:
        asked = self.message
        if not asked.reply_to or len(asked.reply_to) > ADDRESS_MAX:
            return
        properties = {"statusCode": Int(answer.status), "statusDescription": answer.description, "xaCode": Int(answer.code)}
        if answer.outcome is not None:
            properties["outcome"] = answer.outcome
        message = JmsMessage(
            correlation_id=asked.correlation_id or asked.message_id, destination=asked.reply_to, destination_kind=asked.reply_to_kind,
            delivery_mode=NON_PERSISTENT, body_kind="message" if answer.text is None else "text", body=answer.text, properties=properties,
        )  # fmt: skip
        body = encode_message(message)
        routing = Routing.MULTICAST if (asked.reply_to_kind or "").endswith("topic") else Routing.ANYCAST
        self.engine.send(asked.reply_to, routing, body, scan(body), self.connection.server.container_id, _Unheard(), None)


class _Unheard:
    """Of an answer: who asked may be gone."""

    def accepted(self, token: Any) -> None:
        """It is on its way."""

    def refused(self, token: Any, error: BasculeError) -> None:
        """There is nowhere to send it."""


def request(connection: ClientConnection, body: bytes) -> None:
    """A message has come to the management node. Raises MalformedMessage."""
    Request(connection, decode_message(body)).carry_out()
