"""The status of a broker, for the admin server."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, TypedDict

import bascule
from bascule.broker.branch_requests import STATES
from bascule.broker.branches import Listed
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.counters import Counters
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.core.build import build
from bascule.server.housekeeping import NO_SNAPSHOT
from bascule.server.links import ConsumerLink, ProducerLink

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.broker.retention import RetentionHold
    from bascule.server.connection import ClientConnection
    from bascule.server.node import Node
    from bascule.server.spill import SpillFiles
    from bascule.server.usage import UserUsage

#: Field of the engine's counters -> name of the metric.
COUNTERS = {
    "messages_in": "messages_in",
    "messages_out": "messages_out",
    "acknowledged": "messages_acknowledged",
    "redelivered": "messages_redelivered",
    "dead_lettered": "messages_dead_lettered",
    "expired": "messages_expired",
    "expired_subscriptions": "subscriptions_expired",
    "dropped": "messages_dropped",
    "duplicates": "duplicates_recognised",
    "duplicate_ids_forgotten": "duplicate_ids_forgotten",
    "committed": "transactions_committed",
    "rolled_back": "transactions_rolled_back",
}
#: Name of a gauge or counter of the status -> help of the metric.
HELP = {
    "connections": "Connections that have logged in",
    "handshakes": "Connections that have not logged in yet",
    "journal_offset": "Offset up to which this broker has read the journal, or written it if it serves",
    "journal_foreign_records": "Records of the journal that Bascule did not write, in the current epoch",
    "ingress_foreign_records": "Records of the ingress topic that Bascule did not write, in the current epoch",
    "standby": "1 while this broker is a standby that is ready to take over",
    "watches_elected": "1 while this standby has a connection to the elected broker, whose loss starts a takeover",
    "queues": "Queues and subscriptions",
    "transactions_open": "Open local transactions",
    "branches_prepared": "Branches of distributed transactions that wait for their outcome",
    "epoch": "Number of the epoch: the offset of its start record",
    "journal_sequence": "Sequence number of the last record of the journal that is stored",
    "journal_in_flight_bytes": "Size of the records of the journal that are appended and not yet stored",
    "memory_bodies_bytes": "Size of the message bodies in memory",
    "snapshot_timestamp_seconds": "Time at which Kafka stored the last snapshot of this epoch; 0 if there is none yet",
    "snapshot_bytes": "Size of the last snapshot of this epoch, which a broker loads when it starts; 0 if there is none yet",
    "spilled_bodies_bytes": "Size of the message bodies in spill files",
    "messages_in": "Messages accepted from producers and ingresses",
    "messages_out": "Messages delivered to consumers",
    "messages_acknowledged": "Messages acknowledged by consumers",
    "messages_redelivered": "Messages delivered again",
    "messages_dead_lettered": "Messages moved after too many failed deliveries",
    "messages_expired": "Messages removed because they expired",
    "subscriptions_expired": "Durable subscriptions deleted because they were not used",
    "messages_dropped": "Non-persistent messages dropped from full queues",
    "duplicates_recognised": "Repeated sends that were not stored again",
    "duplicate_ids_forgotten": "Message ids that were forgotten early because the duplicate windows used too much memory",
    "transactions_committed": "Local transactions committed",
    "transactions_rolled_back": "Local transactions rolled back",
    "uncaught_errors": "Errors of tasks that no code has handled",
    "connections_refused": "Connections refused because of a limit",
    "logins_failed": "Logins with an unknown user, a wrong password or a wrong token",
    "logins_delayed": "Logins that waited because of failures before them",
    "logins_refused": "Logins refused without a check because of failures before them",
    "handshakes_aborted": "Connections closed before login, to admit waiting connections",
    **{f"{kind}_errors": f"Errors of the kind {kind} that the broker contained" for kind in ErrorKind},
}


class BrokerRole(enum.StrEnum):
    """The role of a broker that is ready."""

    ACTIVE = "active"  # it serves clients
    STANDBY = "standby"  # it follows the journal, and takes over if the active broker ends


class QueueStatus(TypedDict):
    """One queue, or the queue of a subscription."""

    name: str
    address: str
    routing: str  # anycast | multicast
    messages: int  # messages that consumers may get now
    bytes: int  # of all its messages
    delivering: int  # with consumers, not settled
    delayed: int  # messages whose delivery time has not come
    consumers: int
    durable: bool


class ConsumerStatus(TypedDict):
    """One consumer of a queue."""

    connection: str
    client_id: str
    selector: str
    unsettled: int
    credit: int


class QueueDetail(QueueStatus):
    """A queue in detail. ``settings`` are those of its address, times in ms."""

    auto_created: bool
    selector: str
    no_local: str
    full: bool
    consumer_list: list[ConsumerStatus]
    settings: dict[str, Any]


class SubscriptionStatus(TypedDict):
    """One subscription of a topic."""

    name: str
    topic: str
    durable: bool
    selector: str
    messages: int
    delivering: int
    consumers: int
    unused_since_ms: int  # of a durable subscription: when its last consumer left, 0 while it has one


class ConnectionStatus(TypedDict):
    """One client connection; ``id`` is its HOST:PORT."""

    id: str
    client_id: str
    user: str
    mechanism: str  # SASL mechanism of the login
    producers: int
    consumers: int
    transactions: int


class UserStatus(TypedDict):
    """The usage of one connected user, and the queues and subscriptions that the user has created."""

    user: str
    connections: int
    sessions: int
    links: int
    transactions: int
    queues: int
    durable_subscriptions: int


class BranchStatus(TypedDict):
    """One branch of a transaction over several resources."""

    xid: str
    state: str  # prepared | heuristic-commit | heuristic-rollback
    since_ms: int  # since the epoch
    sent: int  # messages
    received: int
    bytes: int  # of the messages that it sends
    user: str  # whose branch it is


class RetentionHoldStatus(TypedDict):
    """One pin of the journal, as of the last snapshot. See RetentionHold."""

    keeper: str  # pipeline | queue | branch | retention | snapshot
    name: str
    offset: int  # from this offset the journal is kept
    records: int
    bytes: int
    reason: str
    released: bool


class MemoryStatus(TypedDict):
    """The account of the broker's memory; see bascule.broker.memory. ``parts`` are in bytes."""

    limit_bytes: int
    used_bytes: int
    blocked: str  # why producers wait; empty if they do not
    parts: dict[str, int]
    spilled_bytes: int  # bodies in spill files
    spill_bytes: int  # size of these files
    spill_limit_bytes: int


class BrokerStatus(TypedDict):
    """The status of a broker. ``counters`` only grow while the process lives; names are snake case, with their unit."""

    bridge: str
    version: str
    build: str  # compiled | interpreted
    state: str  # serving | standby | waiting
    serving: bool
    reason: str  # why the broker does not serve; empty if it does
    queues: list[QueueStatus]
    pins: list[RetentionHoldStatus]
    users: list[UserStatus]  # connected users
    branches: list[BranchStatus]  # prepared, or ended by an administrator and not forgotten
    memory: MemoryStatus | None  # None until the state is loaded
    gauges: dict[str, float]
    counters: dict[str, float]


def status_of(node: Node, queues: list[QueueStatus], branches: list[BranchStatus], users: list[UserStatus]) -> BrokerStatus:
    """Return the status of the broker.

    The caller describes queues, branches and users over several turns of the event loop, since they may be many.
    """
    engine = node.loaded_engine
    gauges: dict[str, float] = {
        "connections": node.usage.connections.count, "handshakes": len(node.handshakes),
        "journal_offset": node.journal_offset, "journal_foreign_records": node.foreign_records,
        "ingress_foreign_records": node.ingress_foreign_records, "watches_elected": int(node.watches_elected),
        "standby": int(node.role is BrokerRole.STANDBY),
    }  # fmt: skip
    memory: MemoryStatus | None = None
    if engine is not None:
        journaling, bodies, housekeeping = engine.journaling, engine.bodies, node.housekeeping
        snapshot = NO_SNAPSHOT if housekeeping is None else housekeeping.snapshot
        memory = memory_status(engine, node.spill)
        gauges |= {
            "queues": len(engine.addresses.queues), "transactions_open": len(engine.transactions),
            "branches_prepared": len(engine.branches.prepared),
            "epoch": journaling.epoch, "journal_sequence": journaling.confirmed_sequence,
            "journal_in_flight_bytes": journaling.in_flight_bytes,
            "snapshot_timestamp_seconds": snapshot.stored_s, "snapshot_bytes": snapshot.size_bytes,
            "memory_bodies_bytes": bodies.memory_bytes, "spilled_bodies_bytes": bodies.stored_bytes,
        }  # fmt: skip
    return BrokerStatus(
        bridge=node.settings.bridge.id, version=bascule.__version__, build=build(),
        state=_state(node.role), serving=node.serving, reason=node.trouble,
        queues=queues, pins=[hold_status(hold) for hold in holds_of(node)],
        users=users, branches=branches, memory=memory, gauges=gauges, counters=_named(node.counters) | {
            "uncaught_errors": node.uncaught.total, "connections_refused": node.refused_connections,
            "handshakes_aborted": node.handshakes.aborted, "logins_failed": node.logins.failed,
            "logins_delayed": node.logins.delayed, "logins_refused": node.logins.refused,
        } | error_counters(node.errors),
    )  # fmt: skip


def _state(role: BrokerRole | None) -> str:
    if role is None:
        return "waiting"
    return "serving" if role is BrokerRole.ACTIVE else role


def memory_status(engine: Engine, spill: SpillFiles | None) -> MemoryStatus:
    """Return the memory of the broker by part, and whether producers wait."""
    account = engine.memory
    return MemoryStatus(
        limit_bytes=account.limit_bytes, used_bytes=account.used_bytes, blocked=account.blocked,
        parts={str(part): used_bytes for part, used_bytes in account.parts().items()}, spilled_bytes=engine.bodies.stored_bytes,
        spill_bytes=spill.used_bytes if spill is not None else 0, spill_limit_bytes=spill.limit_bytes if spill is not None else 0,
    )  # fmt: skip


def user_status(engine: Engine | None, usage: UserUsage) -> UserStatus:
    """Return the usage of one connected user. ``engine`` is None until the state is loaded."""
    user = usage.user
    return UserStatus(
        user=user, connections=usage.connections.count, sessions=usage.sessions.count, links=usage.links.count,
        transactions=usage.transactions.count, queues=engine.addresses.queues_of[user] if engine is not None else 0,
        durable_subscriptions=engine.addresses.durable_subscriptions_of[user] if engine is not None else 0,
    )  # fmt: skip


def branch_status(branch: Listed) -> BranchStatus:
    """Return the status of one branch."""
    return BranchStatus(
        xid=str(branch.xid), state=STATES[branch.ending], since_ms=branch.since_ms, sent=branch.sent, received=branch.received,
        bytes=branch.size_bytes, user=branch.user,
    )  # fmt: skip


def holds_of(node: Node) -> list[RetentionHold]:
    """Return what the journal is kept for, as of the last snapshot."""
    return [] if node.housekeeping is None else node.housekeeping.retention_holds


def hold_status(hold: RetentionHold) -> RetentionHoldStatus:
    """Return the status of one pin."""
    return RetentionHoldStatus(
        keeper=hold.keeper,
        name=hold.name,
        offset=hold.offset,
        records=hold.records,
        bytes=hold.bytes,
        reason=hold.reason,
        released=hold.released,
    )


def _named(counters: Counters) -> dict[str, float]:
    return {COUNTERS[field]: value for field, value in dataclasses.asdict(counters).items()}


def error_counters(errors: ErrorContainment) -> dict[str, float]:
    """Return the number of contained errors by kind."""
    return {f"{kind}_errors": errors.counts[kind] for kind in ErrorKind}


def sum_of(one: Counters, other: Counters) -> Counters:
    """Return the sums of two sets of counters."""
    fields = dataclasses.fields(Counters)
    return Counters(*(getattr(one, field.name) + getattr(other, field.name) for field in fields))


def queue_status(queue: BrokerQueue) -> QueueStatus:
    """Return the status of one queue."""
    return QueueStatus(
        name=queue.name, address=queue.address, routing=queue.routing.name.lower(), messages=queue.waiting_count,
        bytes=queue.held_bytes, delivering=queue.delivering_count, delayed=len(queue.delayed), consumers=len(queue.consumers),
        durable=queue.durable,
    )  # fmt: skip


def queue_detail(queue: BrokerQueue) -> QueueDetail:
    """Return one queue in detail. The caller describes its consumers, since they may be many."""
    return QueueDetail(
        **queue_status(queue), auto_created=queue.auto_created, selector=queue.selector_text, no_local=queue.no_local_container,
        full=queue.full(), consumer_list=[], settings=dataclasses.asdict(queue.settings),
    )  # fmt: skip


def consumer_status(consumer: QueueConsumer) -> ConsumerStatus:
    """Return the status of one consumer."""
    link = consumer.port
    client = link.client if isinstance(link, ConsumerLink) else None
    return ConsumerStatus(
        connection=client.peer if client else "", client_id=client.container if client else "", selector=consumer.selector_text,
        unsettled=len(consumer.unacked), credit=link.credit,
    )  # fmt: skip


def subscription_status(queue: BrokerQueue) -> SubscriptionStatus:
    """Return the status of one subscription, by its queue."""
    return SubscriptionStatus(
        name=queue.name, topic=queue.address, durable=queue.durable, selector=queue.selector_text, messages=queue.waiting_count,
        delivering=queue.delivering_count, consumers=len(queue.consumers), unused_since_ms=queue.unused_since_ms,
    )  # fmt: skip


def connection_status(connection: ClientConnection) -> ConnectionStatus:
    """Return the status of one client connection."""
    client = connection.client
    contexts = [link.context for link in client.links]
    return ConnectionStatus(
        id=connection.peer, client_id=client.container, user=client.user, mechanism=client.mechanism,
        producers=sum(isinstance(context, ProducerLink) for context in contexts),
        consumers=sum(isinstance(context, ConsumerLink) for context in contexts), transactions=len(client.transactions),
    )  # fmt: skip
