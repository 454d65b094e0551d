"""Limits of all resources that a peer can use, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Nesting depth of values: performatives need 6, JMS messages 4; Python's own stack ends near 1,000.
DEPTH_MAX: Final = 32
#: Items of lists, maps and arrays in one message, counted over all nested values: each needs up to 64 bytes of memory.
ITEMS_MAX: Final = 1 << 20
#: Items of lists, maps and arrays in one performative, counted over all nested values: decoding them takes some milliseconds. An attach
#: of Qpid JMS has about 50.
PERFORMATIVE_ITEMS_MAX: Final = 16 * 1024
#: Items of an array whose elements have no bytes (null, true, list0): their number is not limited by the size of the data.
ZERO_WIDTH_ITEMS_MAX: Final = 256
#: Keys of one map that are numbers, characters or UUIDs. A peer can choose keys whose hashes collide, at a cost of the square of their
#: number; the keys of JMS and AMQP maps are texts, and some annotations have a few ulongs.
NUMBER_KEYS_MAX: Final = 64
#: Symbols are names of capabilities, conditions and mechanisms. The longest in the registries has 60 characters.
SYMBOL_SIZE_BYTES_MAX: Final = 4096
#: Bytes of a delivery tag (AMQP 1.0 part 2, section 2.8.7).
DELIVERY_TAG_SIZE_BYTES_MAX: Final = 32
#: Bytes of a transaction id. AMQP 1.0 (part 4, section 4.5.4) allows 32 and the broker's own ids have some 15, but Artemis uses an
#: encoded Xid, which has up to 128 bytes and three numbers in X/Open XA.
TRANSACTION_ID_SIZE_BYTES_MAX: Final = 256
#: Characters of a container id, which is the JMS client id: it is part of queue names, which may be as long as an address.
CONTAINER_ID_LENGTH_MAX: Final = 1000
#: Characters of a link name: Qpid JMS includes ids and the address, other clients the name of a subscription.
LINK_NAME_LENGTH_MAX: Final = 2000
#: Characters of an error description of a peer, which is logged. Longer ones are cut.
DESCRIPTION_LENGTH_MAX: Final = 1000

#: The frame size that every peer must accept (AMQP 1.0 part 2, section 2.8.9, MIN-MAX-FRAME-SIZE).
FRAME_SIZE_BYTES_MIN: Final = 512
#: Bytes of a SASL frame. The specification says 512, but a long user name with a long password needs more.
SASL_FRAME_SIZE_BYTES_MAX: Final = 4 * 1024
#: Bytes of the open frame. The specification says 512, but open frames with many properties are larger.
PRE_OPEN_FRAME_SIZE_BYTES_MAX: Final = 16 * 1024
#: Bytes before the peer's open; the whole handshake of Qpid JMS has less than 2 KiB.
PRE_OPEN_BYTES_MAX: Final = 32 * 1024
#: Challenges of one SASL exchange: SCRAM needs 2, GSSAPI 3.
SASL_ROUNDS_MAX: Final = 8
#: Seconds from the start of the connection to the end of the open, with TLS and SASL; Qpid JMS needs some milliseconds.
HANDSHAKE_TIMEOUT_S: Final = 10.0
#: Time that a peer has to answer the broker's close.
CLOSE_TIMEOUT_S: Final = 10.0
#: Minimum interval of the broker's heartbeats, whatever idle timeout a peer requests.
HEARTBEAT_INTERVAL_S_MIN: Final = 0.1

#: The frame size that the broker offers: 128 KiB holds nearly every message in one frame, and limits the memory of a partial frame.
FRAME_SIZE_BYTES_DEFAULT: Final = 128 * 1024
#: Maximum size of the frames of a message, whatever the peer accepts, because a frame is built and written at once.
DELIVERY_FRAME_SIZE_BYTES_MAX: Final = 128 * 1024
#: Sessions of one connection: a JMS client opens one per JMS session and two of its own.
CHANNEL_MAX_DEFAULT: Final = 1023
#: Links of one session: JMS clients have one per producer and consumer.
HANDLE_MAX_DEFAULT: Final = 1023
#: Links of one connection over all its sessions: each stores its attach, with selector and properties.
LINKS_MAX: Final = 8192
#: Bytes of a frame without its payload: attaches with long selectors are the largest, and are stored.
PERFORMATIVE_SIZE_BYTES_MAX: Final = 64 * 1024
#: Transfer frames that a peer may send before we renew its window. Link credit limits the memory, so this need not limit throughput.
INCOMING_WINDOW_FRAMES: Final = 8192
#: Unsettled deliveries of one session, in each direction. A Qpid JMS consumer prefetches 1,000.
UNSETTLED_PER_SESSION_MAX: Final = 100_000
#: Bytes of a message, over all its frames, if the application sets no limit.
MESSAGE_SIZE_BYTES_DEFAULT: Final = 100 * 1024 * 1024

#: Bytes of incomplete messages over all links of a connection: each link may have one.
PARTIAL_BYTES_MAX: Final = 256 * 1024 * 1024


#: Larger than any count.
UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one connection that an operator may change."""

    channel_max: int = CHANNEL_MAX_DEFAULT
    handle_max: int = HANDLE_MAX_DEFAULT
    links_max: int = LINKS_MAX
    incoming_window_frames: int = INCOMING_WINDOW_FRAMES
    unsettled_per_session_max: int = UNSETTLED_PER_SESSION_MAX
    input_steps_per_piece: int = UNLIMITED  # of received frames, before the application continues: see Connection.unfinished
    deliveries_per_piece: int = UNLIMITED  # of one disposition, before the application continues: see Connection.unfinished
    frames_per_piece_bytes: int = UNLIMITED  # of multi-frame messages, before the application writes: see Connection.send_more
    message_size_bytes_max: int = MESSAGE_SIZE_BYTES_DEFAULT
    partial_bytes_max: int = PARTIAL_BYTES_MAX
    sasl_frame_size_bytes_max: int = SASL_FRAME_SIZE_BYTES_MAX
    pre_open_bytes_max: int = PRE_OPEN_BYTES_MAX
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    close_timeout_s: float = CLOSE_TIMEOUT_S
