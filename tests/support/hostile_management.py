"""A generator of hostile requests to ``$management``: fields of any type, size and number, and bodies of any kind."""

from __future__ import annotations

from tests.support.hostile import (
    APPLICATION_PROPERTIES,
    DATA,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    NULL,
    PROPERTIES,
    SEQUENCE,
    TRUE,
    VALUE,
    Hostile,
    binary,
    described,
    listed,
    mapped,
    string,
    symbol,
    uint,
    ulong,
)

OPERATIONS = (b"prepare", b"commit", b"rollback", b"recover", b"forget")
#: Numbers in AMQP encoding: of each width, at the ends of their types; and values that are not numbers.
NUMBERS = (
    b"\x71\0\0\0\x07", b"\x71\x7f\xff\xff\xff", b"\x71\x80\0\0\0", b"\x71\xff\xff\xff\xff", b"\x81\x7f" + b"\xff" * 7,
    b"\x81\x80" + bytes(7), b"\x54\x07",
    b"\x55\xff", uint(7), uint((1 << 32) - 1), ulong((1 << 64) - 1), b"\x50\x07", b"\x51\x80", b"\x61\x80\0", b"\x72\x7f\xc0\0\0",
    b"\x82\x7f\xf0" + bytes(6),
    b"\x83\x80" + bytes(7), b"\x94" + b"\xff" * 16, b"\x98" + bytes(16), b"\x73\0\0\0a", TRUE, NULL, string(b"7"), string(b"9" * 5000),
)  # fmt: skip
#: Hexadecimal digits, and other texts.
DIGITS = (
    b"67", b"62", b"", b"6", b"6g", b"67" * 64, b"67" * 65, b"67" * 20_000, b" 6 7 ", "\uff16\uff17".encode(), b"\x00", b"0x67", b"67\n",
    "é".encode() * 100, b"zz",
)  # fmt: skip
#: Addresses of answers: existing, missing, with a meaning elsewhere, patterns, and some that no queue can have.
REPLIES = (
    b"answers", b"answers", b"answers", b"", b"$management", b"queue://answers", b"topic://news", b"#", b"a.*.#", b"DLQ", b"r" * 1000,
    b"r" * 1001, b"r" * 4000,
    b"\x00", "\U0010ffff\u202e".encode(), b"temp-queue://none", b"q|global", b"\xed\xa0\x80", b"../x",
)  # fmt: skip


class HostileManagement(Hostile):
    """A random choice of requests by a seed."""

    def request(self, transaction: bytes) -> bytes:
        """Return a message to the management node. ``transaction`` is the id of an open transaction."""
        choose = self.random.choice
        parts = [described(HEADER, listed(choose((TRUE, NULL)), b"\x50\x04"))] if self.chance(0.5) else []
        if self.chance(0.3):
            parts.append(described(MESSAGE_ANNOTATIONS, mapped(symbol(b"x-opt-jms-reply-to"), choose(NUMBERS))))
        parts.append(described(PROPERTIES, self._properties()))
        parts.append(described(APPLICATION_PROPERTIES, self._arguments(transaction)))
        bodies = (
            described(VALUE, NULL), described(VALUE, self.value()), described(VALUE, string(b"x" * 70_000)),
            described(DATA, binary(b"x" * 100)), described(SEQUENCE, listed(self.value())), described(DATA, binary(b"")) * 900, b"",
        )  # fmt: skip
        parts.append(choose(bodies))
        if self.chance(0.1):
            parts.append(described(FOOTER, self.map()))
        return b"".join(parts)

    def _properties(self) -> bytes:
        choose = self.random.choice
        long = binary(b"i" * 4000), string(b"i" * 4000)
        number = self._field(0) if self.chance(0.5) else choose((NULL, ulong((1 << 64) - 1), string(b"ID:AMQP_UUID:x"), *long))
        reply_to = string(choose(REPLIES)) if self.chance(0.9) else self.value(1)
        correlation = choose((NULL, NULL, NULL, self._field(5), string(b"ID:AMQP_BINARY:zz"), b"\x98" + bytes(16)))
        return listed(number, NULL, string(b"$management"), NULL, self.maybe(reply_to), self.maybe(correlation))

    def _arguments(self, transaction: bytes) -> bytes:
        choose = self.random.choice
        given = {
            b"type": string(b"bascule.xa"), b"operation": string(choose(OPERATIONS)),
            b"formatId": choose(NUMBERS) if self.chance(0.5) else NUMBERS[0],
            b"gtrid": string(choose(DIGITS[:2])), b"bqual": string(choose(DIGITS[:3])),
        }  # fmt: skip
        if self.chance(0.6):
            given[b"txnId"] = string(choose((transaction.hex().encode(), transaction.hex().encode(), *DIGITS)))
        for name in (b"type", b"operation", b"gtrid", b"bqual", b"txnId", "é".encode(), b"locales", b"name", b"identity"):
            if self.chance(0.1):
                given[name] = choose((string(choose(DIGITS)), choose(NUMBERS), self._simple()))
        for name in list(given):
            if self.chance(0.03):
                del given[name]
        if self.chance(0.03):
            given |= {b"k%d" % number: choose(NUMBERS) for number in range(choose((1000, 1100)))}
        return mapped(*(part for name, value in given.items() for part in (string(name), value)))

    def _simple(self) -> bytes:
        """Return a value that properties may have, most of the time."""
        choose = self.random.choice
        return choose(
            (string(self.text()), binary(self.text()), self.symbol(), self.value(1), string(b"x" * 60_000), binary(b"\xff" * 60_000))
        )
