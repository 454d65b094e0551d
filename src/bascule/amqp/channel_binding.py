"""Channel bindings of TLS for SCRAM (RFC 5929): data by which both sides see that they use the same TLS connection.

``tls-exporter`` (RFC 9266) is missing, because the module ``ssl`` does not export keying material.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

#: A hash of the server's certificate.
TLS_SERVER_END_POINT: Final = "tls-server-end-point"
#: A part of the handshake, up to TLS 1.2.
TLS_UNIQUE: Final = "tls-unique"
#: The channel bindings of a connection without TLS.
NO_BINDINGS: Final[Mapping[str, bytes]] = MappingProxyType({})

_SEQUENCE, _OBJECT_IDENTIFIER, _PSS_HASH = 0x30, 0x06, 0xA0
#: Certificates have fewer bytes; the length of a longer element takes more than this many bytes.
_LENGTH_BYTES_MAX: Final = 3
#: The hash for a certificate signed with MD5 or SHA-1 (RFC 5929, section 4.1).
_INSTEAD_OF_WEAK: Final = "sha256"
_PSS: Final = bytes.fromhex("2a864886f70d01010a")
#: The hash of the certificate -> object identifiers of signatures with RSA (1.2.840.113549.1.1) and ECDSA (1.2.840.10045.4), and of the
#: hash alone, which RSASSA-PSS names.
_IDENTIFIERS: Final = {
    "sha224": ("2a864886f70d01010e", "2a8648ce3d040301", "608648016503040204"),
    "sha256": ("2a864886f70d01010b", "2a8648ce3d040302", "608648016503040201"),
    "sha384": ("2a864886f70d01010c", "2a8648ce3d040303", "608648016503040202"),
    "sha512": ("2a864886f70d01010d", "2a8648ce3d040304", "608648016503040203"),
}
#: MD5 with RSA; SHA-1 with RSA, with ECDSA, and alone.
_WEAK: Final = ("2a864886f70d010104", "2a864886f70d010105", "2a8648ce3d0401", "2b0e03021a")
_HASHES: Final[Mapping[bytes, str]] = {
    **dict.fromkeys(map(bytes.fromhex, _WEAK), _INSTEAD_OF_WEAK),
    **{bytes.fromhex(each): name for name, identifiers in _IDENTIFIERS.items() for each in identifiers},
}


def server_end_point(certificate: bytes) -> bytes | None:
    """Return the binding ``tls-server-end-point`` for a server's certificate in DER.

    None if it is not defined: the signature has no hash of its own (Ed25519, for example), or one that is unknown here.
    """
    try:
        name = _hash_of_signature(certificate)
    except ValueError:
        return None
    return None if name is None else hashlib.new(name, certificate).digest()


class _Element(NamedTuple):
    tag: int
    content: bytes
    rest: bytes  # what follows the element


def _hash_of_signature(certificate: bytes) -> str | None:
    """Return the hash in a certificate's signature algorithm. Raises ValueError."""
    signed = _read(_read(certificate, _SEQUENCE).content, _SEQUENCE)
    algorithm = _read(_read(signed.rest, _SEQUENCE).content, _OBJECT_IDENTIFIER)
    if algorithm.content != _PSS:
        return _HASHES.get(algorithm.content)
    parameters = _read(algorithm.rest, _SEQUENCE).content
    if parameters[:1] != bytes((_PSS_HASH,)):
        return _INSTEAD_OF_WEAK  # the default is SHA-1
    named = _read(_read(parameters, _PSS_HASH).content, _SEQUENCE)
    return _HASHES.get(_read(named.content, _OBJECT_IDENTIFIER).content)


def _read(data: bytes, tag: int) -> _Element:
    """Read the first element of DER data (X.690). Raises ValueError unless it has this tag."""
    if len(data) < 2 or data[0] != tag:
        raise ValueError("not the expected element")
    start, length = 2, data[1]
    if length & 0x80:
        size = length & 0x7F
        if not 1 <= size <= _LENGTH_BYTES_MAX:
            raise ValueError("a length has an invalid size")
        start, length = 2 + size, int.from_bytes(data[2 : 2 + size], "big")
    if len(data) < start + length:
        raise ValueError("an element is incomplete")
    return _Element(tag, data[start : start + length], data[start + length :])
