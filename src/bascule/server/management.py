"""The management node: requests to ``$management``, answers to their reply-to (AMQP Management 1.0, working draft).

What is asked for here are the calls of X/Open XA on transaction branches; docs/reference/amqp.md has each request and answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.types import Int
from bascule.broker import branches
from bascule.broker.errors import UnknownBranch
from bascule.broker.transactions import Transaction
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.xa_codes import XA_OK, XA_RDONLY
from bascule.core.xid import Xid
from bascule.jms.message import NON_PERSISTENT, JmsMessage, decode_message, encode_message
from bascule.jms.sections import scan
from bascule.journal.branches import Ending

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection

ADDRESS: Final = "$management"
TYPE: Final = "bascule.xa"
STATES: Final = {None: "prepared", Ending.FORCED_COMMIT: "heuristic-commit", Ending.FORCED_ROLLBACK: "heuristic-rollback"}
ENDINGS: Final = {Ending.COMMITTED: "committed", Ending.ROLLED_BACK: "rolled-back"}


class Request:
    """A request, and its answer, which is given once."""

    def __init__(self, connection: ClientConnection, message: JmsMessage) -> None:
        self.connection = connection
        self.engine = connection.server.engine
        self.message = message

    @property
    def xid(self) -> Xid:
        """The branch that it is about. Raises InvalidInput."""
        format_id = self.message.properties.get("formatId")
        if not isinstance(format_id, int):
            raise InvalidInput(f"formatId {format_id!r}: an integer is expected")
        return Xid(format_id, self._bytes("gtrid"), self._bytes("bqual")).checked()

    def transaction(self) -> Transaction | None:
        """The local transaction that it names, which is the connection's no more; None where it is not there. Raises InvalidInput."""
        return self.connection.transactions.pop(self._bytes("txnId"), None)

    def _bytes(self, name: str) -> bytes:
        value = self.message.properties.get(name, "")
        try:
            return bytes.fromhex(value)
        except (ValueError, TypeError):
            raise InvalidInput(f"{name} {value!r:.200}: bytes as hexadecimal digits are expected") from None

    def carry_out(self) -> None:
        """Do what is asked for, and answer when it is stored."""
        properties = self.message.properties
        try:
            if properties.get("type") != TYPE or properties.get("operation") not in OPERATIONS:
                raise InvalidInput(f"type {TYPE!r} is known here, with operations {', '.join(OPERATIONS)}")
            OPERATIONS[properties["operation"]](self)
        except InvalidInput as error:
            self.failed(error)
        except BasculeError as error:
            self.engine.journaling.then_anew(self.failed, error)  # of a branch that another broker has by now it must not be said

    def done(self, code: int = XA_OK) -> None:
        """It has happened."""
        self._answer(200, "OK", code)

    def failed(self, error: BasculeError) -> None:
        """It has not, and will not."""
        more: dict[str, Any] = {}
        if isinstance(error, UnknownBranch) and error.ending is not None:
            more["outcome"] = ENDINGS[error.ending]
        self._answer(error.http_status, str(error), error.xa_code, more=more)

    def listed(self, text: str) -> None:
        """It has happened, and this is what it found."""
        self._answer(200, "OK", XA_OK, text)

    def _answer(self, status: int, description: str, code: int, text: str | None = None, more: dict[str, Any] | None = None) -> None:
        asked = self.message
        if not asked.reply_to or len(asked.reply_to) > ADDRESS_MAX:
            return
        answer = JmsMessage(
            correlation_id=asked.correlation_id or asked.message_id, destination=asked.reply_to, destination_kind=asked.reply_to_kind,
            delivery_mode=NON_PERSISTENT, body_kind="message" if text is None else "text", body=text,
            properties={"statusCode": Int(status), "statusDescription": description, "xaCode": Int(code), **(more or {})},
        )  # fmt: skip
        body = encode_message(answer)
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


def _prepare(asked: Request) -> None:
    xid, transaction = asked.xid, asked.transaction()
    branches.prepare(
        asked.engine, transaction, xid, asked.connection.container, lambda prepared: asked.done(XA_OK if prepared else XA_RDONLY)
    )


def _commit(asked: Request) -> None:
    xid = asked.xid
    if "txnId" not in asked.message.properties:
        branches.end(asked.engine, xid, Ending.COMMITTED, asked.done)
        return
    branches.commit_one_phase(asked.engine, asked.transaction(), xid, lambda error: asked.done() if error is None else asked.failed(error))


def _rollback(asked: Request) -> None:
    branches.end(asked.engine, asked.xid, Ending.ROLLED_BACK, asked.done)


def _recover(asked: Request) -> None:
    def answer() -> None:
        lines = [
            f"{STATES[each.ending]} {each.since_ms} {each.xid.format_id}:{each.xid.gtrid.hex()}:{each.xid.bqual.hex()}"
            for each in branches.listed(asked.engine)
        ]
        asked.listed("\n".join(lines))

    asked.engine.journaling.then_anew(answer)


def _forget(asked: Request) -> None:
    branches.forget(asked.engine, asked.xid, partial(asked.done, XA_OK))


OPERATIONS: Final[dict[str, Callable[[Request], None]]] = {
    "prepare": _prepare,
    "commit": _commit,
    "rollback": _rollback,
    "recover": _recover,
    "forget": _forget,
}
