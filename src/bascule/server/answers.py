"""The answers of the admin server that have no type of their own elsewhere. The OpenAPI document is made from these types.

Times are in ms since 1970, sizes in bytes.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from bascule.server.status import (
    BranchStatus,
    ConnectionStatus,
    MemoryStatus,
    QueueStatus,
    RetentionHoldStatus,
    SubscriptionStatus,
)


class ErrorAnswer(TypedDict):
    """Why a request was refused or failed."""

    error: str


# -- lists and the whole broker ----------------------------------------------------------------------------------------


class PartAnswer(TypedDict):
    """A part of a list: ``found`` is the number of entries that the search finds, ``total`` that of all.

    ``serving``: the broker serves clients. The lists of a standby are empty.
    """

    found: int
    total: int
    serving: bool


class QueuesPart(PartAnswer):
    """A part of the list of queues."""

    entries: list[QueueStatus]


class BrokerAnswer(TypedDict):
    """A broker that stands for election: its name, and the address from which it reaches Kafka. ``this``: it has answered.

    A broker that was killed is in the list until its session ends.
    """

    name: str
    host: str
    elected: bool
    this: bool


class TopicSums(TypedDict):
    """One topic, with sums over its subscriptions."""

    name: str
    subscriptions: int
    messages: int
    consumers: int


class TopicsPart(PartAnswer):
    """A part of the list of topics."""

    entries: list[TopicSums]


class SubscriptionsPart(PartAnswer):
    """A part of the list of subscriptions."""

    entries: list[SubscriptionStatus]


class ConnectionsPart(PartAnswer):
    """A part of the list of connections."""

    entries: list[ConnectionStatus]


class BranchesPart(PartAnswer):
    """A part of the list of branches of distributed transactions."""

    entries: list[BranchStatus]


class LinkAnswer(TypedDict):
    """One producer, consumer or browser of a connection."""

    role: str
    address: str
    queue: str
    selector: str
    unsettled: int
    credit: int


class LinksAnswer(ConnectionStatus):
    """A connection with its links. ``cut``: it has more of them."""

    links: list[LinkAnswer]
    cut: bool


class QueueSums(TypedDict):
    """Sums over all queues."""

    messages: int
    bytes: int
    delivering: int
    delayed: int
    consumers: int


class SendSums(TypedDict):
    """Persistent messages accepted outside of transactions since the process began, and the time that their senders waited.

    ``counts`` has the number of messages for each upper bound of ``bounds_s``, not cumulative, and one for longer times.
    """

    count: int
    seconds: float
    bounds_s: list[float]
    counts: list[int]


class OverviewAnswer(TypedDict):
    """The status without lists, with sums over all queues."""

    bridge: str
    version: str
    build: str
    state: str
    serving: bool
    reason: str
    pins: list[RetentionHoldStatus]
    memory: MemoryStatus | None
    gauges: dict[str, float]
    counters: dict[str, float]
    sums: QueueSums
    sends: SendSums
    dead_letters: int
    dead_letter_address: str
    expiry_address: str
    time_ms: int


class AddressDepth(TypedDict):
    """The queue of an address at the end of a pipeline."""

    messages: int
    consumers: int


class FlowState(TypedDict):
    """What a pipeline does, as `GET /diverts` has it. ``enabled``: neither the configuration nor its driver disables it."""

    origin: str
    enabled: bool
    state: str
    wanted: str
    lag: int | None
    records_per_s: float | None
    error: str


class FlowIngress(FlowState):
    """An ingress and its ends."""

    name: str
    topics: list[str]
    pattern: str
    to: str
    routing: str


# The word ``from`` is no name of a field in the other form.
_From = TypedDict("_From", {"from": str})


class FlowDivert(_From, FlowState):
    """A divert and its ends, and what the journal is kept for on its account."""

    name: str
    selector: str
    to: str
    exclusive: bool
    group: str
    pin: RetentionHoldStatus | None


class FlowAnswer(TypedDict):
    """All pipelines, and the queues of the addresses at their ends; null for an address without a queue.

    ``trouble`` says why states and pipelines that are defined at run time are missing; the fields ``state`` are empty then.
    """

    diverts: list[FlowDivert]
    ingresses: list[FlowIngress]
    addresses: dict[str, AddressDepth | None]
    trouble: str


class SettingAnswer(TypedDict):
    """A setting with its value as text; secrets are masked."""

    setting: str
    value: str


class RuleAnswer(TypedDict):
    """A rule of the settings: the roles that have each permission."""

    match: str
    roles: dict[str, Any]


class DecisionAnswer(TypedDict):
    """Whether a user has a permission, by which rule, and why."""

    allowed: bool
    rule: str | None
    reason: str


class PermissionsAnswer(TypedDict):
    """The rules, the names of all permissions, and the decision for the user, permission and address of the request."""

    rules: list[RuleAnswer]
    permissions: list[str]
    decision: DecisionAnswer | None


# -- messages ----------------------------------------------------------------------------------------------------------


class DeadLetterAnswer(TypedDict):
    """One dead letter, by the annotations of the message; null if there is none, or if it cannot be read."""

    message_id: str | int | None
    address: str | int | None
    queue: str | int | None
    routing: str | None
    reason: str | int | None
    deliveries: str | int | None
    moved_at_ms: str | int | None
    bytes: int


class PropertyAnswer(TypedDict):
    """A value as text, with the name of its type."""

    type: str
    value: str


class EntryAnswer(PropertyAnswer):
    """An entry of a map or stream; the entries of a map have names."""

    name: NotRequired[str]


class BodyAnswer(TypedDict):
    """A body: ``text``, ``base64`` or ``entries`` by its kind. ``cut``: it is longer than what is shown."""

    cut: bool
    text: NotRequired[str]
    base64: NotRequired[str]
    entries: NotRequired[list[EntryAnswer]]


class ShownMessage(TypedDict):
    """A message. ``unreadable`` is the reason why it has only a part of the fields, "" if it has all."""

    id: str
    bytes: int
    state: str
    due_ms: int
    failed_deliveries: int
    stored: bool
    matches: bool
    unreadable: str
    properties: dict[str, PropertyAnswer]
    body_kind: str
    body: BodyAnswer
    message_id: NotRequired[str | None]
    correlation_id: NotRequired[str | None]
    destination: NotRequired[str | None]
    destination_kind: NotRequired[str | None]
    reply_to: NotRequired[str | None]
    reply_to_kind: NotRequired[str | None]
    type: NotRequired[str | None]
    delivery_mode: NotRequired[str]
    priority: NotRequired[int]
    timestamp_ms: NotRequired[int]
    expiration_ms: NotRequired[int]
    group_id: NotRequired[str | None]
    group_sequence: NotRequired[int]
    user_id: NotRequired[str | None]


class OriginAnswer(TypedDict):
    """Where a dead letter comes from."""

    address: str | int | None
    queue: str | int | None
    reason: str | int | None
    moved_at_ms: str | int | None


class MessageAnswer(ShownMessage):
    """A message in detail."""

    queue: str
    origin: OriginAnswer


class MessagesAnswer(TypedDict):
    """A page of messages. ``next`` is the value of ``after`` for the next page, "" after the last one."""

    queue: str
    messages: list[ShownMessage]
    next: str
    looked_at: int


class LifeAnswer(TypedDict):
    """What happened to the messages with an id; see the guide "What happened to a message"."""

    id: str
    journal: dict[str, Any]
    ended: bool
    messages: list[dict[str, Any]]
    branches: list[dict[str, Any]]
    events: list[dict[str, Any]]
    unrecorded: list[str]


# -- actions -----------------------------------------------------------------------------------------------------------


class CreatedAnswer(TypedDict):
    """The name of the new queue."""

    created: str


class DeletedAnswer(TypedDict):
    """The deleted queue, and the number of messages that it had."""

    deleted: str
    messages: int


class PurgedAnswer(TypedDict):
    """The number of removed messages. With ``ids``: how many were left, by reason."""

    purged: int
    left: NotRequired[dict[str, int]]


class MovedAnswer(TypedDict):
    """The number of moved messages, and how many were left, by reason."""

    moved: int
    left: dict[str, int]


class ReturnedAnswer(TypedDict):
    """The number of returned dead letters, and how many were left, by reason."""

    returned: int
    left: dict[str, int]


class SentAnswer(TypedDict):
    """The JMSMessageID of the sent message."""

    sent: str


class ClosedAnswer(TypedDict):
    """The number of closed connections."""

    closed: int


class ForcedAnswer(TypedDict):
    """The branch that was ended."""

    forced: str


class ForgottenAnswer(TypedDict):
    """The branch that was forgotten."""

    forgotten: str


class ResetAnswer(TypedDict):
    """The ingress topic that is read again."""

    reset: str


class AppliedSetting(TypedDict):
    """A changed setting that is in effect."""

    setting: str
    before: Any
    after: Any
    effect: str


class PendingSetting(TypedDict):
    """A changed setting that needs a restart."""

    setting: str
    before: Any
    after: Any


class ReloadAnswer(TypedDict):
    """What a reload of the settings has changed."""

    applied: list[AppliedSetting]
    needs_restart: list[PendingSetting]
    unchanged: list[str]


class SessionAnswer(TypedDict):
    """Who is logged in at the console; null if nobody is. ``csrf`` is the value of the header ``x-csrf-token``."""

    name: str | None
    role: str | None
    csrf: str
    restricted: bool


# -- definitions -------------------------------------------------------------------------------------------------------


class HeldQueue(TypedDict):
    """A queue. ``auto_created``: the broker has created it for a client, and deletes it when it is unused. ``user``: for whom."""

    name: str
    auto_created: bool
    user: str


class HeldSubscription(TypedDict):
    """A durable subscription; the fields are the arguments of ``subscriptions/create``."""

    name: str
    topic: str
    client_id: str
    selector: str
    no_local: bool
    shared: bool
    user: str


class DefinitionsAnswer(TypedDict):
    """What the broker holds besides its settings. ``format`` and ``version`` say how to read it, ``broker`` who has written it."""

    format: str
    version: int
    broker: str
    queues: list[HeldQueue]
    subscriptions: list[HeldSubscription]
