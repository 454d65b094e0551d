"""The targets of the fuzzer. Each harness takes one input of any bytes, and raises if the product misbehaves.

A harness keeps its state: what an input leaves behind affects the next one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, Self

import uvloop

from bascule.amqp.bearer import TokenCheck
from bascule.amqp.connection import Connection
from bascule.amqp.performatives import Role
from bascule.amqp.sasl import AnonymousServer, AuthenticationFailed, SaslServer
from bascule.broker import administration
from bascule.broker.matching import wants
from bascule.core.address_index import AddressIndex
from bascule.core.destination import address_matches
from bascule.core.errors import BasculeError
from bascule.jms.message import JmsMessage, encode_message
from bascule.jms.selector import compile_selector
from bascule.server.admin import AdminServer
from bascule.testing.broker import MemoryLog
from tests.property.guarded import NOBODY, Guarded
from tests.property.test_hostile_guarded import LoginPeer
from tests.property.test_hostile_http import STATUSES, ask, node
from tests.property.test_hostile_management import Conversation
from tests.property.test_hostile_peers import Peer, complaints
from tests.support.costs import COST_S_MAX, spent_s
from tests.support.hostile import SASL_HEADER, Hostile, frame
from tests.support.hostile_http import HostileHttp
from tests.support.hostile_login import HostileLogins, HostileTokens
from tests.support.hostile_management import HostileManagement
from tests.support.provider import Provider
from tests.unit.server.served import Served
from tests.unit.server.test_administrator import administrator

#: Inputs that the fuzzer starts with.
SEEDS: Final = 60
#: Maximum length of an input.
INPUT_BYTES_MAX: Final = 16_384


class Costly(AssertionError):
    """Raised for an input that took more processor time than allowed."""


class Harness(Protocol):
    """Takes inputs."""

    #: Where stored data goes: it does not count as left behind.
    journal: MemoryLog

    def __enter__(self) -> Self:
        """Create what inputs are passed to."""

    def __exit__(self, *_: object) -> None:
        """Release it."""

    def feed(self, data: bytes) -> None:
        """Take one input. Raises AssertionError, or any error that the product should not raise."""


class Engine:
    """The frame decoder and the protocol engine of a server, from the first byte."""

    journal = MemoryLog()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def feed(self, data: bytes) -> None:
        """Take the bytes in two pieces, and answer until the connection has ended."""
        connection = Connection(Role.SERVER, container_id="server", sasl=SaslServer({"ANONYMOUS": AnonymousServer}))
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            connection.receive(piece, 0.0)
            connection.data_to_send()


class Server:
    """The server side of a connection with a broker in memory. Each input is the frames of a session."""

    def __init__(self) -> None:
        self.served = Served()
        self.journal = self.served.broker.log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def feed(self, data: bytes) -> None:
        """Open a connection and a session, send the frames, look at all queues, and leave nothing behind."""
        asyncio.run(self._talk(data))

    async def _talk(self, data: bytes) -> None:
        with complaints() as found:
            peer, broker = Peer(self.served, seed=0, cost_s_max=float("inf")), self.served.broker
            peer.say(Hostile(0).opening())
            for piece in (*Hostile(0).session(), *frames(data)):
                peer.say(piece)
            peer.connection.connection_lost(None)
            broker.settle()
            for queue in list(broker.engine.addresses.queues.values()):
                administration.delete(broker.engine, queue, force=True)
            broker.settle()
        assert found == []
        assert broker.engine.memory.used_bytes == 0
        assert self.served.contained == []
        assert self.served.usage.users == {}


def frames(data: bytes) -> Iterator[bytes]:
    """Divide an input into frames: two bytes give the length of the next one; a length beyond the input is shortened."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 2], "big")
        yield frame(data[position + 2 : position + 2 + size])
        position += 2 + size


class Login:
    """A connection to a broker with users and tokens, from the first byte behind the SASL header. No input has valid credentials."""

    def __enter__(self) -> Self:
        self._provider = Provider().__enter__()
        self._served = Guarded(self._provider)
        self.journal = self._served.broker.log
        return self

    def __exit__(self, *_: object) -> None:
        self._served.__exit__(None, None, None)
        self._provider.__exit__(None, None, None)

    def feed(self, data: bytes) -> None:
        """Send the bytes, and check that they have changed nothing."""
        asyncio.run(self._talk(data))

    async def _talk(self, data: bytes) -> None:
        served = self._served
        served.forget_failures()
        before = served.state()
        with complaints() as found:
            peer = LoginPeer(served, seed=0, cost_s_max=float("inf"))
            await peer.tell(SASL_HEADER + data)
            assert peer.connection.client.user == ""
            peer.connection.connection_lost(None)
            served.broker.settle()
        assert found == []
        assert served.contained == []
        assert served.state() == before


class Powerless(Login):
    """The frames of a session of a user who may do nothing."""

    async def _talk(self, data: bytes) -> None:
        served, before = self._served, self._served.state()
        served.certified = NOBODY
        with complaints() as found:
            peer = Peer(served, seed=0, cost_s_max=float("inf"), mechanism=b"EXTERNAL")
            for piece in (Hostile(0, b"EXTERNAL").opening(), *Hostile(0).session(), *frames(data)):
                peer.say(piece)
            peer.connection.connection_lost(None)
            served.broker.settle()
        assert found == []
        assert served.contained == []
        assert served.state() == before
        assert served.usage.users == {}


class Token:
    """Tokens: the input as a token, and the input as the claims of a token that the provider has signed."""

    journal = MemoryLog()

    def __enter__(self) -> Self:
        self._provider = Provider().__enter__()
        self._served = Guarded(self._provider)
        self._hostile = HostileTokens(0, self._provider)
        return self

    def __exit__(self, *_: object) -> None:
        self._served.__exit__(None, None, None)
        self._provider.__exit__(None, None, None)

    def feed(self, data: bytes) -> None:
        """Check both tokens. Only the second one may be valid."""
        assert not self._valid(data.decode("latin-1"))
        self._valid(self._hostile.sign(data))

    def _valid(self, token: str) -> bool:
        with suppress(AuthenticationFailed):
            check = TokenCheck(self._served.tokens.verifier, "", token)
            return check()
        return False


class Matching:
    """Selectors and address patterns: a selector, patterns and addresses, separated by zeros."""

    journal = MemoryLog()

    def __init__(self) -> None:
        properties = {"a": 1, "b": "x" * 500, "c": "a%b_c", "d": 2.5, "e": True, "JMSPriority": 4}
        self._message = encode_message(JmsMessage(body_kind="text", body="x", properties=properties))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def feed(self, data: bytes) -> None:
        """Evaluate the selector. Look up the rest as addresses in an index of itself, and compare the index with the matcher."""
        text, *patterns = data.decode(errors="replace").split("\0")
        with suppress(BasculeError):
            wants(compile_selector(text), self._message)
        patterns = list(dict.fromkeys(pattern[:1000] for pattern in patterns))[:30]
        index = AddressIndex((pattern, pattern) for pattern in patterns)
        for address in patterns:
            assert index.matching(address) == [pattern for pattern in patterns if address_matches(pattern, address)]
        for pattern in patterns:
            index.remove(pattern, pattern)


class Management:
    """Requests to ``$management``."""

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._served = Served()
        self.journal = self._served.broker.log
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def feed(self, data: bytes) -> None:
        """Send the bytes as a message, check the answer, and send a valid request."""
        self._runner.run(self._talk(data))

    async def _talk(self, data: bytes) -> None:
        with complaints() as found:
            conversation = Conversation(self._served)
            conversation.cost_s(data)
            conversation.ask_properly()
            conversation.close()
        assert found == []


class Http:
    """Requests to the admin server, over a socket."""

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.run(self._begin())
        return self

    async def _begin(self) -> None:
        self._node = node()
        self.journal = self._node.broker.log
        self._server = AdminServer(administrator(self._node), host="127.0.0.1", port=0)
        self._server.start()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._server.stop())
        self._runner.close()

    def feed(self, data: bytes) -> None:
        """Send the bytes, and check the status of the answer."""
        with complaints() as found:
            answer = self._runner.run(ask(self._server.port, data))
        assert found == []
        assert self._node.contained == []
        assert self._node.uncaught.counts == {}
        if answer:
            version, status = answer.split(b" ", 2)[:2]
            assert version == b"HTTP/1.1"
            assert int(status) in {100, *STATUSES}, answer[:200]


HARNESSES: Final[Mapping[str, type[Any]]] = {
    "engine": Engine, "server": Server, "matching": Matching, "management": Management, "http": Http, "login": Login,
    "powerless": Powerless, "token": Token,
}  # fmt: skip

_SELECTORS = (
    "a = 1 AND b LIKE 'x%y_' ESCAPE '!'", "NOT (a BETWEEN 1 AND 2.5e3) OR c IN ('a', 'b')", "d IS NOT NULL", "a + 2 * -d / 0 >= 0x1F",
    "c LIKE '%%%%%a%%%%%b%%%%%c'", "e = TRUE AND JMSPriority <> 4", "((((((a))))))=1", "b LIKE '" + "_%" * 50 + "'",
)  # fmt: skip
_PATTERNS = ("#", "*", "#.#", "a.*.b", "a.#.b.#", "", ".", "a..b", "#.a", "*.#", "a.b.c", "##.a*")


def seeds(name: str) -> list[bytes]:
    """Return the inputs with which the fuzzer of a harness starts."""
    with Provider() as provider:
        found = [_seed(name, number, provider) for number in range(SEEDS)]
    return [data for data in found if len(data) <= INPUT_BYTES_MAX]


def _seed(name: str, number: int, provider: Provider) -> bytes:
    if name == "engine":
        hostile = Hostile(number)
        return hostile.opening() + b"".join(hostile.session()) + b"".join(hostile.frame() for _ in range(6))
    if name == "login":
        return b"".join(HostileLogins(number, provider).pieces())[len(SASL_HEADER) :]
    if name == "token":
        return HostileTokens(number, provider).token().encode("latin-1", "replace")
    if name in ("server", "powerless"):
        hostile = Hostile(number)
        bodies = [hostile.frame()[8:] for _ in range(6)]
        return b"".join(len(body).to_bytes(2, "big") + body for body in bodies if len(body) < 1 << 16)
    if name == "management":
        return HostileManagement(number).request(b"1.1")
    if name == "http":
        return HostileHttp(number).request()
    chance = random.Random(number)
    return "\0".join((chance.choice(_SELECTORS), *chance.sample(_PATTERNS, 5))).encode()


def judged(harness: Harness, data: bytes, cost_s_max: float = COST_S_MAX) -> None:
    """Pass an input to the harness. Raises Costly if it takes more processor time than allowed."""
    cost_s = spent_s(lambda: harness.feed(data))
    if cost_s > cost_s_max:
        raise Costly(f"{cost_s:.3f} s for {len(data)} bytes")
