"""Message bodies that a journal may contain: peers managed to store them, also under earlier versions that checked less."""

from __future__ import annotations

from bascule.amqp.types import Symbol
from bascule.jms.sections import APPLICATION_PROPERTIES, HEADER, MESSAGE_ANNOTATIONS, PROPERTIES, VALUE, section_bytes

RAW = bytes((0, 0x53))
BODY = section_bytes(VALUE, "poison")
MIB = 1 << 20


def raw(section: int, value: bytes) -> bytes:
    return RAW + bytes((section,)) + value


#: Stored bodies with sections that are unreadable, that no version would encode, that are huge, or out of order.
POISON = {
    "header of too many fields": section_bytes(HEADER, [True, None, None, None, None, None]) + BODY,
    "header of another type": section_bytes(HEADER, ["yes"]) + BODY,
    "annotations cut off": raw(MESSAGE_ANNOTATIONS, b"\xd1\x00\x00\x00\x05\x00\x00\x00\x02\xa3") + BODY,
    "annotations that are odd": raw(MESSAGE_ANNOTATIONS, b"\xc1\x02\x01\x40") + BODY,
    "annotations of symbols beyond ASCII": raw(MESSAGE_ANNOTATIONS, b"\xc1\x06\x02\xa3\x02\xc3\xa9\x40") + BODY,
    "annotations of text that is none": raw(MESSAGE_ANNOTATIONS, b"\xc1\x06\x02\xa3\x01a\xa1\x01\xff") + BODY,
    "annotation with a map as key": raw(MESSAGE_ANNOTATIONS, b"\xc1\x05\x02\xc1\x01\x00\x40") + BODY,
    "annotation with an array of booleans": raw(MESSAGE_ANNOTATIONS, b"\xc1\x09\x02\xa3\x01a\xe0\x03\x01\x56\x01") + BODY,
    "annotation with an array of described values": raw(
        MESSAGE_ANNOTATIONS, b"\xc1\x0d\x02\xa3\x01a\xe0\x07\x01\x00\xa3\x01x\x54\x01"
    ) + BODY,
    "annotation of a megabyte": section_bytes(MESSAGE_ANNOTATIONS, {Symbol("big"): "x" * MIB}) + BODY,
    "annotations under our names": section_bytes(
        MESSAGE_ANNOTATIONS, {Symbol("x-opt-ORIG-QUEUE"): [1], Symbol("x-opt-ORIG-ROUTING-TYPE"): {}, Symbol("x-opt-ORIG-EXPIRATION"): "x"}
    ) + BODY,
    "properties of too many fields": section_bytes(PROPERTIES, [None] * 14) + BODY,
    "properties of other types": section_bytes(PROPERTIES, [True, 1, 2, 3, 4, 5, 6, 7, "never", "never", 10, 11, 12]) + BODY,
    "properties cut off": raw(PROPERTIES, b"\xd0\x00\x00\x00\x08\x00\x00\x00\x09\xb1\x00\x00"),
    "message id of 3 MiB": section_bytes(PROPERTIES, ["i" * 3 * MIB]) + BODY,
    "group id of 3 MiB": section_bytes(PROPERTIES, [*[None] * 10, "g" * 3 * MIB]) + BODY,
    "application properties of 3 MiB": section_bytes(APPLICATION_PROPERTIES, {"p": "x" * 3 * MIB}) + BODY,
    "properties behind the body": BODY + section_bytes(PROPERTIES, ["id", *[None] * 7, 1]),
    "unknown section": raw(0x60, b"\x40") + BODY,
    "no descriptor": b"\xa1\x01x",
    "nothing": b"",
}  # fmt: skip
