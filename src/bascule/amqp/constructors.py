"""Constructor codes of AMQP 1.0 (part 1, sections 1.2 and 1.6)."""

from __future__ import annotations

from typing import Final

DESCRIBED: Final = 0x00
NULL, TRUE, FALSE, UINT0, ULONG0, LIST0 = 0x40, 0x41, 0x42, 0x43, 0x44, 0x45
UBYTE, BYTE, SMALL_UINT, SMALL_ULONG, SMALL_INT, SMALL_LONG, BOOLEAN = 0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56
USHORT, SHORT = 0x60, 0x61
UINT, INT, FLOAT, CHAR, DECIMAL32 = 0x70, 0x71, 0x72, 0x73, 0x74
ULONG, LONG, DOUBLE, TIMESTAMP, DECIMAL64 = 0x80, 0x81, 0x82, 0x83, 0x84
DECIMAL128, UUID = 0x94, 0x98
BINARY8, STRING8, SYMBOL8, BINARY32, STRING32, SYMBOL32 = 0xA0, 0xA1, 0xA3, 0xB0, 0xB1, 0xB3
LIST8, MAP8, LIST32, MAP32, ARRAY8, ARRAY32 = 0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0

#: Codes of values without data bytes.
ZERO_WIDTH: Final = frozenset({NULL, TRUE, FALSE, UINT0, ULONG0, LIST0})
#: Data size by constructor code (part 1, section 1.2.2): a fixed number of bytes, or a size field of 1 (SIZE8) or 4 (SIZE32) bytes.
SIZE8, SIZE32, NO_TYPE = -1, -4, -9
_WIDTH_OF_CLASS: Final = {
    0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16,
    0xA: SIZE8, 0xB: SIZE32, 0xC: SIZE8, 0xD: SIZE32, 0xE: SIZE8, 0xF: SIZE32,
}  # fmt: skip
WIDTH: Final = [_WIDTH_OF_CLASS.get(code >> 4, NO_TYPE) for code in range(256)]

#: Surrogate code points, which are not characters.
SURROGATES: Final = range(0xD800, 0xE000)
