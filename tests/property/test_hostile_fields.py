"""Each hostile value in each field that a peer can send, one at a time, to a broker in memory.

The test is exhaustive, where the generators of the other tests are random. A value affects at most its own connection, costs little, and
accepted messages can be loaded, shown, moved and delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import pytest

from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.property.test_hostile_peers import Peer, complaints, use
from tests.support import hostile
from tests.support.costs import quiet
from tests.support.hostile import (
    BROKEN_TEXTS,
    FALSE,
    HASH_MODULUS,
    LIST0,
    NULL,
    SYMBOLS,
    TEXTS,
    TIMES_MS,
    TRUE,
    UINTS,
    ULONGS,
    array,
    binary,
    described,
    listed,
    mapped,
    nested,
    performative,
    string,
    symbol,
    timestamp,
    uint,
    ulong,
)
from tests.unit.server.served import Client, Served

#: Descriptors beside those of performatives and sections.
DELETE_ON_CLOSE, SASL_INIT = 0x2B, 0x41
COLLIDING_UUIDS: Final = [b"\x98" + (number * HASH_MODULUS % (1 << 128)).to_bytes(16, "big") for number in range(65)]
COLLIDING_DESCRIBED: Final = [b"\0" + ulong(number * HASH_MODULUS % (1 << 64)) + NULL for number in range(65)]
NAN, INFINITY = b"\x82\x7f\xf8" + bytes(6), b"\x82\x7f\xf0" + bytes(6)


def values() -> Iterator[bytes]:
    """Return hostile values of every type."""
    texts = (*TEXTS, *BROKEN_TEXTS, b"x" * 70_000)
    yield from (make(text) for make in (string, symbol, binary) for text in texts)
    yield from map(symbol, SYMBOLS)
    yield from (NULL, TRUE, FALSE, b"\x43", b"\x44", LIST0, b"\x56\x01", b"\x56\x02", NAN, INFINITY, b"\x72\x7f\xc0\0\0")
    yield from (*map(uint, UINTS), *map(ulong, ULONGS), *map(timestamp, TIMES_MS))
    yield from (b"\x50\xff", b"\x51\x80", b"\x54\x80", b"\x60\xff\xff", b"\x61\x80\0", b"\x71\x80\0\0\0", b"\x81\x80" + bytes(7))
    yield from (b"\x73" + code for code in (b"\0\0\xd8\0", b"\0\0\xdf\xff", b"\0\x11\0\0", b"\0\x10\xff\xff", b"\xff" * 4))
    yield from (b"\x74" + b"\xff" * 4, b"\x84" + b"\xff" * 8, b"\x94" + b"\xff" * 16, b"\x98" + b"\xff" * 16)
    yield from (array(code, count) for code in (0x40, 0x41, 0x42, 0x43, 0x44, 0x45) for count in (0, 1, 256, 257, (1 << 32) - 1))
    yield from (
        array(0xA3, 2, b"\x01a\x02\xc3\xa9"),
        array(0xA1, 1, b"\x03\xed\xa0\x80"),
        array(0xE0, 1, b"\x02\x01\x40"),
        array(0x00, 1, b"\x44\x40"),
    )
    yield from (array(0x80, 1, bytes(8)), array(0xF0, 2, bytes(8)), array(0xD1, 1, b"\0\0\0\x04\0\0\0\0"), b"\xe0\x02\xff\x40")
    yield from (
        mapped(),
        mapped(NULL, NULL),
        mapped(symbol(b"a"), NULL, symbol(b"a"), TRUE),
        mapped(symbol(b"a")),
        mapped(NAN, NULL, NAN, NULL),
    )
    yield from (mapped(*(part for key in keys for part in (key, NULL))) for keys in (COLLIDING_UUIDS, COLLIDING_DESCRIBED))
    yield mapped(*(part for number in range(65) for part in (ulong(number * HASH_MODULUS % (1 << 64)), NULL)))
    yield from (
        mapped(key, NULL)
        for key in (listed(NULL), mapped(), array(0x40, 1), TRUE, b"\x73\0\0\xd8\0", symbol("é".encode()), string(b"\xff"))
    )
    yield from (
        mapped(symbol(b"x-opt-a"), value) for value in (string(b"\xed\xa0\x80"), nested(b"", 20), nested(b"", 33), array(0x40, 256), NAN)
    )
    yield from (nested(b"", 31), nested(b"", 40), nested(b"", 2_000), listed(*[array(0x45, 256)] * 300), listed(*[NULL] * 60_000))
    yield from (b"\0\x44" * levels + NULL for levels in (2, 31, 40, 2_000))
    yield from (
        b"\0" + b"\0\x44\x44" * 20 + NULL,
        b"\0" + listed(NULL) + NULL,
        b"\0\x40\x40",
        b"\0" + string(b"x") + NULL,
        b"\0" + symbol(b"x" * 300) + NULL,
    )
    yield from (
        described(code, body)
        for code in (0x10, 0x1D, 0x24, 0x25, 0x28, 0x29, 0x30, 0x34, 0x70, 0x99)
        for body in (LIST0, mapped(), NULL, listed(*[NULL] * 20))
    )
    yield from (
        b"\xd0" + b"\xff" * 8,
        b"\xd0\0\0\0\x04\xff\xff\xff\xff",
        b"\xc0\x01\xff",
        b"\xd1\0\0\0\x05\0\0\0\x03\x40",
        b"\xb1\xff\xff\xff\xff",
        b"\xff",
        b"",
    )


#: The values, without the condition by which a test recognises a fault of the broker.
VALUES: Final = tuple(value for value in dict.fromkeys(values()) if value != symbol(b"amqp:internal-error"))
#: In the default suite, each field gets one of this number of values.
STEP: Final = 23
ZERO, HUNDRED, ONE = uint(0), uint(100), uint(1)
TO_QUEUE: Final = (string(b"n1"), NULL, NULL, NULL, NULL, NULL, symbol(b"queue"))
FROM_QUEUE: Final = (string(b"n1"), *[NULL] * 9, symbol(b"queue"))
ERROR: Final = (symbol(b"amqp:not-found"), string(b"why"), mapped(symbol(b"a"), NULL))
#: Fields of a performative, a composite or a section, or keys and values of a map.
Fields = Sequence[bytes]
Place = tuple[Fields, Callable[[Fields], bytes]]
A_SOURCE, A_TARGET = described(hostile.SOURCE, LIST0), described(hostile.TARGET, listed(*TO_QUEUE))
PRODUCER: Final = (string(b"new"), uint(5), FALSE, NULL, NULL, A_SOURCE, A_TARGET, NULL, NULL, ZERO, NULL, NULL, NULL, NULL)
CONSUMER: Final = (
    *PRODUCER[:2], TRUE, *PRODUCER[3:5], described(hostile.SOURCE, listed(*FROM_QUEUE)), described(hostile.TARGET, LIST0), NULL, NULL, NULL,
    *PRODUCER[10:],
)  # fmt: skip
TRANSFER: Final = (ZERO, ZERO, binary(b"t"), ZERO, FALSE, FALSE, NULL, NULL, NULL, NULL, NULL)
FLOW: Final = (ZERO, HUNDRED, ZERO, HUNDRED, ONE, ZERO, uint(5), NULL, FALSE, FALSE, NULL)
ACCEPTED: Final = described(hostile.ACCEPTED, LIST0)
MESSAGE: Final = described(hostile.VALUE, string(b"x"))
MESSAGE_PROPERTIES: Final = (
    string(b"ID:1"), NULL, string(b"n1"), NULL, NULL, NULL, symbol(b"text/plain"), NULL, timestamp(0), timestamp(1), string(b"g"), ONE,
    NULL,
)  # fmt: skip
ANNOTATIONS: Final = (
    b"x-opt-delivery-delay", b"x-opt-delivery-time", b"x-opt-jms-dest", b"x-opt-jms-reply-to", b"x-opt-jms-msg-type", b"x-opt-ORIG-ADDRESS",
    b"x-opt-ORIG-QUEUE", b"x-opt-ORIG-ROUTING-TYPE", b"x-opt-bascule-reason",
)  # fmt: skip


def performed(code: int, channel: int = 0) -> Callable[[Fields], bytes]:
    """Return a performative with the fields."""
    return lambda fields: performative(code, *fields, channel=channel)


def composite(code: int, fields: Fields) -> bytes:
    return described(code, listed(*fields))


def message(section: Callable[[Fields], bytes], *, body: bool = True) -> Callable[[Fields], bytes]:
    """Return a transfer of a message with a section."""
    return lambda fields: performative(hostile.TRANSFER, *TRANSFER, payload=section(fields) + (MESSAGE if body else b""))


def command(code: int) -> Callable[[Fields], bytes]:
    """Return a command to the coordinator."""
    return lambda fields: performative(hostile.TRANSFER, uint(2), *TRANSFER[1:], payload=described(hostile.VALUE, composite(code, fields)))


def settled(state: Callable[[Fields], bytes]) -> Callable[[Fields], bytes]:
    """Return a disposition of the first delivery that the consumer got."""
    return lambda fields: performative(hostile.DISPOSITION, TRUE, ZERO, NULL, NULL, state(fields))


def with_source(source: Callable[[Fields], Fields]) -> Callable[[Fields], bytes]:
    """Return an attach of a consumer."""
    return lambda fields: performative(hostile.ATTACH, *CONSUMER[:5], composite(hostile.SOURCE, source(fields)), *CONSUMER[6:])


def with_target(code: int) -> Callable[[Fields], bytes]:
    """Return an attach of a producer, or of a coordinator."""
    return lambda fields: performative(hostile.ATTACH, *PRODUCER[:6], composite(code, fields), *PRODUCER[7:])


def with_filter(descriptor: bytes) -> Callable[[Fields], bytes]:
    """Return an attach of a consumer with a filter of a name and a value."""
    return with_source(lambda fields: (*FROM_QUEUE[:7], mapped(fields[0], b"\0" + descriptor + fields[1]), *FROM_QUEUE[8:]))


def of_code(code: int) -> Callable[[Fields], bytes]:
    return lambda fields: composite(code, fields)


def of_map(code: int) -> Callable[[Fields], bytes]:
    return lambda fields: described(code, mapped(*fields))


#: What is sent in an open session.
PLACES: Final[Mapping[str, Place]] = {
    "begin": ((NULL, ZERO, HUNDRED, HUNDRED, uint(7), NULL, NULL, NULL), performed(hostile.BEGIN, channel=1)),
    "attach of a producer": (PRODUCER, performed(hostile.ATTACH)),
    "attach of a consumer": (CONSUMER, performed(hostile.ATTACH)),
    "source": (FROM_QUEUE, with_source(tuple)),
    "selector": ((symbol(b"f"), string(b"a = 1")), with_filter(symbol(b"apache.org:selector-filter:string"))),
    "selector by code": ((symbol(b"f"), string(b"a = 1")), with_filter(ulong(0x0000468C00000004))),
    "no local": ((symbol(b"f"), LIST0), with_filter(symbol(b"apache.org:no-local-filter:list"))),
    "target": (TO_QUEUE, with_target(hostile.TARGET)),
    "coordinator": ((symbol(b"amqp:local-transactions"),), with_target(hostile.COORDINATOR)),
    "properties of a dynamic node": (
        (symbol(b"lifetime-policy"), described(DELETE_ON_CLOSE, LIST0)),
        with_source(lambda fields: (NULL, NULL, NULL, NULL, TRUE, mapped(*fields), *FROM_QUEUE[6:])),
    ),
    "unsettled": (
        (binary(b"t"), ACCEPTED), lambda fields: performative(hostile.ATTACH, *PRODUCER[:7], mapped(*fields), *PRODUCER[8:])
    ),
    "flow": (FLOW, performed(hostile.FLOW)),
    "transfer": (TRANSFER, lambda fields: performative(hostile.TRANSFER, *fields, payload=MESSAGE)),
    "disposition": ((TRUE, ZERO, ZERO, FALSE, ACCEPTED, FALSE), performed(hostile.DISPOSITION)),
    "modified": ((TRUE, FALSE, mapped(symbol(b"x-opt-a"), NULL)), settled(of_code(hostile.MODIFIED))),
    "rejected": ((composite(hostile.ERROR, ERROR),), settled(of_code(hostile.REJECTED))),
    "error of rejected": (ERROR, settled(lambda fields: composite(hostile.REJECTED, [composite(hostile.ERROR, fields)]))),
    "received": ((ZERO, ulong(0)), settled(of_code(hostile.RECEIVED))),
    "transactional state": ((binary(b"t"), ACCEPTED), settled(of_code(hostile.TRANSACTIONAL_STATE))),
    "declare": ((NULL,), command(hostile.DECLARE)),
    "discharge": ((binary(b"t"), TRUE), command(hostile.DISCHARGE)),
    "detach": ((ZERO, TRUE, composite(hostile.ERROR, ERROR)), performed(hostile.DETACH)),
    "error of detach": (ERROR, lambda fields: performative(hostile.DETACH, ONE, TRUE, composite(hostile.ERROR, fields))),
    "end": (ERROR, lambda fields: performative(hostile.END, composite(hostile.ERROR, fields))),
    "close": (ERROR, lambda fields: performative(hostile.CLOSE, composite(hostile.ERROR, fields))),
    "header": ((TRUE, b"\x50\x04", uint(1000), TRUE, ZERO), message(of_code(hostile.HEADER))),
    "delivery annotations": ((symbol(b"x-opt-a"), NULL), message(of_map(hostile.DELIVERY_ANNOTATIONS))),
    "message annotations": ((symbol(b"x-opt-a"), NULL), message(of_map(hostile.MESSAGE_ANNOTATIONS))),
    "properties": (MESSAGE_PROPERTIES, message(of_code(hostile.PROPERTIES))),
    "application properties": ((string(b"a"), NULL), message(of_map(hostile.APPLICATION_PROPERTIES))),
    "body": ((MESSAGE,), message(lambda fields: fields[0], body=False)),
    "value": ((string(b"x"),), message(lambda fields: described(hostile.VALUE, fields[0]), body=False)),
    "sequence": ((listed(NULL),), message(lambda fields: described(hostile.SEQUENCE, fields[0]), body=False)),
    "data": ((binary(b"x"),), message(lambda fields: described(hostile.DATA, fields[0]), body=False)),
    "footer": ((symbol(b"a"), NULL), message(lambda fields: MESSAGE + of_map(hostile.FOOTER)(fields), body=False)),
    **{
        f"annotation {name.decode()}": (
            (string(b"x"),),
            message(lambda fields, name=name: described(hostile.MESSAGE_ANNOTATIONS, mapped(symbol(name), fields[0]))),  # type: ignore[misc]
        )
        for name in ANNOTATIONS
    },
}  # fmt: skip
#: What is sent before a session: headers, SASL and open with valid fields.
OPEN: Final = (
    string(b"peer"),
    NULL,
    NULL,
    b"\x60\xff\xff",
    NULL,
    NULL,
    NULL,
    NULL,
    symbol(b"queue"),
    mapped(symbol(b"product"), string(b"x")),
)
INIT: Final = (symbol(b"ANONYMOUS"), binary(b""), NULL)


def opening(init: Fields = INIT, fields: Fields = OPEN) -> bytes:
    sasl = hostile.frame(described(SASL_INIT, listed(*init)), kind=1)
    return hostile.SASL_HEADER + sasl + hostile.AMQP_HEADER + performative(hostile.OPEN, *fields)


def openings(mechanism: bytes) -> Mapping[str, Place]:
    """Return what is sent before a session, with a login by this mechanism."""
    init = (symbol(mechanism), *INIT[1:])
    return {
        "open": (OPEN, lambda fields: opening(init, fields)),
        "properties of open": ((symbol(b"product"), string(b"x")), lambda fields: opening(init, (*OPEN[:9], mapped(*fields)))),
        "SASL init": (init, lambda fields: opening(init=fields)),
    }


OPENINGS: Final = openings(b"ANONYMOUS")
SESSION: Final = (
    performative(hostile.BEGIN, NULL, ZERO, HUNDRED, HUNDRED),
    performative(hostile.ATTACH, string(b"p"), ZERO, *PRODUCER[2:]),
    performative(hostile.ATTACH, string(b"c"), ONE, *CONSUMER[2:]),
    performative(hostile.ATTACH, string(b"t"), uint(2), *PRODUCER[2:6], described(hostile.COORDINATOR, LIST0), *PRODUCER[7:]),
    performative(hostile.FLOW, ZERO, HUNDRED, ZERO, HUNDRED, ONE, ZERO, uint(3)),
)


def pieces(place: str, step: int, mechanism: bytes = b"ANONYMOUS") -> Iterator[tuple[str, Sequence[bytes]]]:
    """Return frames that put each value, or one value in each ``step``, into each field of a place, one at a time.

    ``mechanism`` is that of the login.
    """
    fields, make = openings(mechanism)[place] if place in OPENINGS else PLACES[place]
    opened = opening((symbol(mechanism), *INIT[1:]))
    for index in range(len(fields)):
        for value in VALUES[index % step :: step]:
            said = make((*fields[:index], value, *fields[index + 1 :]))
            name = f"field {index}: {value[:40].hex()}"
            yield name, (said, *SESSION) if place in OPENINGS else (opened, *SESSION, said)


async def talk(place: str, step: int) -> None:
    clock = [1_000]
    served = Served(BrokerInMemory(clock=lambda: clock[0]))
    broker = served.broker
    with complaints() as found:
        canary = Client(served, "canary")
        link = canary.consumer("canary", 1 << 20)
        for number, (name, said) in enumerate(pieces(place, step)):
            if not broker.engine.queue("n1").held_messages:
                broker.send("n1", message_bytes("x"), Sender(), number)
            peer = Peer(served, 0)
            try:
                for piece in said:
                    peer.say(piece)
                peer.connection.connection_lost(None)
                broker.settle()
                assert found == []
                assert served.contained == []
            except Exception as error:
                raise AssertionError(f"{place}, {name}: {error!r}") from error
        broker.send("canary", message_bytes("alive"), Sender(), 1)
        served.settle(canary)
        assert canary.received(link) == 1
        canary.connection.connection_lost(None)
        broker.settle()
        assert served.usage.users == {}
        use(broker, clock)
    assert found == []


@pytest.mark.parametrize("place", [*OPENINGS, *PLACES])
def test_sampled_hostile_field_values_harm_only_their_own_connection(place: str) -> None:
    with quiet():
        asyncio.run(talk(place, STEP))


@pytest.mark.slow
@pytest.mark.parametrize("place", [*OPENINGS, *PLACES])
def test_all_hostile_field_values_harm_only_their_own_connection(place: str) -> None:
    with quiet():
        asyncio.run(talk(place, 1))
