"""The composite types of AMQP 1.0: frame bodies, termini, delivery states, transactions, SASL (parts 2 to 5)."""

from __future__ import annotations

import enum
from typing import Any, Final

from bascule.amqp.composite import (
    ANY,
    BINARY,
    BOOLEAN,
    COMPOSITE,
    FIELDS,
    STRING,
    SYMBOL,
    SYMBOLS,
    TRANSACTION_ID,
    UBYTE,
    UINT,
    ULONG,
    UNSETTLED,
    USHORT,
    Composite,
    Wire,
    a_composite,
    composite,
    dump,
    field,
)
from bascule.amqp.errors import INVALID_FIELD, AmqpError, ConnectionFault
from bascule.amqp.limits import CONTAINER_ID_LENGTH_MAX, DESCRIPTION_LENGTH_MAX, FRAME_SIZE_BYTES_MIN
from bascule.amqp.types import Described, Symbol

UINT_MAX: Final = 0xFFFFFFFF
USHORT_MAX: Final = 0xFFFF


class Role(enum.IntEnum):
    """The role in a connection: a client opens it, a server offers SASL mechanisms."""

    CLIENT = 0
    SERVER = 1


class SenderSettleMode(enum.IntEnum):
    """Part 2, section 2.8.2."""

    UNSETTLED = 0
    SETTLED = 1
    MIXED = 2


class ReceiverSettleMode(enum.IntEnum):
    """Part 2, section 2.8.3."""

    FIRST = 0
    SECOND = 1


def _the_error(value: Any) -> Error:
    loaded = a_composite(value)
    if type(loaded) is not Error:
        raise TypeError
    if loaded.description is not None:
        loaded.description = loaded.description[:DESCRIPTION_LENGTH_MAX]
    return loaded


def _a_state(value: Any) -> Any:
    loaded = a_composite(value)
    if type(loaded) not in STATES:
        raise TypeError
    return loaded


def _an_outcome(value: Any) -> Any:
    loaded = a_composite(value)
    if type(loaded) not in OUTCOMES:
        raise TypeError
    return loaded


ERROR = Wire("an error", _the_error, dump)
STATE = Wire("a delivery state", _a_state, dump)
OUTCOME = Wire("an outcome", _an_outcome, dump)


# --- transport, part 2 section 2.7 -----------------------------------------------------------------------------------------------


@composite(0x10, "amqp:open:list")
class Open(Composite):
    """Negotiate connection parameters. ``idle_time_out`` in milliseconds."""

    container_id: str = field(STRING, "", mandatory=True)
    hostname: str | None = field(STRING)
    max_frame_size: int = field(UINT, UINT_MAX)
    channel_max: int = field(USHORT, USHORT_MAX)
    idle_time_out: int | None = field(UINT)
    outgoing_locales: tuple[Symbol, ...] = field(SYMBOLS, ())
    incoming_locales: tuple[Symbol, ...] = field(SYMBOLS, ())
    offered_capabilities: tuple[str, ...] = field(SYMBOLS, ())
    desired_capabilities: tuple[str, ...] = field(SYMBOLS, ())
    properties: dict[Any, Any] | None = field(FIELDS)

    def without_lists(self) -> Open:
        """Return a copy without the fields that may be as long as a frame, which a server need not keep for each of its clients."""
        return Open(self.container_id, None, self.max_frame_size, self.channel_max, self.idle_time_out)

    def check(self) -> None:
        """Raise ConnectionFault if the frame size is below the minimum of part 2, section 2.4.1, or the container id is too long."""
        if self.max_frame_size < FRAME_SIZE_BYTES_MIN:
            raise ConnectionFault(INVALID_FIELD, f"max-frame-size {self.max_frame_size} below {FRAME_SIZE_BYTES_MIN}")
        if len(self.container_id) > CONTAINER_ID_LENGTH_MAX:
            raise ConnectionFault(INVALID_FIELD, f"container-id exceeds the limit of {CONTAINER_ID_LENGTH_MAX} characters")


@composite(0x11, "amqp:begin:list")
class Begin(Composite):
    """Begin a session on a channel."""

    remote_channel: int | None = field(USHORT)
    next_outgoing_id: int = field(UINT, 0, mandatory=True)
    incoming_window: int = field(UINT, 0, mandatory=True)
    outgoing_window: int = field(UINT, 0, mandatory=True)
    handle_max: int = field(UINT, UINT_MAX)
    offered_capabilities: tuple[str, ...] = field(SYMBOLS, ())
    desired_capabilities: tuple[str, ...] = field(SYMBOLS, ())
    properties: dict[Any, Any] | None = field(FIELDS)


@composite(0x12, "amqp:attach:list")
class Attach(Composite):
    """Attach a link to a session. ``role`` is True for a receiver."""

    name: str = field(STRING, "", mandatory=True)
    handle: int = field(UINT, 0, mandatory=True)
    role: bool = field(BOOLEAN, False, mandatory=True)
    snd_settle_mode: int = field(UBYTE, SenderSettleMode.MIXED)
    rcv_settle_mode: int = field(UBYTE, ReceiverSettleMode.FIRST)
    source: Source | Described | None = field(COMPOSITE)
    target: Target | Coordinator | Described | None = field(COMPOSITE)
    unsettled: dict[Any, Any] | None = field(UNSETTLED)
    incomplete_unsettled: bool = field(BOOLEAN, False)
    initial_delivery_count: int | None = field(UINT)
    max_message_size: int = field(ULONG, 0)
    offered_capabilities: tuple[str, ...] = field(SYMBOLS, ())
    desired_capabilities: tuple[str, ...] = field(SYMBOLS, ())
    properties: dict[Any, Any] | None = field(FIELDS)


@composite(0x13, "amqp:flow:list")
class Flow(Composite):
    """Session windows and, with a handle, link credit."""

    next_incoming_id: int | None = field(UINT)
    incoming_window: int = field(UINT, 0, mandatory=True)
    next_outgoing_id: int = field(UINT, 0, mandatory=True)
    outgoing_window: int = field(UINT, 0, mandatory=True)
    handle: int | None = field(UINT)
    delivery_count: int | None = field(UINT)
    link_credit: int | None = field(UINT)
    available: int | None = field(UINT)
    drain: bool = field(BOOLEAN, False)
    echo: bool = field(BOOLEAN, False)
    properties: dict[Any, Any] | None = field(FIELDS)


@composite(0x14, "amqp:transfer:list")
class Transfer(Composite):
    """One frame of a message."""

    handle: int = field(UINT, 0, mandatory=True)
    delivery_id: int | None = field(UINT)
    delivery_tag: bytes | None = field(BINARY)
    message_format: int | None = field(UINT)
    settled: bool | None = field(BOOLEAN)
    more: bool = field(BOOLEAN, False)
    rcv_settle_mode: int | None = field(UBYTE)
    state: Any = field(STATE)
    resume: bool = field(BOOLEAN, False)
    aborted: bool = field(BOOLEAN, False)
    batchable: bool = field(BOOLEAN, False)


@composite(0x15, "amqp:disposition:list")
class Disposition(Composite):
    """The state of a range of deliveries. ``role`` is True if the receiver of the deliveries sends it."""

    role: bool = field(BOOLEAN, False, mandatory=True)
    first: int = field(UINT, 0, mandatory=True)
    last: int | None = field(UINT)
    settled: bool = field(BOOLEAN, False)
    state: Any = field(STATE)
    batchable: bool = field(BOOLEAN, False)


@composite(0x16, "amqp:detach:list")
class Detach(Composite):
    """Detach a link; ``closed`` also ends its life."""

    handle: int = field(UINT, 0, mandatory=True)
    closed: bool = field(BOOLEAN, False)
    error: Error | None = field(ERROR)


@composite(0x17, "amqp:end:list")
class End(Composite):
    """End a session."""

    error: Error | None = field(ERROR)


@composite(0x18, "amqp:close:list")
class Close(Composite):
    """Close a connection."""

    error: Error | None = field(ERROR)


@composite(0x1D, "amqp:error:list")
class Error(Composite):
    """Details of an error."""

    condition: str = field(SYMBOL, "", mandatory=True)
    description: str | None = field(STRING)
    info: dict[Any, Any] | None = field(FIELDS)

    @classmethod
    def of(cls, error: AmqpError | None) -> Error | None:
        """Return the wire form of an exception, None for None."""
        return None if error is None else cls(error.condition, error.description or None, error.info)

    def exception(self) -> AmqpError:
        """Return this error as an exception."""
        return AmqpError(str(self.condition), self.description or "", self.info)


# --- messaging, part 3 sections 3.4 and 3.5 --------------------------------------------------------------------------------------


@composite(0x23, "amqp:received:list")
class Received(Composite):
    """Partial state, for resumed deliveries."""

    section_number: int = field(UINT, 0, mandatory=True)
    section_offset: int = field(ULONG, 0, mandatory=True)


@composite(0x24, "amqp:accepted:list")
class Accepted(Composite):
    """The receiver has accepted the message."""


@composite(0x25, "amqp:rejected:list")
class Rejected(Composite):
    """The message is invalid and was not accepted."""

    error: Error | None = field(ERROR)


@composite(0x26, "amqp:released:list")
class Released(Composite):
    """The message was not processed and may be delivered elsewhere."""


@composite(0x27, "amqp:modified:list")
class Modified(Composite):
    """The message was not processed, and its fields are modified."""

    delivery_failed: bool = field(BOOLEAN, False)
    undeliverable_here: bool = field(BOOLEAN, False)
    message_annotations: dict[Any, Any] | None = field(FIELDS)


ACCEPTED: Final = Accepted()
RELEASED: Final = Released()


@composite(0x28, "amqp:source:list")
class Source(Composite):
    """The source of a link's messages."""

    address: Any = field(ANY)
    durable: int = field(UINT, 0)
    expiry_policy: str = field(SYMBOL, Symbol("session-end"))
    timeout: int = field(UINT, 0)
    dynamic: bool = field(BOOLEAN, False)
    dynamic_node_properties: dict[Any, Any] | None = field(FIELDS)
    distribution_mode: str | None = field(SYMBOL)
    filter: dict[Any, Any] | None = field(FIELDS)
    default_outcome: Any = field(OUTCOME)
    outcomes: tuple[str, ...] = field(SYMBOLS, ())
    capabilities: tuple[str, ...] = field(SYMBOLS, ())


@composite(0x29, "amqp:target:list")
class Target(Composite):
    """The destination of a link's messages."""

    address: Any = field(ANY)
    durable: int = field(UINT, 0)
    expiry_policy: str = field(SYMBOL, Symbol("session-end"))
    timeout: int = field(UINT, 0)
    dynamic: bool = field(BOOLEAN, False)
    dynamic_node_properties: dict[Any, Any] | None = field(FIELDS)
    capabilities: tuple[str, ...] = field(SYMBOLS, ())


@composite(0x2B, "amqp:delete-on-close:list")
class DeleteOnClose(Composite):
    """A dynamic node exists as long as the link that created it."""


@composite(0x2C, "amqp:delete-on-no-links:list")
class DeleteOnNoLinks(Composite):
    """A dynamic node exists while it has links."""


@composite(0x2D, "amqp:delete-on-no-messages:list")
class DeleteOnNoMessages(Composite):
    """A dynamic node exists, after its creator's link ends, while it has messages."""


@composite(0x2E, "amqp:delete-on-no-links-or-messages:list")
class DeleteOnNoLinksOrMessages(Composite):
    """A dynamic node exists while it has links or messages."""


# --- transactions, part 4 section 4.5 --------------------------------------------------------------------------------------------


@composite(0x30, "amqp:coordinator:list")
class Coordinator(Composite):
    """The target of a link that controls transactions."""

    capabilities: tuple[str, ...] = field(SYMBOLS, ())


@composite(0x31, "amqp:declare:list")
class Declare(Composite):
    """Begin a transaction."""

    global_id: Any = field(ANY)


@composite(0x32, "amqp:discharge:list")
class Discharge(Composite):
    """End a transaction: roll it back if ``fail``."""

    txn_id: bytes = field(TRANSACTION_ID, b"", mandatory=True)
    fail: bool = field(BOOLEAN, False)


@composite(0x33, "amqp:declared:list")
class Declared(Composite):
    """Outcome of a declare."""

    txn_id: bytes = field(BINARY, b"", mandatory=True)


@composite(0x34, "amqp:transactional-state:list")
class TransactionalState(Composite):
    """A delivery's state within a transaction."""

    txn_id: bytes = field(TRANSACTION_ID, b"", mandatory=True)
    outcome: Any = field(OUTCOME)


#: The final states of a delivery (part 3, section 3.4). Types unknown to AMQP stay Described.
OUTCOMES: Final = frozenset({Accepted, Rejected, Released, Modified, Described})
STATES: Final = OUTCOMES | {Received, Declared, TransactionalState}


# --- SASL, part 5 section 5.3.3 --------------------------------------------------------------------------------------------------


@composite(0x40, "amqp:sasl-mechanisms:list")
class SaslMechanisms(Composite):
    """The mechanisms that the server offers."""

    mechanisms: tuple[str, ...] = field(SYMBOLS, (), mandatory=True)


@composite(0x41, "amqp:sasl-init:list")
class SaslInit(Composite):
    """The mechanism that the client chose."""

    mechanism: str = field(SYMBOL, "", mandatory=True)
    initial_response: bytes | None = field(BINARY)
    hostname: str | None = field(STRING)


@composite(0x42, "amqp:sasl-challenge:list")
class SaslChallenge(Composite):
    """A challenge of the server."""

    challenge: bytes = field(BINARY, b"", mandatory=True)


@composite(0x43, "amqp:sasl-response:list")
class SaslResponse(Composite):
    """A response of the client."""

    response: bytes = field(BINARY, b"", mandatory=True)


class SaslCode(enum.IntEnum):
    """Part 5, section 5.3.3.6."""

    OK = 0
    AUTH = 1
    SYS = 2
    SYS_PERM = 3
    SYS_TEMP = 4


@composite(0x44, "amqp:sasl-outcome:list")
class SaslOutcome(Composite):
    """The outcome of the SASL exchange."""

    code: int = field(UBYTE, 0, mandatory=True)
    additional_data: bytes | None = field(BINARY)
