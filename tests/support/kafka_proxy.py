"""A proxy that knows Kafka's requests: it holds, delays or duplicates requests of one kind, or loses the answer.

    with KafkaProxy(kafka.port) as proxy:
        producer = Producer({"bootstrap.servers": proxy.bootstrap, ...})
        late = proxy.inject(Api.END_TXN, Action.HOLD)
        producer.commit_transaction()  # repeated by the client after its request timeout
        late.release()                 # now Kafka gets the first one

Clients stay behind the proxy: if an answer names the node's port, the proxy replaces it by its own. The node must be on 127.0.0.1, without
TLS or SASL.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter, deque
from contextlib import suppress
from enum import IntEnum, StrEnum
from typing import NamedTuple

from bascule.core.errors import Unavailable
from tests.support.proxy import HOST, Relay

#: Longest time for the answer to a released request; an idle Kafka takes milliseconds.
ANSWER_S = 30.0
#: Shorter than every request timeout of the tests, so that the client only waits.
DELAY_S = 0.3

_HEADER = struct.Struct(">hhi")  # API key, API version, correlation id
_INT32 = struct.Struct(">i")
#: The fields of a partition's answer to a Produce: partition, error code, offset of the first record.
_PRODUCED = struct.Struct(">ihq")
_DUPLICATE_SEQUENCE_NUMBER = 46
#: Size limit of the tail of an answer to Produce or Fetch: one with NOT_LEADER_OR_FOLLOWER ends with the address of the leader (KIP-951).
ENDPOINT_TAIL_BYTES = 64
#: The name of a topic lies within this many bytes of a Produce request.
REQUEST_HEAD_BYTES = 1024


class Api(IntEnum):
    """API keys of Kafka's protocol."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    SYNC_GROUP = 14
    API_VERSIONS = 18
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26
    DESCRIBE_CLUSTER = 60


class Action(StrEnum):
    """The effect on a request."""

    HOLD = "hold"  # Kafka gets it when it is released, even if the client waits no longer; later requests of the connection wait, too
    DELAY = "delay"
    DROP_REPLY = "drop-reply"  # Kafka processes it, and the connection breaks before the answer
    MUTE_REPLY = "mute-reply"  # Kafka processes it, and no answer arrives: the client notices by a timeout
    DUPLICATE = "duplicate"  # Kafka gets it twice, and the client gets one answer
    #: For a Produce: Kafka processes it, and answers DUPLICATE_SEQUENCE_NUMBER without an offset, as for a retry after a leader change.
    SEQUENCE_KNOWN = "sequence-known"


#: Requests whose answers name nodes. In every version host and port are adjacent.
_NAMING = frozenset({Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER})


class Injection:
    """A fault for the next requests of one kind. ``answer`` is Kafka's last answer to them, without length and correlation id."""

    def __init__(self, api: Api, action: Action, times: int, topic: str = "") -> None:
        self.api = api
        self.topic = topic  # of a Produce; "" means any
        self.action = action
        self.left = times
        self.answer = b""
        self._hit = threading.Event()
        self._released = threading.Event()
        self._answered = threading.Event()

    def meets(self, api: int, frame: bytes) -> bool:
        """Return True if a request gets this fault."""
        return bool(self.api == api and self.left and (not self.topic or _names(frame, self.topic)))

    @property
    def hit(self) -> bool:
        """Return True if a request got the fault."""
        return self._hit.is_set()

    def release(self) -> None:
        """Let a held request continue, and return when Kafka has answered it. Does nothing if none is held. Raises Unavailable."""
        self._released.set()
        if self.action is Action.HOLD and self.hit and not self._answered.wait(ANSWER_S):
            raise Unavailable(f"Kafka does not answer a late {self.api.name}")

    def _let_go(self) -> None:
        self._released.set()

    def _hold(self) -> None:
        self._hit.set()
        self._released.wait()

    def _note(self, answer: bytes) -> None:
        self.answer = answer
        self._answered.set()


class _Expected(NamedTuple):
    """An expected answer. Kafka answers the requests of a connection in their order."""

    api: int
    injection: Injection | None = None
    second: bool = False  # of a duplicate


class KafkaProxy(Relay):
    """A proxy for one Kafka node. ``passed`` counts the requests by API key."""

    def __init__(self, port: int, *, advertised_port: int | None = None) -> None:
        """Listen in front of Kafka's ``port``. ``advertised_port`` is where clients are sent, if another proxy is in front of this one."""
        self.passed: Counter[int] = Counter()
        self._injections: list[Injection] = []
        self._kafka_port = port
        self._advertised_port = advertised_port
        super().__init__(port)

    def advertise(self, port: int) -> None:
        """Send clients that ask from now on to a port."""
        self._advertised_port = port

    def inject(self, api: Api, action: Action, *, times: int = 1, topic: str = "") -> Injection:
        """Let the next ``times`` requests of a kind, on any connection, get a fault; for Produce, if given, only those to ``topic``."""
        injection = Injection(api, action, times, topic)
        with self._lock:
            self._injections.append(injection)
        return injection

    def heal(self) -> None:
        """Inject no more faults, and let held requests continue."""
        with self._lock:
            injections, self._injections = self._injections, []
        for each in injections:
            each._let_go()

    def cut(self) -> None:
        """End every connection, with the requests held on it."""
        super().cut()
        self.heal()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        expected: deque[_Expected] = deque()
        for pump in (self._carry_requests, self._carry_answers):
            threading.Thread(target=pump, args=(client, server, expected), name="kafka-proxy", daemon=True).start()

    def _carry_requests(self, client: socket.socket, kafka: socket.socket, expected: deque[_Expected]) -> None:
        with suppress(OSError):
            while frame := read_frame(client):
                api, _, _ = _HEADER.unpack_from(frame, _INT32.size)
                self._request(frame, api, kafka, expected)
        self._end(client, kafka)

    def _request(self, frame: bytes, api: int, kafka: socket.socket, expected: deque[_Expected]) -> None:
        injection = self._meet(api, frame)
        action = None if injection is None else injection.action
        if injection is not None and action is Action.HOLD:
            injection._hold()
        elif injection is not None:
            injection._hit.set()
            if action is Action.DELAY:
                injection._released.wait(DELAY_S)
        expected.append(_Expected(api, injection))
        if action is Action.DUPLICATE:
            expected.append(_Expected(api, injection, second=True))
            frame += frame
        kafka.sendall(frame)
        if injection is not None and action is Action.HOLD:
            # The client may have gone: the connection to Kafka stays open until Kafka has processed the request.
            injection._answered.wait(ANSWER_S)

    def _meet(self, api: int, frame: bytes) -> Injection | None:
        with self._lock:
            self.passed[api] += 1
            for each in self._injections:
                if each.meets(api, frame):
                    each.left -= 1
                    return each
        return None

    def _carry_answers(self, client: socket.socket, kafka: socket.socket, expected: deque[_Expected]) -> None:
        with suppress(OSError):
            while frame := read_frame(kafka):
                api, injection, second = expected.popleft()
                if injection is not None:
                    injection._note(frame[2 * _INT32.size :])
                    if injection.action is Action.DROP_REPLY:
                        break
                    if injection.action is Action.MUTE_REPLY or second:
                        continue
                    if injection.action is Action.SEQUENCE_KNOWN:
                        frame = _without_offset(frame)
                client.sendall(self._renamed(frame, 0 if api in _NAMING else max(0, len(frame) - ENDPOINT_TAIL_BYTES)))
        self._end(client, kafka)

    def _renamed(self, frame: bytes, start: int) -> bytes:
        """Replace Kafka's port by the proxy's, from ``start`` on. The length stays, so the rest of the answer need not be understood."""
        host = HOST.encode()
        advertised = _INT32.pack(self._advertised_port or self.port)
        return frame[:start] + frame[start:].replace(host + _INT32.pack(self._kafka_port), host + advertised)


def _without_offset(frame: bytes) -> bytes:
    """Return an answer to a Produce (version 9 or newer) of one partition, as if Kafka had stored the records before."""
    name_length = frame[2 * _INT32.size + 2]  # behind an empty list of tags, and the number of topics
    at = 2 * _INT32.size + 2 + name_length + 1  # one byte for the length, one fewer of the name, and the number of partitions
    partition, error, _ = _PRODUCED.unpack_from(frame, at)
    if error:
        raise ValueError(f"an answer to a Produce with error {error}: {frame!r}")
    return frame[:at] + _PRODUCED.pack(partition, _DUPLICATE_SEQUENCE_NUMBER, -1) + frame[at + _PRODUCED.size :]


def _names(frame: bytes, topic: str) -> bool:
    """Return True if a Produce request (version 9 or newer) is for a topic. The topic's name comes before the records."""
    return bytes([len(topic) + 1]) + topic.encode() in frame[:REQUEST_HEAD_BYTES]


def read_frame(connection: socket.socket) -> bytes:
    """Return a request or an answer, with its length in front; empty if the connection has ended."""
    length = _read(connection, _INT32.size)
    if not length:
        return b""
    body = _read(connection, _INT32.unpack(length)[0])
    return length + body if body else b""


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        part = connection.recv(size_bytes - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
