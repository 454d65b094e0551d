"""The meaning of an attach in JMS terms: producers, consumers, subscriptions, browsers, temporary destinations, coordinators.

Link names, capabilities and filters are those of Qpid JMS (docs/reference/amqp.md has a table of them).
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from bascule.amqp.errors import INVALID_FIELD, NOT_ALLOWED, NOT_FOUND, NOT_IMPLEMENTED, AmqpError
from bascule.amqp.link import Link, ReceiverLink, SenderLink
from bascule.amqp.performatives import Coordinator, SenderSettleMode, Source, Target
from bascule.broker.addresses import TEMPORARY_PREFIX
from bascule.broker.queue import BrokerQueue
from bascule.broker.subscription_names import NAME_DELIMITER, subscription_queue
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.jms.message import DESTINATION_KINDS
from bascule.jms.sections import message_annotation
from bascule.jms.selector import Selector, SelectorError, compile_selector
from bascule.server.connection_reset import attached_late, reset_connection
from bascule.server.coordinator import CoordinatorLink, in_first_transaction
from bascule.server.links import PRODUCER_CREDIT, BrowserLink, ConsumerLink, ProducerLink, no_local_of, selector_of
from bascule.server.ownership import check_client_id, check_owner, take_over
from bascule.server.traced_links import consumer_link, producer_link

if TYPE_CHECKING:
    from bascule.server.client import Client

PREFIXES = {"queue://": Routing.ANYCAST, "topic://": Routing.MULTICAST}
ROUTING_OF_CAPABILITY = {
    "queue": Routing.ANYCAST,
    "topic": Routing.MULTICAST,
    "temporary-queue": Routing.ANYCAST,
    "temporary-topic": Routing.MULTICAST,
}


class RoutedAddress(NamedTuple):
    """An address, and the routing that a peer asked for; None if the peer asked for none."""

    address: str
    routing: Routing | None


def _routing_asked_for(capabilities: tuple[str, ...]) -> Routing | None:
    return next((ROUTING_OF_CAPABILITY[name] for name in capabilities if name in ROUTING_OF_CAPABILITY), None)


def place_of(address: object, capabilities: tuple[str, ...]) -> RoutedAddress:
    """Return the destination that a terminus names. Raises AmqpError for an address that is not a string, is empty or is too long."""
    if not isinstance(address, str):
        raise AmqpError(INVALID_FIELD, f"address {address!r:.60} must be a string")
    routing = _routing_asked_for(capabilities)
    for prefix, prefixed in PREFIXES.items():
        if address.startswith(prefix):
            address = address[len(prefix) :]
            routing = routing if routing is not None else prefixed
            break
    if not address:
        raise AmqpError(INVALID_FIELD, "an address must not be empty")
    if len(address) > ADDRESS_MAX:
        raise AmqpError(INVALID_FIELD, f"address {address[:60]!r}… has {len(address)} characters; at most {ADDRESS_MAX} are allowed")
    return RoutedAddress(address, routing)


def place_of_message(to: object, body: bytes) -> RoutedAddress:
    """Return the destination that a message names, on a link without an address. Raises AmqpError, MalformedMessage."""
    kind = message_annotation(body, "x-opt-jms-dest")
    known = isinstance(kind, int) and 0 <= kind < len(DESTINATION_KINDS)
    return place_of(to, (DESTINATION_KINDS[kind],) if known else ())


def routing_at(client: Client, place: RoutedAddress) -> Routing:
    """Return the routing of a place. If the peer asked for none, the existing destination decides; the default is a queue."""
    if place.routing is not None:
        return place.routing
    addresses = client.engine.addresses
    if place.address not in addresses.anycast and place.address in addresses:
        return Routing.MULTICAST
    return Routing.ANYCAST


def attach(client: Client, link: Link) -> None:
    """Answer a peer's attach. Raises BasculeError, Unauthorized included, if the link is to be refused."""
    with client.changing():
        if isinstance(link, ReceiverLink):
            _attach_producer(client, link)
        elif isinstance(link, SenderLink):
            _attach_consumer(client, link)


def _answer(link: Link, **options: Any) -> None:
    """Accept a link, and drop the fields of its attach, which are no longer needed."""
    link.accept(**options)
    link.forget_attach()


# -- producers ---------------------------------------------------------------------------------------------------------


def _attach_producer(client: Client, link: ReceiverLink) -> None:
    target = link.target
    limit = client.max_message_bytes
    if isinstance(target, Coordinator):
        if attached_late(client, link) and reset_connection(client, link):
            return
        link.context = CoordinatorLink(client, link)
        _answer(link, max_message_size=limit)
        link.flow(PRODUCER_CREDIT)
        return
    if not isinstance(target, Target):
        raise AmqpError(NOT_IMPLEMENTED, "a producer without a target is not supported")
    if target.dynamic:
        address, routing = _temporary(client, link, target.capabilities)
        link.context = _producer(client, link, address, routing)
        _answer(link, target=dataclasses.replace(target, address=address), max_message_size=limit)
    else:
        if target.address is None:
            link.context = producer_link(client, link, None, None)
        else:
            place = place_of(target.address, target.capabilities)
            link.context = _producer(client, link, place.address, routing_at(client, place))
        _answer(link, max_message_size=limit)
    link.context.opened()


def _producer(client: Client, link: ReceiverLink, address: str, routing: Routing) -> ProducerLink:
    engine = client.engine
    if address == MANAGEMENT_ADDRESS:
        client.authorize(Permission.MANAGE, address)
        engine.addresses.producers[address, routing] += 1  # the management node has no queue
    else:
        client.authorize_sending(address, routing)
        engine.attach_producer(address, routing, client.user)
    return producer_link(client, link, address, routing)


def _temporary(client: Client, link: Link, capabilities: tuple[str, ...]) -> tuple[str, Routing]:
    """Create a temporary destination, which is deleted with its messages when its link ends."""
    routing = _routing_asked_for(capabilities) or Routing.ANYCAST
    name = f"{TEMPORARY_PREFIX}{uuid.uuid4()}"
    client.authorize(Permission.CREATE_ADDRESS, name)
    if routing is Routing.ANYCAST:
        client.authorize(Permission.CREATE_NON_DURABLE_QUEUE, name)
    client.engine.create_temporary(name, routing, client.user)
    client.temporary[link] = name
    return name, routing


# -- consumers ---------------------------------------------------------------------------------------------------------


def _attach_consumer(client: Client, link: SenderLink) -> None:
    source = link.source
    if source is None:
        _find_subscription(client, link)
        return
    if not isinstance(source, Source):
        raise AmqpError(NOT_IMPLEMENTED, "a consumer whose source is not amqp:source:list is not supported")
    if source.dynamic:
        address, routing = _temporary(client, link, source.capabilities)
        engine = client.engine
        client.authorize(Permission.CONSUME, address)
        answer = dataclasses.replace(source, address=address)
        if routing is Routing.ANYCAST:
            _consume(client, link, engine.queue(address), None, source=answer)
        else:
            client.authorize(Permission.CREATE_NON_DURABLE_QUEUE, address)
            queue = engine.create_queue(f"{address}.{uuid.uuid4()}", address, routing, durable=False, user=client.user)
            _consume(client, link, queue, None, source=answer, made_for=True)
        return
    place = place_of(source.address, source.capabilities)
    if place.address == MANAGEMENT_ADDRESS:
        raise AmqpError(
            NOT_ALLOWED,
            f"{MANAGEMENT_ADDRESS} has no messages to consume; its responses go to the reply-to of the request, such as a temporary queue",
        )
    if place.address.startswith(TEMPORARY_PREFIX) and place.address not in client.temporary.values():
        raise AmqpError(NOT_ALLOWED, f"only its own connection may consume from temporary destination {place.address!r}")
    selector = _selector(link)
    routing = routing_at(client, place)
    browses = routing is Routing.ANYCAST and source.distribution_mode == "copy"
    client.authorize(Permission.BROWSE if browses else Permission.CONSUME, place.address)
    client.authorize_creation(place.address, routing)
    if routing is Routing.MULTICAST:
        _subscribe(client, link, source, place.address, selector)
        return
    queue = client.engine.queue(place.address, client.user)
    if browses:
        _browse(client, link, queue, selector)
    else:
        _consume(client, link, queue, selector)


def _selector(link: Link) -> Selector | None:
    text = selector_of(link)
    try:
        return compile_selector(text) if text else None
    except SelectorError as error:
        raise AmqpError(INVALID_FIELD, str(error)) from error


def _consume(
    client: Client, link: SenderLink, queue: BrokerQueue, selector: Selector | None, *, source: Source | None = None, made_for: bool = False
) -> None:
    """Attach a consumer. A queue that is made for its consumers is deleted with the last of them, or if this consumer is refused."""
    engine = client.engine
    consumer = consumer_link(
        client, link, settled=link.remote.snd_settle_mode == SenderSettleMode.SETTLED,
        keeps_credit=in_first_transaction(client, link.session),
    )  # fmt: skip
    link.context = consumer
    consumer.on_close = queue if made_for else None
    consumer.consumer = engine.attach(queue, consumer, selector, client.user)
    # Tell the client only after the queue, or the subscription, is stored.
    client.links.waits(link, short=bool(engine.memory.blocked))
    engine.journaling.tell(_accept, client, link, source)


def _accept(client: Client, link: SenderLink, source: Source | None) -> None:
    client.links.answered(link)
    if link.context is not None and not client.lost:
        _answer(link, source=source)
        link.context.granted()
        client.wake(link)  # credit that came with the attach counts from now on
        client.touch()


def _browse(client: Client, link: SenderLink, queue: BrokerQueue, selector: Selector | None) -> None:
    link.context = BrowserLink(client, link, queue, selector)
    _answer(link)


def _subscribe(client: Client, link: SenderLink, source: Source, address: str, selector: Selector | None) -> None:
    """Attach a consumer of a topic. Its subscription is a queue that takes the messages that its selector matches."""
    engine = client.engine
    engine.check_topic(address)
    shared = "shared" in source.capabilities
    durable = bool(source.durable) or source.expiry_policy == "never"
    text = selector.text if selector is not None else ""
    no_local = client.container if no_local_of(link) else ""
    if not shared and not durable:
        client.authorize(Permission.CREATE_NON_DURABLE_QUEUE, address)
        queue = engine.create_queue(
            f"{address}.{uuid.uuid4()}", address, Routing.MULTICAST, durable=False, selector=text, no_local=no_local, user=client.user
        )
        _consume(client, link, queue, None, made_for=True)
        return
    owner, name = _subscription(client, link)
    existing = _existing(client, owner, name, durable=durable)
    if existing is not None and owner is not None:
        check_owner(client, existing)
    elif owner is not None and durable:
        check_client_id(client)
    if existing is not None and durable and existing.shared != shared:
        there = "shared" if existing.shared else "unshared"
        raise AmqpError(NOT_ALLOWED, f"subscription {name!r} exists as {there}; unsubscribe it first")
    replaced = None
    if existing is not None and (existing.address, existing.selector_text, existing.no_local_container) != (address, text, no_local):
        if existing.consumers:
            raise AmqpError(NOT_ALLOWED, f"subscription {name!r} is in use with another topic or selector")
        client.authorize(Permission.to_delete(durable=durable), existing.address)
        client.authorize(Permission.to_create(durable=durable), address)
        existing, replaced = None, existing  # as unsubscribe and subscribe again (Jakarta Messaging 3.1, section 8.3.3)
    if existing is not None and existing.consumers and not shared:
        raise AmqpError(NOT_ALLOWED, f"durable subscription {name!r} already has a consumer")
    if existing is None:
        client.authorize(Permission.to_create(durable=durable), address)
    elif owner is not None and durable:
        take_over(client, existing)
    queue = existing or engine.create_queue(
        subscription_queue(owner, name, durable=durable), address, Routing.MULTICAST, durable=durable, selector=text, no_local=no_local,
        subscription=name, shared=shared, user=client.user, replaces=replaced,
    )  # fmt: skip
    _consume(client, link, queue, None, made_for=not durable)


def _subscription(client: Client, link: Link) -> tuple[str | None, str]:
    """Return the client id and the name of a durable or shared subscription. The client id is None for a global one. Raises AmqpError."""
    name, _, suffix = link.name.partition(NAME_DELIMITER)
    if not name:
        raise AmqpError(
            INVALID_FIELD, f"link name {link.name!r:.60} contains no subscription name; a link name must not begin with {NAME_DELIMITER!r}"
        )
    return None if suffix.startswith("global") else client.container, name


def _existing(client: Client, owner: str | None, name: str, *, durable: bool) -> BrokerQueue | None:
    """Return the subscription, or None. An earlier version escaped no dots, and stored the name of the queue as the subscription's name."""
    former = name if owner is None else f"{owner}.{name}"
    subscriptions = client.engine.addresses.subscriptions
    for queue_name, kept in ((subscription_queue(owner, name, durable=durable), name), (former, former)):
        queue = subscriptions.get(queue_name)
        if queue is not None and queue.subscription == kept and queue.durable is durable:
            return queue
    return None


def _find_subscription(client: Client, link: SenderLink) -> None:
    """Attach a link with a null source to the subscription that its name says; closing the link deletes the subscription (unsubscribe)."""
    owner, name = _subscription(client, link)
    queue = _existing(client, owner, name, durable=True)
    if queue is None:
        raise AmqpError(NOT_FOUND, f"there is no subscription {name!r}")
    if owner is not None:
        check_owner(client, queue)
    if queue.consumers:
        raise AmqpError(NOT_ALLOWED, f"subscription {name!r} is in use")
    client.authorize(Permission.DELETE_DURABLE_QUEUE, queue.address)
    client.unsubscribing[link] = queue
    _answer(link, source=Source(address=queue.address, durable=2, expiry_policy="never", distribution_mode="copy", capabilities=("topic",)))


# -- the end of a link -------------------------------------------------------------------------------------------------


def detached(client: Client, link: Link, *, closed: bool, orderly: bool = False) -> None:
    """Release a link that its client has closed, or that ended with its session or connection.

    If ``orderly`` is true, the client has settled all messages that its application has seen. This holds if a client closes a single link,
    and with some clients if it ends a session or a connection (Client._tells).
    """
    engine = client.engine
    context, link.context = link.context, None
    if isinstance(context, CoordinatorLink):
        context.abandon()
    elif isinstance(context, ProducerLink):
        context.closed()
        if context.address is not None and context.routing is not None:
            engine.detach_producer(context.address, context.routing)
    elif isinstance(context, ConsumerLink):
        if context.consumer is not None:
            # Most of the messages were prefetched and never seen, so this must not bring them nearer to the dead-letter address.
            engine.detach(context.consumer, failed=False, seen=not orderly)
        if context.on_close is not None and not context.on_close.consumers:
            with client.changing():
                engine.delete_queue(context.on_close)
    elif isinstance(context, BrowserLink):
        context.closed()
    queue = client.unsubscribing.pop(link, None)
    if queue is not None and closed:
        client.unsubscribed(queue)
    temporary = client.temporary.pop(link, None)
    if temporary is not None:
        with client.changing():
            engine.delete_temporary(temporary)
