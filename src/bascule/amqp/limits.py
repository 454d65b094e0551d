"""Limits on everything that a peer could make grow, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Values nested in one another: performatives need 6, JMS messages 4; Python's own stack ends near 1,000.
DEPTH_MAX: Final = 32
#: Items of lists, maps and arrays in one message, counted over all values within one another: each takes up to 64 bytes of memory.
ITEMS_MAX: Final = 1 << 20
#: Items in one performative, counted in the same way: decoding them takes some milliseconds. An attach of Qpid JMS has about 50.
PERFORMATIVE_ITEMS_MAX: Final = 16 * 1024
#: Items of an array whose elements have no bytes at all (null, true, list0): nothing on the wire bounds their number.
ZERO_WIDTH_ITEMS_MAX: Final = 256
#: Keys of one map that are numbers, characters or UUIDs. A peer can choose keys whose hashes collide, which costs the square of their
#: number; JMS and AMQP's own maps have texts as keys, and some annotations a few ulongs.
NUMBER_KEYS_MAX: Final = 64
#: Symbols name things: capabilities, conditions, mechanisms. The longest in the registries has 60 characters.
SYMBOL_SIZE_BYTES_MAX: Final = 4096
#: Bytes of a delivery tag (AMQP 1.0 part 2, section 2.8.7).
DELIVERY_TAG_SIZE_BYTES_MAX: Final = 32
#: Bytes of a transaction id. AMQP 1.0 (part 4, section 4.5.4) allows 32 and the broker's own have some 15, but Artemis names a transaction
#: by an encoded Xid, which X/Open XA allows 128 bytes and three numbers.
TRANSACTION_ID_SIZE_BYTES_MAX: Final = 256
#: Characters of a container id, which is the JMS client id: it is part of names of queues, as long as an address may be.
CONTAINER_ID_LENGTH_MAX: Final = 1000
#: Characters of a link's name: Qpid JMS writes ids and the address into it, others the name of a subscription.
LINK_NAME_LENGTH_MAX: Final = 2000
#: Characters of an error's description that a peer sends: they are logged. What is longer is cut.
DESCRIPTION_LENGTH_MAX: Final = 1000

#: The size that every peer must take (AMQP 1.0 part 2, section 2.8.9, MIN-MAX-FRAME-SIZE).
FRAME_SIZE_BYTES_MIN: Final = 512
#: A SASL frame. The standard says 512; a long user name with a long password takes more.
SASL_FRAME_SIZE_BYTES_MAX: Final = 4 * 1024
#: The open frame. The standard says 512, but open frames with many properties are larger.
PRE_OPEN_FRAME_SIZE_BYTES_MAX: Final = 16 * 1024
#: Bytes that may arrive before the open of the peer; the whole handshake of Qpid JMS takes under 2 KiB.
PRE_OPEN_BYTES_MAX: Final = 32 * 1024
#: Challenges of one SASL exchange: SCRAM needs 2, GSSAPI 3.
SASL_ROUNDS_MAX: Final = 8
#: From the start of the connection to the end of the open, TLS and SASL included; Qpid JMS takes some milliseconds.
HANDSHAKE_TIMEOUT_S: Final = 10.0
#: Time that a peer has to answer our close.
CLOSE_TIMEOUT_S: Final = 10.0
#: The broker sends heartbeats no more often than this, whatever idle timeout a peer requests.
HEARTBEAT_INTERVAL_S_MIN: Final = 0.1

#: Frame size offered: 128 KiB carries nearly every message in one frame, and one connection's partial frame costs no more than that.
FRAME_SIZE_BYTES_DEFAULT: Final = 128 * 1024
#: Frames in which a message is sent are no larger, whatever the peer takes: a frame is made and written at once.
DELIVERY_FRAME_SIZE_BYTES_MAX: Final = 128 * 1024
#: Sessions of one connection: a JMS client opens one per JMS session and two of its own.
CHANNEL_MAX_DEFAULT: Final = 1023
#: Links of one session: JMS clients have one per producer and consumer.
HANDLE_MAX_DEFAULT: Final = 1023
#: Links of one connection over all its sessions: each keeps its attach, with selector and properties.
LINKS_MAX: Final = 8192
#: A frame without its payload: attaches with long selectors are the largest, and are kept.
PERFORMATIVE_SIZE_BYTES_MAX: Final = 64 * 1024
#: Transfer frames that a peer may send before we renew its window: memory is bounded by link credit, this only has to be no brake.
INCOMING_WINDOW_FRAMES: Final = 8192
#: Deliveries of one session, each way, that nobody has settled. A Qpid JMS consumer prefetches 1,000.
UNSETTLED_PER_SESSION_MAX: Final = 100_000
#: A message as a whole, over all its frames, where the application states no limit of its own.
MESSAGE_SIZE_BYTES_DEFAULT: Final = 100 * 1024 * 1024

#: Messages begun and not ended, over all links of a connection: each link may have one under way.
PARTIAL_BYTES_MAX: Final = 256 * 1024 * 1024


#: Of what is counted: more than there ever is.
UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one connection that an operator may change."""

    channel_max: int = CHANNEL_MAX_DEFAULT
    handle_max: int = HANDLE_MAX_DEFAULT
    links_max: int = LINKS_MAX
    incoming_window_frames: int = INCOMING_WINDOW_FRAMES
    unsettled_per_session_max: int = UNSETTLED_PER_SESSION_MAX
    deliveries_per_piece: int = UNLIMITED  # of one disposition, before the application goes on: see Connection.unfinished
    frames_per_piece_bytes: int = UNLIMITED  # of messages in many frames, before the application writes: see Connection.send_more
    message_size_bytes_max: int = MESSAGE_SIZE_BYTES_DEFAULT
    partial_bytes_max: int = PARTIAL_BYTES_MAX
    pre_open_bytes_max: int = PRE_OPEN_BYTES_MAX
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    close_timeout_s: float = CLOSE_TIMEOUT_S
