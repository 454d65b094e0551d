"""The address book: which queues, subscriptions and diverts are bound to an address, and thus where a message goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Final, NamedTuple

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import USER_SHARE, Beyond, StepsUse, beyond, of_user_beyond
from bascule.broker.memory import CLIENT_ID_BYTES, QUEUE_BYTES, ROUTE_BYTES, MemoryAccount
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.subscription_names import owner_of
from bascule.core.address_index import AddressIndex
from bascule.core.destination import Routing, has_wildcards
from bascule.journal.records import EncodedRoute

#: Prefix of names that only the broker gives: a client cannot create a temporary destination by its name.
TEMPORARY_PREFIX = "temp."


class ExclusiveDivert(NamedTuple):
    """A divert that takes matching messages away from local queues. ``matches(body)`` is its selector."""

    name: str
    pattern: str
    matches: Callable[[bytes], bool]
    from_kafka: bool = False  # whether it also takes messages from Kafka


@dataclass(frozen=True, slots=True)
class Diverts:
    """The settings of diverts that the broker needs."""

    exclusive: tuple[ExclusiveDivert, ...] = ()
    patterns: tuple[str, ...] = ()  # of all diverts: non-persistent messages on such an address are journaled for them
    #: Addresses whose persistent messages are journaled even if no durable queue and no divert wants them (docs/adr/0002).
    replayable: tuple[str, ...] = ("#",)
    names: tuple[str, ...] = ()  # of all enabled diverts; written into the start record of the epoch, for the pipelines


def durable_ids(queues: Iterable[BrokerQueue]) -> tuple[int, ...]:
    """Return the ids of the queues that are in the journal."""
    return tuple(queue.id for queue in queues if queue.durable)


class Route(NamedTuple):
    """The destinations of messages to one address."""

    queues: tuple[BrokerQueue, ...]
    target: EncodedRoute  # the address and the ids of its durable queues, as in a journal record
    exclusive: tuple[ExclusiveDivert, ...]
    diverted: bool
    recorded: bool  # a persistent message is journaled: see Diverts.replayable
    filtered: bool  # some queue has a selector or refuses messages of its own connection
    limited: bool  # some queue has a maximum depth
    expiring: bool  # the settings of the address can change the expiry of messages
    steps: int  # to find the queues that want a message, and to put it into them


#: Limit of selector steps for one message: for all subscriptions of one address, and for all subscriptions with wildcards. Both together
#: are the work of one turn for a message. Each selector takes one step more than it has, but the longest one is allowed on its own.
SELECTOR_STEPS_MAX = 20_000
#: Limit of the steps to compare an address with the patterns of all subscriptions with wildcards, which is done when the address is used
#: after a subscription has changed. Patterns of fewer words than in a step count for none, unless they have another wildcard besides a #
#: before their end: a search may examine all of these.
PATTERN_STEPS_MAX = 10_000
#: Words of a pattern that are compared in a step of about a microsecond.
PATTERN_WORDS_PER_STEP: Final = 10
#: Steps to decide for one queue whether it gets a message.
PUT_STEPS = 2
#: Maximum number of routes that are kept. Anonymous producers may use any number of addresses, and routes are cheap to compute again.
ROUTES_MAX = 10_000


#: The key of all addresses with wildcards, since a message may match any number of them.
_WILDCARDS = "#"


def _steps_key(address: str) -> str:
    return _WILDCARDS if has_wildcards(address) else address


def _pattern_steps(queue: BrokerQueue) -> int:
    """Return the steps to compare an address with the pattern of a subscription; 0 for a queue, and for an address without wildcards.

    An address may lead a search to all patterns that have another wildcard besides a ``#`` in the middle, and only to a few short ones of
    the others.
    """
    if queue.routing is Routing.ANYCAST or not has_wildcards(queue.address):
        return 0
    words = queue.address.split(".")
    spreads = "#" in words[:-1] and words.count("#") + words.count("*") > 1
    return max(len(words) // PATTERN_WORDS_PER_STEP, int(spreads))


def _names_bytes(queue: BrokerQueue) -> int:
    return sum(map(getsizeof, {queue.name, queue.address, queue.subscription}))


def _queue_bytes(queue: BrokerQueue) -> int:
    return QUEUE_BYTES + _names_bytes(queue)


def _size_of(address: str, route: Route) -> int:
    return ROUTE_BYTES + getsizeof(address) + getsizeof(route.queues) + getsizeof(route.target.encoded)


@dataclass(slots=True)
class AddressBook:
    """All queues by id, by name and by address. Routes are computed once and kept until a binding changes."""

    policy: Policy
    memory: MemoryAccount
    diverts: Diverts = field(default_factory=Diverts)
    producers: Counter[tuple[str, Routing]] = field(default_factory=Counter)  # number of links that send to an address
    temporary: set[str] = field(default_factory=set)  # names of temporary destinations
    queues: dict[int, BrokerQueue] = field(default_factory=dict)
    anycast: dict[str, BrokerQueue] = field(default_factory=dict)  # by address, which is also the name of the queue
    subscriptions: dict[str, BrokerQueue] = field(default_factory=dict)  # by subscription queue name
    queues_of: Counter[str] = field(default_factory=Counter)  # queues and subscriptions, by the user who created them
    durable_subscriptions_of: Counter[str] = field(default_factory=Counter)  # durable subscriptions, by the user who created them
    subscribers: dict[str, Counter[str]] = field(
        default_factory=dict
    )  # users of the durable subscriptions of each client id, with their number
    _bound: AddressIndex[BrokerQueue] = field(default_factory=AddressIndex)  # subscriptions, by the pattern of their address
    _exclusive: AddressIndex[ExclusiveDivert] = field(default_factory=AddressIndex)
    _diverted: AddressIndex[str] = field(default_factory=AddressIndex)
    _replayable: AddressIndex[str] = field(default_factory=AddressIndex)
    routes_bytes: int = 0  # bytes of the routes that are kept
    names_bytes: int = 0  # bytes of the names of queues, and of client ids with durable subscriptions
    version: int = 0  # changes with each change of a binding
    forgotten: int = 0  # how often routes were forgotten, also because bindings have changed
    routes: dict[tuple[str, Routing], Route] = field(default_factory=dict)  # the routes that are kept
    _selector_steps: StepsUse = field(default_factory=StepsUse)  # by address; one sum for all addresses with wildcards
    _pattern_steps: StepsUse = field(default_factory=StepsUse)  # of all subscriptions with wildcards
    _bytes_of: Counter[str] = field(default_factory=Counter)  # memory of queues and subscriptions, by the user who created them
    _created_bytes: int = 0  # of these bytes, those of all users except the owner of the broker

    def __post_init__(self) -> None:
        self.use(self.diverts)

    def add(self, queue: BrokerQueue) -> None:
        """Bind a queue to its address."""
        self.queues[queue.id] = queue
        if queue.routing is Routing.ANYCAST:
            self.anycast[queue.name] = queue
        else:
            self.subscriptions[queue.name] = queue
            self._bound.add(queue.address, queue)
        self._count(queue, 1)
        self._changed_by(queue)

    def remove(self, queue: BrokerQueue) -> None:
        """Remove a queue."""
        if self.queues.pop(queue.id, None) is not None:
            self._count(queue, -1)
        if queue.routing is Routing.ANYCAST:
            self.anycast.pop(queue.name, None)
        else:
            self.subscriptions.pop(queue.name, None)
            self._bound.remove(queue.address, queue)
        self._changed_by(queue)

    def change_user(self, queue: BrokerQueue, user: str) -> None:
        """Count a queue for another user."""
        if user != queue.user:
            self._count(queue, -1)
            queue.user = user
            self._count(queue, 1)

    def check_room(self, queue: BrokerQueue) -> None:
        """Check that there is memory for one more queue of a user; the owner of the broker always has some. Raises ResourceLimit."""
        user, used, most = queue.user, self._created_bytes, self.memory.queues_max_bytes
        found = beyond(_queue_bytes(queue), self._bytes_of[user], used, most) if user else None
        if found is None:
            return
        whose = ""
        if found is Beyond.SHARE:
            whose, used, most = f" {of_user_beyond(user)}", self._bytes_of[user], int(USER_SHARE * most)
        raise ResourceLimit(f"queue {queue.name[:60]!r}: queues and subscriptions{whose} use {used} bytes of {most} (broker.memory_bytes)")

    def check_steps(self, queue: BrokerQueue, replaces: BrokerQueue | None = None) -> None:
        """Check that selectors and patterns stay within their limits of steps with one more subscription. Raises ResourceLimit.

        A subscription that ``replaces`` another one may always take as many steps as that one: an earlier version with a higher limit may
        have stored more. The only subscription with a selector may have the longest selector, and takes one step more.
        """
        words = _pattern_steps(queue)
        fewer = _pattern_steps(replaces) if replaces is not None else 0
        stays = queue.user if replaces is None else replaces.user
        if words > fewer and (found := self._pattern_steps.beyond(words, fewer, "", queue.user, stays, PATTERN_STEPS_MAX)):
            raise ResourceLimit(
                f"the pattern {queue.address[:60]!r} has {queue.address.count('.') + 1} words; the patterns of {found.whose} together"
                f" may have {found.most * PATTERN_WORDS_PER_STEP}, of which one with # before its end and another wildcard counts for at"
                f" least {PATTERN_WORDS_PER_STEP}; use shorter patterns with fewer wildcards"
            )
        key, steps = _steps_key(queue.address), queue.wanting_steps
        fewer = replaces.wanting_steps if replaces is not None and _steps_key(replaces.address) == key else 0
        most = SELECTOR_STEPS_MAX + (self._selector_steps.total[key] == fewer)
        if steps > fewer and (found := self._selector_steps.beyond(steps, fewer, key, queue.user, stays, most)):
            where = "with wildcards" if has_wildcards(queue.address) else f"of {queue.address[:60]!r}"
            raise ResourceLimit(
                f"the selector has {steps} steps; the selectors of {found.whose} {where} may take {found.most} for each message"
            )

    def _count(self, queue: BrokerQueue, change: int) -> None:
        self.memory.selectors.add(change * queue.selector_chars, queue.user)
        self.names_bytes += change * _names_bytes(queue)
        self._bytes_of[queue.user] += change * _queue_bytes(queue)
        if not self._bytes_of[queue.user]:
            del self._bytes_of[queue.user]
        if queue.user:
            self._created_bytes += change * _queue_bytes(queue)
        self._pattern_steps.add(change * _pattern_steps(queue), "", queue.user)
        self._selector_steps.add(change * queue.wanting_steps, _steps_key(queue.address), queue.user)
        counts, client_id = [self.queues_of], None
        if queue.durable and queue.subscription:
            counts.append(self.durable_subscriptions_of)
            client_id = owner_of(queue.name, queue.subscription)
            if client_id is not None:
                if client_id not in self.subscribers:
                    self.subscribers[client_id] = Counter()
                    self.names_bytes += CLIENT_ID_BYTES + getsizeof(client_id)
                counts.append(self.subscribers[client_id])
        for count in counts:
            count[queue.user] += change
            if not count[queue.user]:
                del count[queue.user]
        if client_id is not None and not self.subscribers[client_id]:
            del self.subscribers[client_id]
            self.names_bytes -= CLIENT_ID_BYTES + getsizeof(client_id)

    def use(self, diverts: Diverts) -> None:
        """Use the diverts of the current configuration."""
        self.diverts = diverts
        self._exclusive = AddressIndex((divert.pattern, divert) for divert in diverts.exclusive)
        self._diverted = AddressIndex((pattern, pattern) for pattern in diverts.patterns)
        self._replayable = AddressIndex((pattern, pattern) for pattern in diverts.replayable)
        self._changed()

    def use_policy(self, policy: Policy) -> None:
        """Use another policy."""
        self.policy = policy
        self._changed()

    @property
    def searched(self) -> int:
        """Return the steps of all searches for the subscriptions of an address so far."""
        return self._bound.searched

    def route(self, address: str, routing: Routing) -> Route:
        """Return the route of messages that are sent to ``address`` as ``routing`` says."""
        key = (address, routing)
        route = self.routes.get(key)
        if route is None:
            if len(self.routes) >= ROUTES_MAX:
                self.forget_routes()
            route = self.routes[key] = self._work_out(address, routing)
            self.routes_bytes += _size_of(address, route)
        return route

    def _work_out(self, address: str, routing: Routing) -> Route:
        bound: Iterable[BrokerQueue]
        if routing is Routing.ANYCAST:
            queue = self.anycast.get(address)
            bound = (queue,) if queue is not None else ()
        elif address.startswith(TEMPORARY_PREFIX):  # only its own connection may consume from it
            bound = self._bound.under(address)
        else:
            bound = self._bound.matching(address)
        queues = tuple(bound)
        settings = self.policy.of(address)
        ids = durable_ids(queues)
        diverted = bool(self._diverted.matching(address))
        wanted = routing is Routing.ANYCAST or bool(ids) or diverted
        recorded = wanted or bool(self._replayable.matching(address))
        return Route(
            queues,
            EncodedRoute.of(address, ids),
            tuple(self._exclusive.matching(address)),
            diverted,
            recorded,
            any(queue.selector_text or queue.no_local_container for queue in queues),
            any(queue.settings.max_messages or queue.settings.max_bytes for queue in queues),
            bool(settings.expiry_ms or settings.expiry_max_ms),
            sum(PUT_STEPS + queue.wanting_steps for queue in queues),
        )

    def _changed(self) -> None:
        self.version += 1
        self.forget_routes()

    def _changed_by(self, queue: BrokerQueue) -> None:
        """Forget the routes that a new or deleted queue may change: one, unless the queue is a subscription with wildcards.

        Clients may create subscriptions all the time, and the route of a topic with many subscriptions takes long to compute.
        """
        if queue.routing is not Routing.ANYCAST and has_wildcards(queue.address):
            self._changed()
            return
        self.version += 1
        self.forgotten += 1
        address = queue.name if queue.routing is Routing.ANYCAST else queue.address
        route = self.routes.pop((address, queue.routing), None)
        if route is not None:
            self.routes_bytes -= _size_of(address, route)

    def forget_routes(self) -> None:
        """Drop all routes; they are computed again when they are needed."""
        self.routes.clear()
        self.routes_bytes = 0
        self.forgotten += 1

    def knows(self, address: str, routing: Routing) -> bool:
        """Return True if a message to the address, or a consumer of the address, would not have to create it.

        Clients cannot create temporary destinations by name, and the owner of the broker has created what the configuration names.
        """
        if address.startswith(TEMPORARY_PREFIX):
            return True
        if routing is Routing.ANYCAST:
            return address in self.anycast or address in self.policy.queues
        return bool(self.route(address, routing).queues) or address in self.policy.topics

    def __contains__(self, address: str) -> bool:
        return address in self.anycast or bool(self._bound.under(address))
