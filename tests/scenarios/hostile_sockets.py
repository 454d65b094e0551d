"""Hostile peers over real sockets: AMQP over TCP and over WebSocket, and HTTP to the admin server. Each peer is an attack of one class."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from tests.support.hostile import (
    ACCEPTED,
    AMQP_HEADER,
    ATTACH,
    BEGIN,
    CLOSE,
    COORDINATOR,
    DATA,
    DECLARE,
    DETACH,
    DISCHARGE,
    DISPOSITION,
    EMPTY_LISTS,
    END,
    ERROR,
    FALSE,
    FLOW,
    LIST0,
    MODIFIED,
    NULL,
    OPEN,
    PROPERTIES,
    REJECTED,
    RELEASED,
    SASL_HEADER,
    SOURCE,
    TARGET,
    TRANSACTIONAL_STATE,
    TRANSFER,
    TRUE,
    UINTS,
    VALUE,
    Hostile,
    array,
    binary,
    described,
    frame,
    listed,
    mapped,
    nested,
    performative,
    string,
    symbol,
    uint,
    ulong,
)
from tests.support.hostile_http import SELECTORS, HostileHttp
from tests.support.hostile_management import HostileManagement

HOST: Final = "127.0.0.1"
#: How long a peer waits for an answer or for the end of its connection. A broker that ignores a peer may let it wait.
ANSWER_S: Final = 5.0
#: Frames of a random conversation.
FRAMES: Final = 60
PIECE_BYTES: Final = 60_000
#: The channel of the sessions of ``handled``.
PAUSES: Final = 300
#: Transfers that fit into the window of a session.
ROUND: Final = 100
DECLARED: Final = 0x33
#: Opcodes of WebSocket frames (RFC 6455, section 5.2).
CONTINUATION, TEXT, BINARY, CLOSING, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
UPGRADE: Final = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: amqp\r\n\r\n"
)
#: An address of a queue that exists on no broker before the attacks, which create any number of others.
NAMES: Final = tuple(f"n{number}".encode() for number in range(6))


def ws_frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool = True, reserved: int = 0, size: int | None = None
) -> bytes:
    """Encode a frame of a WebSocket client. The mask is zero, so the payload stays as it is; ``size`` is a wrong length of it."""
    length, mask = len(payload) if size is None else size, 0x80 if masked else 0
    head = bytes((fin << 7 | reserved << 4 | opcode,))
    if length < 126:
        head += bytes((mask | length,))
    elif length < 1 << 16:
        head += struct.pack(">BH", mask | 126, length)
    else:
        head += struct.pack(">BQ", mask | 127, length)
    return head + (bytes(4) if masked else b"") + payload


class Peer:
    """One socket of an attacker. Everything that the broker sends is read, and the newest bytes are kept."""

    def __init__(self, chance: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.random = chance
        self._reader, self._writer = reader, writer
        self._heard = b""
        self._news = asyncio.Event()
        self.delivery_id = -1  # of the last transfer
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def to(cls, port: int, chance: random.Random) -> Peer:
        """Connect over TCP."""
        return cls(chance, *await asyncio.open_connection(HOST, port))

    async def _read(self) -> None:
        with suppress(OSError):
            while data := await self._reader.read(1 << 18):
                self._heard = self._heard[-(1 << 18) :] + data
                self._news.set()
        self._heard += b"\0END"
        self._news.set()

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are. A connection that the broker has ended is no error."""
        if self._reading.done():
            return
        with suppress(OSError, TimeoutError):
            self._writer.write(data)
            async with asyncio.timeout(ANSWER_S):
                await self._writer.drain()

    async def say(self, *pieces: bytes) -> None:
        """Send bytes of AMQP."""
        for piece in pieces:
            await self.raw(piece)

    async def heard(self, marker: bytes) -> bytes:
        """Return the bytes from a marker on, or b"" if the broker does not send it in time. Forget everything up to it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while marker not in self._heard and not self._heard.endswith(b"\0END"):
                    self._news.clear()
                    await self._news.wait()
        _, found, rest = self._heard.partition(marker)
        if found:
            self._heard = rest
        return found + rest

    async def end(self, *, orderly: bool) -> None:
        """End the connection; with ``orderly`` after the broker has handled everything and has ended it."""
        if orderly:
            await self.say(performative(CLOSE))
            await self.heard(bytes((0, 0x53, CLOSE)))
        self._reading.cancel()
        self._writer.transport.abort()


class WebSocketPeer(Peer):
    """The same over WebSocket. AMQP is in frames and fragments of random sizes, with pings between them."""

    @classmethod
    async def to(cls, port: int, chance: random.Random) -> Peer:
        """Connect over WebSocket."""
        peer = await super().to(port, chance)
        await peer.raw(UPGRADE)
        await peer.heard(b"\r\n\r\n")
        return peer

    async def say(self, *pieces: bytes) -> None:
        """Send bytes of AMQP in WebSocket frames."""
        await self.raw(b"".join(self._framed(b"".join(pieces))))

    def _framed(self, data: bytes) -> Iterator[bytes]:
        choose, at, begun = self.random.choice, 0, False
        sizes = choose(((1 << 20,), (1 << 16, 1 << 20), (0, 700, 4096), (0, 1, 2, 3) if len(data) < 20_000 else (500, 65_536)))
        while at < len(data):
            size = choose(sizes)
            fin = choose((True, False))
            yield ws_frame(CONTINUATION if begun else BINARY, data[at : at + size], fin=fin)
            at, begun = at + size, not fin
            if self.random.random() < 0.05:
                yield ws_frame(choose((PING, PONG)), b"p" * choose((0, 125)))
        if begun:
            yield ws_frame(CONTINUATION)


Attack = Callable[[Peer], Awaitable[None]]


async def begun(peer: Peer) -> None:
    """Log in, and begin a session with a producer for n1 (handle 0), a consumer of n1 (1) and a coordinator (2)."""
    await peer.say(
        SASL_HEADER + frame(described(0x41, listed(symbol(b"ANONYMOUS"), binary(b""))), kind=1),
        AMQP_HEADER + performative(OPEN, string(b"attacker-%d" % peer.random.randrange(1 << 30))),
    )
    await peer.heard(bytes((0, 0x53, OPEN)))
    coordinator = described(COORDINATOR, LIST0)
    await peer.say(
        performative(BEGIN, NULL, uint(0), uint(1 << 30), uint(1 << 30)),
        to_queue(0, b"n1"),
        from_address(1, b"n1"),
        performative(ATTACH, string(b"t"), uint(2), FALSE, NULL, NULL, described(SOURCE, listed()), coordinator, NULL, NULL, uint(0)),
    )
    await handled(peer)


async def handled(peer: Peer) -> None:
    """Return when the broker has handled everything so far, by a session that begins and ends.

    Without such pauses the broker would end a session for more transfers than its window.
    """
    await peer.say(performative(BEGIN, NULL, uint(0), uint(1), uint(1), channel=PAUSES), performative(END, channel=PAUSES))
    await peer.heard(bytes((0, 0x53, END)))


async def in_rounds(peer: Peer, *pieces: bytes) -> None:
    """Send pieces, as many at once as a session admits."""
    for first in range(0, len(pieces), ROUND):
        await peer.say(*pieces[first : first + ROUND])
        await handled(peer)


def to_queue(handle: int, address: bytes, name: bytes = b"") -> bytes:
    """Attach a producer."""
    target = described(TARGET, listed(string(address), *[NULL] * 5, symbol(b"queue")))
    return performative(
        ATTACH, string(name or b"p%d" % handle), uint(handle), FALSE, NULL, NULL, described(SOURCE, listed()), target, NULL, NULL, uint(0)
    )


def from_address(handle: int, address: bytes, selector: bytes = b"", kind: bytes = b"queue") -> bytes:
    """Attach a consumer."""
    name = symbol(b"jms-selector")
    filters = mapped(name, b"\0" + symbol(b"apache.org:selector-filter:string") + string(selector)) if selector else NULL
    source = described(SOURCE, listed(string(address), *[NULL] * 6, filters, NULL, NULL, symbol(kind)))
    return performative(ATTACH, string(b"c%d" % handle), uint(handle), TRUE, NULL, NULL, source, described(TARGET, listed()))


def transfer(peer: Peer, handle: int, payload: bytes, *, state: bytes = NULL, more: bool = False, follows: bool = False) -> bytes:
    """Send a message, or a part of it; with ``follows`` the next part of the last message."""
    peer.delivery_id += not follows
    number, flag = peer.delivery_id, TRUE if more else FALSE
    return performative(TRANSFER, uint(handle), uint(number), binary(b"%d" % number), uint(0), FALSE, flag, NULL, state, payload=payload)


def parts(peer: Peer, handle: int, payload: bytes) -> Iterator[bytes]:
    """Send a message in frames of the usual size."""
    for at in range(0, max(1, len(payload)), PIECE_BYTES):
        yield transfer(peer, handle, payload[at : at + PIECE_BYTES], more=at + PIECE_BYTES < len(payload), follows=at > 0)


def grant(handle: int, credit: int, *, drain: bool = False, echo: bool = False) -> bytes:
    """Give a link credit."""
    flags = TRUE if drain else FALSE, TRUE if echo else FALSE
    return performative(FLOW, uint(0), uint(1 << 30), uint(0), uint(1 << 30), uint(handle), uint(0), uint(credit), NULL, *flags)


async def conversation(peer: Peer) -> None:
    """Talk at random about everything: invalid text, colliding keys, nested arrays, ranges, transactions that do not exist."""
    hostile = Hostile(peer.random.randrange(1 << 30))
    await peer.say(hostile.opening(), *hostile.session())
    for number in range(FRAMES):
        if not number % 20:
            await peer.say(performative(END), *hostile.session())
        await peer.say(hostile.frame())


def refusal(more: bytes) -> bytes:
    """Return a state that refuses a message, with more information."""
    return described(REJECTED, listed(described(ERROR, listed(symbol(b"x"), NULL, more))))


async def ranges(peer: Peer) -> None:
    """Settle ranges of any width, again and again, with messages and without; some with long states that the broker has to answer."""
    await begun(peer)
    await in_rounds(peer, grant(1, 2000), *(transfer(peer, 0, described(VALUE, string(b"x"))) for _ in range(1000)))
    states = (
        described(ACCEPTED, LIST0), described(RELEASED, LIST0), described(MODIFIED, listed(TRUE, FALSE)),
        described(MODIFIED, listed(TRUE, FALSE, EMPTY_LISTS)), refusal(EMPTY_LISTS),
    )  # fmt: skip
    for _ in range(300):
        first, last = peer.random.choice(UINTS), peer.random.choice(UINTS)
        settled = peer.random.choice((TRUE, FALSE))
        await peer.say(performative(DISPOSITION, TRUE, uint(first), uint(last), settled, peer.random.choice(states)))


async def long_states(peer: Peer) -> None:
    """Send flows with attaches, and states of transfers that never end, each as long as a frame."""
    await begun(peer)
    long = peer.random.choice((EMPTY_LISTS, mapped(symbol(b"x-opt-long"), string(b"x" * PIECE_BYTES))))
    window = uint(0), uint(1 << 30), uint(0), uint(1 << 30)
    for handle in range(10, 60):
        await peer.say(from_address(handle, b"n1"), performative(FLOW, *window, uint(handle), uint(0), uint(0), NULL, FALSE, FALSE, long))
    await peer.say(*(to_queue(handle, b"n1") for handle in range(60, 110)))
    await in_rounds(peer, *(transfer(peer, handle, b"", state=refusal(long), more=True) for handle in range(60, 110)))


async def unanswered_detaches(peer: Peer) -> None:
    """Attach links that the broker refuses, with long names, and do not answer the detaches."""
    await begun(peer)
    for handle in range(10, 1000):
        name = "\U0001f600".encode() * 900 + b"%d" % handle
        source = described(SOURCE, listed(string(b"$management")))
        await peer.say(performative(ATTACH, string(name), uint(handle), TRUE, NULL, NULL, source, described(TARGET, listed())))
    await handled(peer)


async def huge_fields(peer: Peer) -> None:
    """Send ids, groups, keys and values of a megabyte in many transfers, and some that never end."""
    await begun(peer)
    huge = peer.random.choice((string(b"i" * 1_000_000), binary(b"\xff" * 1_000_000), string("\U0010ffff".encode() * 250_000)))
    fields = [NULL] * 13
    fields[peer.random.choice((0, 1, 2, 3, 4, 5, 6, 10, 12))] = huge
    keys = mapped(*(part for number in range(20_000) for part in (ulong(number * ((1 << 61) - 1) % (1 << 64)), NULL)))
    bodies = (
        described(PROPERTIES, listed(*fields)) + described(DATA, binary(b"x")),
        described(VALUE, keys), described(VALUE, listed(*[array(0x40, 256)] * 4000)),
        described(VALUE, nested(b"", 30, listed(*[NULL] * 9000))),
        described(DATA, binary(b"")) * 20_000, described(0x74, mapped(*(part for n in range(9000) for part in (string(b"k%d" % n), NULL)))),
    )  # fmt: skip
    for body in peer.random.sample(bodies, 3):
        await in_rounds(peer, *parts(peer, 0, body))
    await in_rounds(peer, *(transfer(peer, 0, b"", more=True, follows=number > 0) for number in range(5000)))


async def selectors(peer: Peer) -> None:
    """Attach consumers whose selectors take long, to a queue with messages that they read."""
    await begun(peer)
    slow = [text.encode() for text in SELECTORS] + [
        b" OR ".join([b"a LIKE '%x%y%z%'"] * 60), b"a LIKE '" + b"%_" * 200 + b"b'", b"NOT " * 200 + b"(a = 1)",
        b"a IN ('" + b"','".join([b"x"] * 900) + b"')",
    ]  # fmt: skip
    values = mapped(string(b"a"), string(b"xy" * 500))
    body = described(0x74, values) + described(VALUE, string(b"x"))
    await in_rounds(peer, *(transfer(peer, 0, body) for _ in range(100)))
    for handle in range(10, 40):
        await peer.say(from_address(handle, b"n1", peer.random.choice(slow)), grant(handle, 1))


async def patterns(peer: Peer) -> None:
    """Subscribe to patterns that match in many ways, and send to addresses of many words."""
    await begun(peer)
    words = (b"#", b"*", b"a", b"b")
    for handle in range(10, 110):
        await peer.say(from_address(handle, b".".join(peer.random.choices(words, k=40)), kind=b"topic"))
    topic = described(TARGET, listed(string(b".".join([b"a"] * 400)), *[NULL] * 5, symbol(b"topic")))
    await peer.say(
        performative(ATTACH, string(b"t"), uint(200), FALSE, NULL, NULL, described(SOURCE, listed()), topic, NULL, NULL, uint(0))
    )
    await in_rounds(peer, *(transfer(peer, 200, described(VALUE, NULL)) for _ in range(100)))


async def drains(peer: Peer) -> None:
    """Drain many links thousands of times, with echoes, and with credit at the ends of its type."""
    await begun(peer)
    await peer.say(*(from_address(handle, peer.random.choice(NAMES)) for handle in range(10, 200)))
    for _ in range(20):
        flows = (
            grant(
                peer.random.randrange(10, 200), peer.random.choice((0, 1, 100, (1 << 32) - 1)), drain=peer.random.random() < 0.8, echo=True
            )
            for _ in range(200)
        )
        await peer.say(*flows)


async def commits(peer: Peer) -> None:
    """Commit many messages to many queues, which the broker plans over several turns, and leave or go on before it has committed."""
    await begun(peer)
    addresses = [b"n%d" % number for number in range(6)] + [b"planned-%d" % number for number in range(60)]
    await peer.say(*(to_queue(10 + number, address) for number, address in enumerate(addresses)))
    await handled(peer)
    for turn in range(2):
        await peer.say(transfer(peer, 2, described(VALUE, described(DECLARE, listed(NULL)))))
        declared = await peer.heard(bytes((0, 0x53, DECLARED)))
        at = declared.find(b"\xa0")
        name = declared[at + 2 : at + 2 + declared[at + 1]] if at >= 0 and len(declared) > at + 1 else b"1.1"
        state = described(TRANSACTIONAL_STATE, listed(binary(name)))
        bodies = (
            described(0x74, mapped(string(b"_AMQ_DUPL_ID"), string(b"%d" % peer.random.randrange(3000)))) + described(VALUE, NULL)
            for _ in range(1500)
        )
        handles = peer.random.choices(range(10, 10 + len(addresses)), k=1500)
        await in_rounds(peer, *(transfer(peer, handle, body, state=state) for handle, body in zip(handles, bodies, strict=True)))
        end = transfer(peer, 2, described(VALUE, described(DISCHARGE, listed(binary(name), FALSE))))
        leave = peer.random.choice((performative(END), performative(DETACH, uint(2), TRUE), performative(DETACH, uint(10), TRUE), b""))
        await peer.say(end, leave if turn else b"", transfer(peer, 10, described(VALUE, NULL), state=state))


async def management(peer: Peer) -> None:
    """Send requests of any kind to ``$management``."""
    await begun(peer)
    requests = HostileManagement(peer.random.randrange(1 << 30))
    await peer.say(to_queue(10, b"$management"), from_address(11, b"answers"), grant(11, 1000))
    await in_rounds(peer, *(part for _ in range(60) for part in parts(peer, 10, requests.request(b"1.1"))))


async def churn(peer: Peer) -> None:
    """Attach and detach links, and begin and end sessions, without waiting for answers."""
    await begun(peer)
    for number in range(400):
        handle = 10 + number % 50
        await peer.say(from_address(handle, peer.random.choice(NAMES)), grant(handle, 10), performative(DETACH, uint(handle), TRUE))
    for number in range(1, 200):
        await peer.say(performative(BEGIN, NULL, uint(0), uint(1), uint(1), channel=number), performative(END, channel=number))


async def nothing(peer: Peer) -> None:
    """Send empty frames, empty messages and single bytes: a lot of input with little content."""
    await begun(peer)
    await peer.say(struct.pack(">IBBH", 8, 2, 0, 0) * 20_000)
    for byte in performative(FLOW, uint(0), uint(1), uint(0), uint(1)) * 20:
        await peer.say(bytes((byte,)))


async def broken_websocket(peer: Peer) -> None:
    """Send WebSocket frames that are not allowed, or too many of them. Over TCP this is no AMQP at all."""
    choose = peer.random.choice
    await peer.say(Hostile(1).opening())
    await peer.raw(choose((
        ws_frame(BINARY, b"x", masked=False), ws_frame(BINARY, size=1 << 63), ws_frame(BINARY, size=(1 << 62) - 1),
        ws_frame(BINARY, b"x", reserved=7),
        ws_frame(0x5, b"x"), ws_frame(PING, b"x" * 126), ws_frame(PING, fin=False), ws_frame(CONTINUATION, b"x"),
        ws_frame(TEXT, b"\xff\xfe"),
        ws_frame(CLOSING, b"\x00"), ws_frame(CLOSING, b"\x03\xe8" + b"\xff" * 100), ws_frame(CLOSING, b"\x00\x00"), ws_frame(PING) * 30_000,
        ws_frame(BINARY, fin=False) + ws_frame(CONTINUATION, fin=False) * 50_000, ws_frame(PONG, b"p" * 125) * 5_000, b"\x00" * 100_000,
        ws_frame(BINARY, fin=False) * 2, ws_frame(BINARY, b"\x00" * 900_000), ws_frame(BINARY, b"A") * 20_000, UPGRADE * 20,
    )))  # fmt: skip


ATTACKS: Final[Mapping[str, Attack]] = {
    each.__name__: each
    for each in (
        conversation,
        ranges,
        long_states,
        unanswered_detaches,
        huge_fields,
        selectors,
        patterns,
        drains,
        commits,
        management,
        churn,
        nothing,
        broken_websocket,
    )
}
#: What a client sends to a WebSocket listener in place of a request of it: each is one connection.
REQUESTS: Final = (
    UPGRADE[:-2], UPGRADE.replace(b"amqp", b"mqtt"), UPGRADE.replace(b"13", b"\xd9\xa1"), UPGRADE.replace(b"Host: ", b"Host: \xff"),
    UPGRADE[:-2] + b"".join(b"X%d: y\r\n" % number for number in range(4000)) + b"\r\n", UPGRADE[:-2] + b"X: " + b"y" * 200_000,
    UPGRADE.replace(b"amqp", b"amqp," * 3000),
    UPGRADE.replace(b"\r\n\r\n", b"\r\nContent-Length: 100000\r\n\r\n"), b"\x16\x03\x01" + bytes(400),
    b"GET " + b"/" * 100_000, UPGRADE.replace(b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: " + b"permessage-deflate," * 600 + b"\r\n\r\n"),
    b"\r\n" * 30_000, UPGRADE.replace(b"127.0.0.1", b"x" * 9000 + b":999999"), UPGRADE.replace(b"AAAA", b"\x00\x00"),
)  # fmt: skip


async def attack(name: str, port: int, seed: int, *, websocket: bool) -> None:
    """Attack with one connection."""
    chance = random.Random(seed)
    peer = await (WebSocketPeer if websocket else Peer).to(port, chance)
    try:
        await ATTACKS[name](peer)
    finally:
        if chance.random() < 0.8:  # otherwise the peer leaves while the broker is busy with its input
            await handled(peer)
        await peer.end(orderly=chance.random() < 0.5)


async def request(port: int, data: bytes) -> bytes:
    """Send bytes over a connection of their own, and return the answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    answer = b""
    with suppress(OSError, TimeoutError):
        writer.write(data)
        async with asyncio.timeout(ANSWER_S):
            await writer.drain()
            writer.write_eof()
            answer = await reader.read()
    writer.transport.abort()
    return answer


def http(seed: int) -> bytes:
    """Return a request for the admin server."""
    return HostileHttp(seed).request()
