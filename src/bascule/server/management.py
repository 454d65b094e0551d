"""The management node: requests to ``$management``, responses to their reply-to (AMQP Management 1.0, working draft).

The requests are the calls of X/Open XA on transaction branches; ``branch_requests`` has their rules.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.errors import AmqpError
from bascule.amqp.types import Int
from bascule.broker.branch_requests import NO_XID, OPERATIONS, WITHOUT_XID, Answer, BranchRequest, carry_out, drop, failure, plan
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, InvalidInput, TooLarge
from bascule.core.log import get_log
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.core.xid import Xid
from bascule.jms.message import NON_PERSISTENT, JmsMessage, decode_message, encode_message
from bascule.jms.sections import APPLICATION_PROPERTIES, places, scan
from bascule.server.attach import place_of
from bascule.server.ownership import may_end

if TYPE_CHECKING:
    from bascule.server.client import Client

log = get_log(__name__)

TYPE: Final = "bascule.xa"
#: Maximum size in bytes of a request. It has a few properties of up to 128 hexadecimal digits, and the broker decodes it on its own thread.
REQUEST_SIZE_BYTES_MAX: Final = 64 * 1024


class Request:
    """A request and its response, which is sent once."""

    def __init__(self, client: Client, message: JmsMessage) -> None:
        self.client = client
        self.engine = client.engine
        self.message = message
        self._decided: BranchRequest | None = None
        self._reply_to, self._reply_routing = _reply_place(message)

    def check_permissions(self) -> None:
        """Raise Unauthorized if the user may not manage branches, or not send to the reply address."""
        self.client.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
        if self._reply_to is not None:
            self.client.authorize_sending(self._reply_to, self._reply_routing)

    def carry_out(self) -> bool:
        """Carry out the request, and respond when the result is stored. Return False if the call must be repeated in the next turn.

        If the call is not repeated, the caller must call ``drop``.
        """
        if self._decided is None:
            try:
                self._decided = self._request()
            except InvalidInput as error:
                self._answer(failure(error))
                return True
        if not plan(self.engine, self._decided):
            return False
        self._record(self._decided)
        carry_out(self.engine, self._decided, self._answer)
        return True

    def _record(self, request: BranchRequest) -> None:
        """Record a request about a branch of another user, allowed or not."""
        client, owner = self.client, self.engine.branches.owner(request.xid)
        if owner in ("", client.user):
            return
        allowed = not request.is_foreign(self.engine)
        result = "requested" if allowed else f"the branch belongs to user {owner!r}"
        action, on = f"branch {request.operation}", str(request.xid)
        client.audit.record(action, on, who=client.user, peer=client.peer, allowed=allowed, result=result, owner=owner)

    def drop(self) -> None:
        """Drop the request, because its client or link is gone."""
        if self._decided is not None:
            drop(self.engine, self._decided)

    def _request(self) -> BranchRequest:
        properties = self.message.properties
        operation = properties.get("operation")
        if properties.get("type") != TYPE or not isinstance(operation, str) or operation not in OPERATIONS:
            raise InvalidInput(f"unknown type or operation; type {TYPE!r} has the operations {', '.join(OPERATIONS)}")
        xid = NO_XID if operation in WITHOUT_XID else self._xid()
        # A prepare without a transaction may repeat one whose answer was lost.
        named = operation == "prepare" or "txnId" in properties
        name, *joined = self._transactions("txnId") if named else (None,)
        if properties.get("joined", "") != "":
            joined += self._transactions("joined")
        since = self.message.properties.get("since")
        if since is not None and (not isinstance(since, int) or isinstance(since, bool)):
            raise InvalidInput(f"since {since!r:.200} must be the position from an earlier response")
        client = self.client
        return BranchRequest(
            operation, xid, client.container, client.transactions, name, since, client.login, partial(may_end, client), tuple(joined)
        )

    def _transactions(self, name: str) -> tuple[bytes, ...]:
        """Return the transaction ids of a property, at least one."""
        value = self.message.properties.get(name, "")
        try:
            return tuple(bytes.fromhex(each) for each in value.split(","))
        except (ValueError, TypeError, AttributeError):
            raise InvalidInput(f"{name} {value!r:.200} must be transaction ids as hexadecimal digits, separated by commas") from None

    def _xid(self) -> Xid:
        format_id = self.message.properties.get("formatId")
        if not isinstance(format_id, int):
            raise InvalidInput(f"formatId {format_id!r:.200} must be an integer")
        return Xid(format_id, self._bytes("gtrid"), self._bytes("bqual")).checked()

    def _bytes(self, name: str) -> bytes:
        value = self.message.properties.get(name, "")
        try:
            return bytes.fromhex(value)
        except (ValueError, TypeError):
            raise InvalidInput(f"{name} {value!r:.200} must be bytes as hexadecimal digits") from None

    def _answer(self, answer: Answer) -> None:
        asked = self.message
        reply_to = self._reply_to
        if reply_to is None:
            return
        properties = {
            "statusCode": Int(answer.status),
            "statusDescription": answer.description,
            "xaCode": Int(answer.code),
            "position": self.engine.journaling.confirmed_sequence,
        }
        if answer.outcome is not None:
            properties["outcome"] = answer.outcome
        message = JmsMessage(
            correlation_id=asked.correlation_id or asked.message_id, destination=reply_to, destination_kind=asked.reply_to_kind,
            delivery_mode=NON_PERSISTENT, body_kind="message" if answer.text is None else "text", body=answer.text, properties=properties,
        )  # fmt: skip
        body = encode_message(message)
        try:
            if self._reply_routing is Routing.ANYCAST:
                with self.client.changing():
                    self.engine.queue(reply_to, self.client.user)  # a queue that must be created counts as one of this user
        except BasculeError as error:
            log.debug("response dropped", peer=self.client.peer, reply_to=reply_to, reason=error)
            return
        self.engine.send(reply_to, self._reply_routing, body, scan(body), self.client.broker_id, _Unheard(), None)


def _reply_place(message: JmsMessage) -> tuple[str | None, Routing]:
    """Return the address of the response, None if no response is wanted, and the address's routing."""
    if message.reply_to is None:
        return None, Routing.ANYCAST
    try:
        address, routing = place_of(message.reply_to, () if message.reply_to_kind is None else (message.reply_to_kind,))
    except AmqpError:
        return None, Routing.ANYCAST
    return None if address == MANAGEMENT_ADDRESS else address, routing or Routing.ANYCAST


def _without_body(message: bytes) -> bytes:
    """Return a message without its body, which no request needs: 64 KiB may hold a million values. Raises MalformedMessage."""
    end = 0
    for section, _, behind in places(message):
        if section > APPLICATION_PROPERTIES:
            break
        end = behind
    return message[:end]


class _Unheard:
    """The sender of a response; the client may be gone."""

    def accepted(self, token: Any) -> None:
        """Ignore that the response is accepted."""

    def refused(self, token: Any, error: BasculeError) -> None:
        """Ignore that the response is refused."""


def request(client: Client, body: bytes) -> Request:
    """Return the request of a message to the management node.

    Raises TooLarge, MalformedMessage, Unauthorized.
    """
    if len(body) > REQUEST_SIZE_BYTES_MAX:
        raise TooLarge(f"the request has {len(body)} bytes; at most {REQUEST_SIZE_BYTES_MAX} are allowed")
    asked = Request(client, decode_message(_without_body(body)))
    asked.check_permissions()
    return asked
