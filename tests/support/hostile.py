"""A generator of hostile AMQP that knows the classes of attack.

It writes the bytes itself, since the encoder of the product refuses most of them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Final

SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
NULL, TRUE, FALSE, LIST0 = b"\x40", b"\x41", b"\x42", b"\x45"
OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
ERROR, RECEIVED, ACCEPTED, REJECTED, RELEASED, MODIFIED, SOURCE, TARGET = 0x1D, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29
COORDINATOR, DECLARE, DISCHARGE, TRANSACTIONAL_STATE = 0x30, 0x31, 0x32, 0x34
HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION_PROPERTIES, DATA, SEQUENCE, VALUE, FOOTER = range(0x70, 0x79)

#: Unicode texts, as bytes: plain, empty, not ASCII, long, controls, patterns, prefixes with a meaning.
TEXTS: Final = (
    b"a", b"", "é".encode(), b"\x00", b"a\nb\x1b[31m", "\U0010ffff\u202e\ufeff".encode(), b"#.*.#", b"x" * 300, b"queue://",
    "\U0001f600".encode() * 60, b"ID:AMQP_ULONG:x", b"\xef\xbf\xbf", b"%s%n{}", b"'\"\\", b"|", b"a|global", b".",
)  # fmt: skip
#: Invalid texts: surrogates, truncated, overlong, beyond the last code point; and texts that are too long for a name.
BROKEN_TEXTS: Final = (
    b"\xed\xa0\x80", b"\xed\xb0\x80x", b"\xff", b"\xc3", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"y" * 5000, "\U0001f600".encode() * 2000,
)  # fmt: skip
SYMBOLS: Final = (b"a", b"amqp:accept:list", b"shared", b"global", b"x" * 200, b"", b"\x00", b"a b", b"amqp:internal-error")
#: Related to the modulus of Python's hash of numbers: as keys of a map such numbers collide.
HASH_MODULUS: Final = (1 << 61) - 1
ULONGS: Final = (0, 1, 255, 256, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1, HASH_MODULUS)
UINTS: Final = (0, 1, 2, 100, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1)
#: Milliseconds: the years 0, 1, 9999 and 10000, and the ends of the type.
TIMES_MS: Final = (-(1 << 63), -62_135_596_800_001, -1, 0, 1, 253_402_300_799_999, 253_402_300_800_000, (1 << 63) - 1)


def variable(code8: int, octets: bytes) -> bytes:
    """Encode a string, symbol or binary."""
    if len(octets) < 256:
        return bytes((code8, len(octets))) + octets
    return struct.pack(">BI", code8 + 0x10, len(octets)) + octets


def string(octets: bytes) -> bytes:
    """Encode a string of any bytes."""
    return variable(0xA1, octets)


def symbol(octets: bytes) -> bytes:
    """Encode a symbol of any bytes."""
    return variable(0xA3, octets)


def binary(octets: bytes) -> bytes:
    """Encode a binary."""
    return variable(0xA0, octets)


def uint(number: int) -> bytes:
    """Encode a uint."""
    return struct.pack(">BI", 0x70, number)


def ulong(number: int) -> bytes:
    """Encode a ulong."""
    return struct.pack(">BQ", 0x80, number)


def timestamp(time_ms: int) -> bytes:
    """Encode a timestamp."""
    return struct.pack(">Bq", 0x83, time_ms)


def compound(code32: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    """Encode a list (0xd0) or map (0xd1) of encoded items."""
    content = b"".join(items)
    return struct.pack(">BII", code32, len(content) + 4, len(items) if count is None else count) + content


def listed(*items: bytes) -> bytes:
    """Encode a list."""
    return compound(0xD0, items)


def mapped(*items: bytes) -> bytes:
    """Encode a map; keys and values alternate."""
    return compound(0xD1, items)


def array(code: int, count: int, octets: bytes = b"") -> bytes:
    """Encode an array whose elements are ``octets`` together."""
    return struct.pack(">BIIB", 0xF0, len(octets) + 5, count, code) + octets


def described(code: int, value: bytes) -> bytes:
    """Encode a described value with a numeric descriptor."""
    return bytes((0, 0x53, code)) + value


def frame(body: bytes, channel: int = 0, kind: int = 0) -> bytes:
    """Encode a frame."""
    return struct.pack(">IBBH", 8 + len(body), 2, kind, channel) + body


def performative(code: int, *fields: bytes, payload: bytes = b"", channel: int = 0) -> bytes:
    """Encode a frame with a performative."""
    return frame(described(code, listed(*fields)) + payload, channel)


def nested(opening: bytes, levels: int, core: bytes = NULL) -> bytes:
    """Encode lists within lists, each with ``opening`` before the inner one."""
    value = core
    for _ in range(levels):
        value = listed(opening, value) if opening else listed(value)
    return value


#: A map of 8 KB that needs half a megabyte when it is decoded, since a list of 8,000 empty lists is in it; and how often it is sent.
EMPTY_LISTS: Final = mapped(symbol(b"x-opt-long"), compound(0xD0, [LIST0] * 8_000))
LONG_SHARE: Final = 0.2
#: The credit of some consumers, and the deliveries that a state with such a map concerns.
WIDE: Final = 500


class Hostile:
    """A random choice of hostile input by a seed.

    ``malice`` is the share of invalid choices; with a high share a conversation ends early. ``mechanism`` is that of the login.
    """

    def __init__(self, seed: int, mechanism: bytes = b"ANONYMOUS") -> None:
        self.random = random.Random(seed)
        self._lengths = random.Random(seed)  # of its own, so that a seed says the same with other lengths
        self.mechanism = mechanism
        self.delivery_id = -1  # of the last transfer
        self.malice = self.random.choice((0.0, 0.002, 0.01, 0.05, 0.3))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    def text(self) -> bytes:
        """Return the bytes of a text."""
        return self.random.choice(BROKEN_TEXTS if self.chance(self.malice) else TEXTS)

    def name(self) -> bytes:
        """Return the bytes of one of a few names, or of any text."""
        return b"n%d" % self.random.randrange(6) if self.chance(0.7) else self.text()

    def symbol(self) -> bytes:
        """Return a symbol."""
        return symbol(self.random.choice((*TEXTS, *BROKEN_TEXTS) if self.chance(self.malice) else SYMBOLS))

    def uint(self) -> bytes:
        """Return a uint from the edges of the type."""
        return uint(self.random.choice(UINTS))

    def small(self) -> bytes:
        """Return a small uint."""
        return bytes((0x52, self.random.randrange(8)))

    def key(self) -> bytes:
        """Return a key of a map: mostly a symbol, sometimes a value of another type."""
        if self.chance(self.malice):
            return self._pick((1, lambda: string(self.text())), (2, lambda: self.value(1)))
        return symbol(b"x-opt-%d" % self.random.randrange(1000))

    def map(self, depth: int = 2, key: Callable[[], bytes] | None = None) -> bytes:
        """Return a map."""
        make_key = key or self.key
        if not self.chance(self.malice):
            return mapped(*(part for _ in range(self.random.randrange(4)) for part in (make_key(), self.value(depth))))
        nan = b"\x82\x7f\xf8" + bytes(6)
        return self._pick(
            (1, lambda: mapped(*(part for n in range(300) for part in (ulong(n * HASH_MODULUS % (1 << 64)), NULL)))),
            (1, lambda: mapped(*(part for n in range(300) for part in (b"\x98" + (n * HASH_MODULUS).to_bytes(16, "big"), NULL)))),
            (1, lambda: mapped(symbol(b"same"), NULL, symbol(b"same"), TRUE)),
            (1, lambda: mapped(nan, NULL, nan, NULL)),
            (1, lambda: mapped(ulong(1), NULL, b"\x54\x01", NULL, b"\x41", NULL)),
            (1, lambda: self.value(depth)),
        )  # fmt: skip

    def origin(self) -> bytes:
        """Return annotations of a dead letter, of any types."""
        names = ("x-opt-ORIG-ADDRESS", "x-opt-ORIG-QUEUE", "x-opt-ORIG-ROUTING-TYPE", "x-opt-ORIG-EXPIRATION", "x-opt-bascule-reason",
                 "x-opt-delivery-delay", "x-opt-jms-dest", "x-opt-bascule-moved-at")  # fmt: skip
        chosen = self.random.sample(names, 4)
        return mapped(*(part for name in chosen for part in (symbol(name.encode()), self.value(1))))

    def value(self, depth: int = 3) -> bytes:
        """Return any value."""
        if self.chance(self.malice):
            return self.broken_value()
        simple: list[tuple[int, Callable[[], bytes]]] = [
            (3, lambda: self.random.choice((NULL, TRUE, FALSE, b"\x43", b"\x44", LIST0, b"\x56\x01"))),
            (3, lambda: string(self.text())), (3, self.symbol), (2, lambda: binary(self.text())),
            (2, lambda: ulong(self.random.choice(ULONGS))), (2, self.uint), (2, lambda: timestamp(self.random.choice(TIMES_MS))),
            (1, lambda: b"\x73" + self.random.choice((b"\0\0\xd7\xff", b"\0\x10\xff\xff", b"\0\0\0a"))),
            (1, lambda: b"\x82" + self.random.choice((b"\x7f\xf8" + bytes(6), b"\x7f\xf0" + bytes(6), b"\x80" + bytes(7)))),
            (1, lambda: b"\x94" + self.random.randbytes(16)), (1, lambda: b"\x84" + bytes(8)),
            (1, lambda: b"\x98" + self.random.randbytes(16)),
            (1, lambda: b"\x81" + self.random.choice((bytes(8), b"\x80" + bytes(7), b"\x7f" + b"\xff" * 7))),
            (1, lambda: array(self.random.choice((0x40, 0x41, 0x43, 0x45)), self.random.choice((0, 1, 200)))),
            (1, lambda: array(0x71, 3, bytes(12))), (1, lambda: array(0xA3, 2, b"\x01a\x01b")),
        ]  # fmt: skip
        if depth > 0:
            simple += [
                (2, lambda: listed(*(self.value(depth - 1) for _ in range(self.random.randrange(4))))),
                (2, lambda: self.map(depth - 1)),
                (1, lambda: b"\0" + self.random.choice((self.symbol(), ulong(self.random.choice(ULONGS)))) + self.value(depth - 1)),
                (1, lambda: described(ACCEPTED, LIST0)),
                (1, lambda: nested(b"", self.random.choice((5, 20)))),
            ]
        return self._pick(*simple)

    def broken_value(self) -> bytes:
        """Return an invalid value, or a value that costs too much."""
        return self._pick(
            (2, lambda: b"\x73" + self.random.choice((b"\0\0\xd8\0", b"\0\0\xdf\xff", b"\0\x11\0\0", b"\xff\xff\xff\xff"))),
            (2, lambda: listed(*[array(0x40, 256)] * self.random.choice((20, 800)))),
            (1, lambda: listed(*[listed(*[array(0x45, 256)] * 20)] * 20)),
            (1, lambda: array(0x40, self.random.choice((257, 1 << 31)))),
            (1, lambda: array(0xA3, 2, b"\x01a\x02\xc3\xa9")), (1, lambda: array(0x00, 1, b"\x44\x40")),
            (1, lambda: b"\0" + listed(NULL) + NULL), (1, lambda: b"\0" + b"\x98" + bytes(16) + NULL), (1, lambda: b"\0\x40\x40"),
            (1, lambda: b"\0\x44" * self.random.choice((3, 400, 30_000)) + NULL), (1, lambda: b"\0" + listed(*[NULL] * 60_000) + NULL),
            (1, lambda: nested(b"", self.random.choice((33, 200)))),
            (1, lambda: b"\x56\x02"), (1, lambda: described(self.random.choice((0x24, 0x28, 0x1D, 0x10, 0x34)), mapped())),
            (1, lambda: self.random.randbytes(9)), (2, lambda: string(self.random.choice(BROKEN_TEXTS))),
            (1, lambda: symbol("é".encode())), (1, lambda: listed(*[NULL] * 60_000)), (1, lambda: listed(*[b"\xc1\x01\0"] * 20_000)),
        )  # fmt: skip

    def _pick(self, *weighted: tuple[int, Callable[[], bytes]]) -> bytes:
        weights = [weight for weight, _ in weighted]
        return self.random.choices([make for _, make in weighted], weights)[0]()

    def maybe(self, good: bytes) -> bytes:
        """Return the good value, or with malice any value."""
        return self.value() if self.chance(self.malice) else good

    # -- messages -------------------------------------------------------------------------------------------------------------------

    def message(self) -> bytes:
        """Return a message whose sections are mostly in order and partly hostile."""
        parts: list[bytes] = []
        choose = self.random.choice
        if self.chance(0.7):
            ttl = self.uint() if self.chance(0.3) else NULL
            fields = (choose((TRUE, TRUE, FALSE, NULL)), b"\x50" + bytes((choose((0, 4, 9, 255)),)), ttl, NULL, choose((NULL, self.uint())))
            parts.append(described(HEADER, self.maybe(listed(*fields[: self.random.randrange(6)]))))
        if self.chance(0.2):
            parts.append(described(DELIVERY_ANNOTATIONS, self.map()))
        if self.chance(0.5):
            parts.append(described(MESSAGE_ANNOTATIONS, self.origin() if self.chance(0.4) else self.map()))
        if self.chance(0.8):
            parts.append(described(PROPERTIES, self.properties()))
        if self.chance(0.5):
            parts.append(described(APPLICATION_PROPERTIES, self.map(0, lambda: string(b"k%d" % self.random.randrange(1000)))))
        parts.append(self._pick(
            (4, lambda: described(VALUE, string(self.text()))), (3, lambda: described(DATA, binary(self.text()))),
            (2, lambda: described(VALUE, self.value())), (1, lambda: described(SEQUENCE, listed(self.value())) * 3),
            (1, lambda: described(DATA, binary(b"")) * choose((2, 5000))), (1, lambda: b""),
        ))  # fmt: skip
        if self.chance(self.malice):
            parts[-1] = self.random.randbytes(20)
        if self.chance(0.2):
            parts.append(described(FOOTER, self.map()))
        if self.chance(self.malice):
            self.random.shuffle(parts)
        return b"".join(parts)

    def properties(self) -> bytes:
        """Return a properties section: fields of the right type at the edges of the allowed values, or with malice of any type."""
        fields = [NULL] * 13
        for index in self.random.sample(range(13), self.random.randrange(5)):
            fields[index] = self.maybe(self._field(index))
        return listed(*fields[: self.random.randrange(14)])

    def _field(self, index: int) -> bytes:
        if index in (0, 5):
            identity = self.name()
            return self.random.choice((string(identity), binary(identity), ulong(self.random.choice(ULONGS)), b"\x98" + bytes(16)))
        if index == 1:
            return binary(self.name())
        if index in (6, 7):
            return self.symbol()
        if index in (8, 9):
            return timestamp(self.random.choice(TIMES_MS))
        return self.uint() if index == 11 else string(self.name())

    # -- frames ---------------------------------------------------------------------------------------------------------------------

    def transaction(self) -> bytes:
        """Return the id of a transaction that does not exist."""
        return binary(self.text() if self.chance(self.malice) else b"1.1")

    def error(self) -> bytes:
        """Return an error."""
        return described(ERROR, listed(self.symbol(), string(self.text()), self.information()))

    def information(self) -> bytes:
        """Return a map for which the broker has no use; some are much longer than the rest of the frame."""
        plain = self.map()
        return EMPTY_LISTS if self._lengths.random() < LONG_SHARE else plain

    def state(self) -> bytes:
        """Return a delivery state, or with malice an invalid one."""
        if self.chance(self.malice):
            return self._pick(
                (2, lambda: described(REJECTED, listed(described(ERROR, listed(string("é".encode())))))),
                (1, self.value),
                (1, lambda: described(self.random.choice((OPEN, SOURCE, 0x99)), self.value(1))),
                (1, lambda: described(TRANSACTIONAL_STATE, listed(binary(b""), self.value()))),
            )
        return self._pick(
            (3, lambda: described(ACCEPTED, LIST0)),
            (2, lambda: described(RELEASED, LIST0)),
            (3, lambda: described(REJECTED, listed(self.error()))),
            (2, lambda: described(REJECTED, listed())),
            (3, lambda: described(MODIFIED, listed(TRUE, self.random.choice((TRUE, FALSE)), self.information()))),
            (1, lambda: described(RECEIVED, listed(self.uint(), ulong(7)))),
            (1, lambda: described(TRANSACTIONAL_STATE, listed(self.transaction(), described(ACCEPTED, LIST0)))),
        )

    def source(self) -> bytes:
        """Return a source."""
        choose = self.random.choice
        address = self.maybe(string(self.name()))
        capability = choose((NULL, symbol(b"queue"), symbol(b"topic"), self.symbol(), array(0xA3, 2, b"\x05topic\x06shared")))
        selector = b"\0" + symbol(b"apache.org:selector-filter:string") + choose((string(b"a = 1"), self.value(1)))
        name = string(self.text()) if self.chance(0.3) else self.symbol()
        filters = choose((NULL, NULL, self.map(), mapped(name, selector)))
        fields = [
            address, choose((NULL, uint(2), self.uint())), choose((NULL, symbol(b"never"), self.symbol())), NULL,
            choose((NULL, NULL, NULL, TRUE)), choose((NULL, self.map())), choose((NULL, NULL, symbol(b"copy"), self.symbol())),
            filters, choose((NULL, described(RELEASED, LIST0), self.maybe(described(MODIFIED, LIST0)))), choose((NULL, self.symbol())),
            capability,
        ]  # fmt: skip
        return described(SOURCE, listed(*fields))

    def target(self) -> bytes:
        """Return a target or a coordinator."""
        choose = self.random.choice
        if self.chance(0.15):
            return described(COORDINATOR, listed(choose((NULL, symbol(b"amqp:local-transactions"), self.symbol()))))
        address = choose((string(self.name()), string(self.name()), string(self.name()), NULL, self.maybe(string(b"$management"))))
        fields = [address, NULL, choose((NULL, self.symbol())), NULL, choose((NULL, NULL, NULL, TRUE)), choose((NULL, self.map())),
                  choose((NULL, symbol(b"queue"), symbol(b"topic")))]  # fmt: skip
        return described(TARGET, listed(*fields))

    def attach(self) -> bytes:
        """Return an attach."""
        choose = self.random.choice
        handle = self.maybe(self.small())
        return performative(
            ATTACH, string(self.name()), handle, choose((TRUE, FALSE)), choose((NULL, b"\x50\0", b"\x50\1")), choose((NULL, b"\x50\x01")),
            self.maybe(self.source()), self.maybe(self.target()), choose((NULL, NULL, mapped(binary(b"t"), self.state()))), NULL,
            choose((uint(0), self.uint())), choose((NULL, ulong(choose(ULONGS)))), choose((NULL, self.symbol())), NULL,
            choose((NULL, self.map())),
        )  # fmt: skip

    def flow(self) -> bytes:
        """Return a flow."""
        choose = self.random.choice
        ids = choose((uint(0), uint(1), self.uint(), NULL)), choose((uint(100), self.uint())), choose((uint(0), self.uint())), uint(100)
        handle = self.maybe(choose((NULL, uint(1), self.small())))
        credit = choose((NULL, uint(0), self.uint())), choose((NULL, uint(50), self.uint())), NULL
        return performative(FLOW, *ids, handle, *credit, choose((NULL, TRUE)), choose((NULL, TRUE)), choose((NULL, self.information())))

    def transfer(self) -> bytes:
        """Return a transfer."""
        choose, self.delivery_id = self.random.choice, self.delivery_id + 1
        handle = self.maybe(choose((uint(0), uint(0), self.small())))
        number, tag = self.maybe(uint(self.delivery_id & 0xFFFFFFFF)), binary(self.text() if self.chance(self.malice) else b"t")
        form = self.uint() if self.chance(self.malice) else NULL
        flags = (TRUE if self.chance(0.05) else NULL for _ in range(2))
        state = choose((NULL, NULL, NULL, self.state()))
        return performative(
            TRANSFER, handle, number, tag, form, choose((NULL, TRUE, FALSE)), TRUE if self.chance(0.1) else NULL, NULL, state, *flags,
            payload=self.payload(),
        )  # fmt: skip

    def disposition(self) -> bytes:
        """Return a disposition."""
        choose = self.random.choice
        first = self.small() if self.chance(0.9) else self.uint()
        last = choose((NULL, NULL, self.small())) if self.chance(0.9) else self.uint()
        role, settled, state = choose((TRUE, TRUE, FALSE)), choose((NULL, TRUE, FALSE)), self.state()
        if EMPTY_LISTS in state:
            first, last = uint(0), uint(WIDE)  # a broker that repeats the state for each delivery needs long
        return performative(DISPOSITION, role, first, last, settled, state)

    def frame(self) -> bytes:
        """Return any frame of a session."""
        return self._pick(
            (3, self.attach), (3, self.flow), (7, self.transfer), (5, self.disposition),
            (1, lambda: performative(DETACH, self.maybe(self.small()), self.random.choice((NULL, TRUE)), self.maybe(self.error()))),
        )  # fmt: skip

    def payload(self) -> bytes:
        """Return the payload of a transfer."""
        return self._pick(
            (10, self.message),
            (1, lambda: described(VALUE, described(DECLARE, listed(self.maybe(NULL))))),
            (1, lambda: described(VALUE, described(DISCHARGE, listed(self.transaction(), self.random.choice((TRUE, NULL)))))),
        )

    def opening(self) -> bytes:
        """Return headers, SASL and open, mostly valid."""
        choose = self.random.choice
        frame_size = self.uint() if self.chance(self.malice) else choose((NULL, uint(512), uint(4096), uint((1 << 32) - 1)))
        trace = binary(self.text())
        response = trace if self.mechanism == b"ANONYMOUS" else binary(b"")  # EXTERNAL has the name of a user there
        return b"".join((
            SASL_HEADER, frame(described(0x41, listed(symbol(self.mechanism), response)), kind=1),
            AMQP_HEADER,
            performative(OPEN, string(self.name()), NULL, frame_size, choose((NULL, b"\x60\0\0", b"\x60\xff\xff")),
                         choose((NULL, uint(1), self.uint())), NULL, NULL, NULL, choose((NULL, self.symbol())), choose((NULL, self.map()))),
        ))  # fmt: skip

    def session(self) -> list[bytes]:
        """Return a session with a producer, a consumer and a coordinator, in the pieces in which a peer sends it."""
        choose = self.random.choice
        self.delivery_id = choose((0, 0, 0, (1 << 32) - 3)) - 1
        windows = choose((uint(0), self.uint())), choose((uint(100), uint(100), uint(0), self.uint())), uint(100)
        source = described(SOURCE, listed(string(b"n1"), *[NULL] * 9, symbol(b"queue")))
        to_queue = described(TARGET, listed(string(b"n1"), *[NULL] * 5, symbol(b"queue")))
        return [
            performative(BEGIN, NULL, *windows, choose((NULL, uint(7), self.uint()))),
            performative(ATTACH, string(b"p"), uint(0), FALSE, NULL, NULL, described(SOURCE, listed()), to_queue, NULL, NULL, uint(0)),
            performative(ATTACH, string(b"c"), uint(1), TRUE, NULL, NULL, source, described(TARGET, listed())),
            performative(ATTACH, string(b"t"), uint(2), FALSE, NULL, NULL, described(SOURCE, listed()), described(COORDINATOR, LIST0), NULL,
                         NULL, uint(0)),
            performative(FLOW, uint(0), uint(WIDE), uint(0), uint(100), uint(1), uint(0), uint(self._lengths.choice((50, WIDE)))),
        ]  # fmt: skip
