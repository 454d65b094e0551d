"""The messages of a client, from the transfer to the broker engine, or to the answer that refuses the message."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from bascule.amqp.errors import NOT_ALLOWED, NOT_IMPLEMENTED, UNAUTHORIZED_ACCESS, AmqpError
from bascule.amqp.events import TransferDiscarded, Transferred
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.errors import RequestFailed
from bascule.broker.turns import Retry, when_due
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, check_answerable
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.errors import MalformedMessage
from bascule.jms.large_texts import TEXT_PIECE_BYTES, text_pieces
from bascule.jms.sections import Scan, message_id_of, scan
from bascule.server import management
from bascule.server.attach import place_of_message, routing_at
from bascule.server.links import PRODUCER_CREDIT_LOW, ProducerLink

if TYPE_CHECKING:
    from bascule.server.client import Client
    from bascule.server.user_ids import UserIdRule


class Transfers:
    """The transfers of one client. ``errors`` contains the errors of its requests."""

    __slots__ = ("_client", "_errors")

    def __init__(self, client: Client, errors: ErrorContainment) -> None:
        self._client = client
        self._errors = errors

    def take(self, event: Transferred) -> Retry | None:
        """Handle a message. If it must wait for another turn, return the function that handles it then."""
        if len(event.payload) > TEXT_PIECE_BYTES and isinstance(event.link.context, ProducerLink):
            return self._check_text(event, event.link.context, text_pieces(event.payload))
        return self._take(event)

    def _check_text(self, event: Transferred, producer: ProducerLink, pieces: Iterator[None]) -> Retry | None:
        """Check the next piece of a large message's text, and handle the message after the last piece."""
        try:
            if next(pieces, self) is not self:
                return partial(self._check_text, event, producer, pieces)
        except MalformedMessage as error:
            if producer.link.context is producer:
                self._refuse(event, producer, error)
                producer.top_up()
                return None
        return self._take(event, text_checked=True)

    def _take(self, event: Transferred, *, text_checked: bool = False) -> Retry | None:
        client, producer = self._client, event.link.context
        if not isinstance(producer, ProducerLink):
            client.lose_message(event.txn_id)
            return None
        try:
            if event.message_format:
                what = f"message format 0x{event.message_format:x} is not supported; only 0, the format of AMQP, is"
                raise AmqpError(NOT_IMPLEMENTED, what)
            body = event.payload
            facts = scan(body, body_text=False) if text_checked else scan(body)
            if client.user_ids is not None:
                body, facts = self._with_user_id(event, producer, client.user_ids, facts)
            transaction = None if event.txn_id is None else client.transaction(event.txn_id)
            address, routing = producer.address, producer.routing
            if address is None or routing is None:
                place = place_of_message(facts.to, body)
                address, routing = place.address, routing_at(client, place)
                client.check_relay(address, routing)
            elif routing is Routing.ANYCAST and address not in client.engine.addresses.anycast:
                client.check_creation(address)
            if address == MANAGEMENT_ADDRESS and transaction is not None:
                raise AmqpError(NOT_ALLOWED, f"a request to {address} cannot be part of a transaction")
        except BasculeError as error:
            self._refuse(event, producer, error)
        else:
            if address == MANAGEMENT_ADDRESS:
                return self._requested(event, producer)
            waiting = client.engine.send(
                address, routing, body, facts, client.container, producer, event, transaction, waits=True, user=client.login
            )  # fmt: skip
            if waiting is not None:
                return when_due(waiting, partial(self._take_later, event, producer, address, routing, waiting))
        if event.link.credit < PRODUCER_CREDIT_LOW:
            producer.top_up()
        return None

    def _with_user_id(self, event: Transferred, producer: ProducerLink, rule: UserIdRule, facts: Scan) -> tuple[bytes, Scan]:
        """Return a message whose user id satisfies the rule. Raises AmqpError, and records the refusal."""
        client = self._client
        try:
            return rule.apply(event.payload, facts, client.max_message_bytes)
        except AmqpError as error:
            on = producer.address or facts.to or ""
            client.audit.record("send", on, who=client.user, peer=client.peer, allowed=False, result=error.description)
            raise

    def _take_later(self, event: Transferred, producer: ProducerLink, address: str, routing: Routing, send: Retry) -> Retry | None:
        """Try to send a message again. If the broker has ended its link meanwhile, drop the message: its client was told so."""
        client = self._client
        if producer.link.context is not producer:
            client.lose_message(event.txn_id)
            return None
        try:
            if routing is Routing.ANYCAST and address not in client.engine.addresses.anycast:
                client.check_creation(address)
        except BasculeError as error:
            self._refuse(event, producer, error)
        else:
            if (waiting := send()) is not None:
                return when_due(waiting, partial(self._take_later, event, producer, address, routing, waiting))
        producer.top_up()
        return None

    def discarded(self, event: TransferDiscarded) -> None:
        """Note that a message arrived on an ended link, or has ended its link."""
        self._client.lose_message(event.txn_id, event.error)

    def _refuse(self, event: Transferred, producer: ProducerLink, error: BasculeError) -> None:
        """Answer that a message is refused; its transaction can only be rolled back. Raises an error that ends more than its link."""
        check_answerable(error)
        client = self._client
        transaction = None if event.txn_id is None else client.transactions.get(event.txn_id)
        client.engine.refuse(producer, event, error, transaction)

    def _requested(self, event: Transferred, producer: ProducerLink) -> Retry | None:
        """Handle a request to the management node: accept it when it is decided, and answer it when the result is stored."""
        client = self._client
        try:
            client.management_request = management.request(client, event.payload)
        except Exception as error:
            self._request_failed(event, producer, error)
            return None
        return self._carry_out_request(event, producer)

    def _carry_out_request(self, event: Transferred, producer: ProducerLink) -> Retry | None:
        """Carry out a request whose plan is complete, or wait. If the broker has ended its link meanwhile, drop the request."""
        client = self._client
        request = client.management_request
        if request is None or producer.link.context is not producer:
            client.drop_request()
            return None
        try:
            if not request.carry_out():
                return partial(self._carry_out_request, event, producer)
        except Exception as error:
            client.drop_request()
            self._request_failed(event, producer, error)
            return None
        client.management_request = None
        producer.accepted(event)
        producer.top_up()
        return None

    def _request_failed(self, event: Transferred, producer: ProducerLink, error: Exception) -> None:
        client = self._client
        if isinstance(error, BasculeError):
            check_answerable(error)
            producer.refused(event, error)
        else:
            self._errors.contain(ErrorKind.REQUEST, error, peer=client.peer, container=client.container)
            producer.refused(event, RequestFailed("the broker failed to carry out the request; see the broker's log"))
        producer.top_up()


class AuditedTransfers(Transfers):
    """The transfers of one client whose messages are audited, if the log of audits has messages."""

    __slots__ = ("_refusal", "_taking")

    def __init__(self, client: Client, errors: ErrorContainment) -> None:
        super().__init__(client, errors)
        self._taking = False
        self._refusal: BasculeError | None = None  # of the message that is being taken

    def take(self, event: Transferred) -> Retry | None:
        """Handle a message, and record it."""
        self._taking, self._refusal = True, None
        try:
            return super().take(event)
        finally:
            self._taking = False
            self._record(event, self._refusal)

    def _refuse(self, event: Transferred, producer: ProducerLink, error: BasculeError) -> None:
        if self._taking:
            self._refusal = error
        else:  # it has waited
            self._record(event, error)
        super()._refuse(event, producer, error)

    def _record(self, event: Transferred, refusal: BasculeError | None) -> None:
        if not self._client.audit.messages:
            return
        if refusal is not None and refusal.condition == UNAUTHORIZED_ACCESS:
            return  # the check of the permission, or of the user id, has recorded it
        client, producer = self._client, event.link.context
        on = producer.address if isinstance(producer, ProducerLink) else ""
        result = "ok" if refusal is None else f"{type(refusal).__name__}: {refusal}"
        client.audit.record(
            "send", _address_in(event.payload) if on is None else on, who=client.user, peer=client.peer, result=result,
            bytes=len(event.payload), transacted=event.txn_id is not None, message_id=message_id_of(event.payload),
        )  # fmt: skip


def _address_in(body: bytes) -> str:
    """Return the address that a message names, "" if it names none."""
    try:
        return place_of_message(scan(body).to, body).address
    except BasculeError:
        return ""
