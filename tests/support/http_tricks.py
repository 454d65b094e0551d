"""Requests that try to get around the roles of the admin server: other forms of a path, methods, headers and Host headers, as data."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

LONG: Final = 12_000


class Effect(enum.Enum):
    """What a trick does to a request."""

    #: The request is answered as it would be without the trick.
    NONE = enum.auto()
    #: The request names no path, or a method that the path does not have: 404 or 405.
    NO_PAGE = enum.auto()
    #: The request is malformed: 400.
    MALFORMED = enum.auto()
    #: The request is one of a page of another site, or for another host: 403 or 421.
    FOREIGN = enum.auto()


class Trick(NamedTuple):
    """A change of a request. ``target`` changes the path; ``method`` replaces GET or POST, and ``host`` the Host header."""

    name: str
    effect: Effect
    target: Callable[[bytes], bytes] = lambda path: path
    method: bytes = b""
    headers: tuple[bytes, ...] = ()
    host: bytes | None = b"localhost"


def _first_encoded(path: bytes) -> bytes:
    return b"/%%%02x" % path[1] + path[2:] if len(path) > 1 else path


NONE, NO_PAGE, MALFORMED, FOREIGN = Effect
PATHS: Final = tuple(
    Trick(name, effect, target)
    for name, effect, target in (
        ("doubled slash", NO_PAGE, lambda path: b"/" + path),
        ("slash behind", NO_PAGE, lambda path: path.rstrip(b"/") + b"//"),
        ("dot segment", NO_PAGE, lambda path: b"/." + path),
        ("dot segment behind", NO_PAGE, lambda path: path.rstrip(b"/") + b"/."),
        ("parent of a public path", NO_PAGE, lambda path: b"/livez/.." + path),
        ("encoded parent of a public path", NO_PAGE, lambda path: b"/livez/%2e%2e" + path),
        ("twice encoded parent", NO_PAGE, lambda path: b"/livez/%252e%252e" + path),
        ("encoded slash first", NO_PAGE, lambda path: b"/%2F" + path[1:]),
        ("encoded slash behind", NO_PAGE, lambda path: path.rstrip(b"/") + b"%2F%2F"),
        ("encoded backslash", NO_PAGE, lambda path: b"/%5C" + path[1:]),
        ("backslash", NO_PAGE, lambda path: b"/\\" + path[1:]),
        ("parameters", NO_PAGE, lambda path: path + b"/;role=manage"),
        ("parameters of a public path", NO_PAGE, lambda path: b"/livez;" + path),
        ("encoded line break", NO_PAGE, lambda path: path + b"%0A"),
        ("encoded line break first", NO_PAGE, lambda path: b"/%0A" + path[1:]),
        ("encoded zero", NO_PAGE, lambda path: b"/%00" + path[1:]),
        ("encoded space first", NO_PAGE, lambda path: b"/%20" + path[1:]),
        ("dot first", NO_PAGE, lambda path: b"/." + path[1:]),
        ("another case", NO_PAGE, lambda path: b"/X" + path[1:].upper()),
        ("overlong encoding", NO_PAGE, lambda path: b"/%c0%af" + path[1:]),
        ("full-width letters", NO_PAGE, lambda path: b"/%EF%BD%93" + path[1:]),
        ("absolute form", NO_PAGE, lambda path: b"http://localhost" + path),
        ("absolute form of another host", NO_PAGE, lambda path: b"http://evil.example" + path),
        ("without a slash", NO_PAGE, lambda path: path[1:] or b"x"),
        ("asterisk", NO_PAGE, lambda _: b"*"),
        ("long", NO_PAGE, lambda path: path + b"/" + b"a" * LONG),
        ("many segments", NO_PAGE, lambda path: path + b"/a" * (LONG // 2)),
        ("encoded letter", NONE, _first_encoded),
        ("empty query", NONE, lambda path: path + b"?"),
    )
)
METHODS: Final = tuple(
    Trick(f"method {method.decode()}", NO_PAGE, method=method)
    for method in (b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND", b"get", b"post", b"Get", b"BASCULE", b"DEBUG", b"G" * 200)
)
#: Headers that change nothing. The server is on the peer's machine in the tests, and trusts no header about the peer.
IGNORED_HEADERS: Final = tuple(
    Trick(header.decode(errors="replace")[:60], NONE, headers=(header,))
    for header in (
    b"X-HTTP-Method-Override: GET", b"X-HTTP-Method: GET", b"X-Method-Override: DELETE", b"X-Original-URL: /livez",
    b"X-Rewrite-URL: /livez",
    b"X-Forwarded-For: 127.0.0.1", b"X-Forwarded-Host: localhost", b"X-Forwarded-Proto: https", b"X-Forwarded-Prefix: /livez",
    b"X-Forwarded-User: manage", b"Forwarded: for=127.0.0.1;proto=https;host=localhost", b"X-Real-IP: 127.0.0.1",
    b"X-Remote-User: manage",
    b"Remote-User: manage", b"X-Client-Cert: manage", b"X-SSL-Client-S-DN: CN=manage", b"Proxy-Authorization: Bearer manage",
    b"WWW-Authenticate: Bearer manage", b"Cookie: bascule-console=guess", b"Cookie: Authorization=Bearer manage",
    b"Cookie: " + b"a=b;" * 3000, b"Cookie: " + b"\\" * LONG, b"Cookie: " + b"=;" * 5000, b"X-CSRF-Token: guess",
    b"X-Bascule-Console: 1",
    b"Upgrade: websocket\r\nConnection: upgrade", b"Upgrade: h2c\r\nConnection: upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAAA",
    b"Connection: Authorization", b"Connection: close, Authorization", b"Sec-Fetch-Site: none", b"Sec-Fetch-Site: same-origin",
    b"Origin: http://localhost", b"Referer: http://evil.example/", b"Accept: text/html", b"Range: bytes=0-1", b"TE: trailers",
    )
)  # fmt: skip
#: Headers that the server accepts once. The second of two decides in some proxies, and the first in others.
REPEATED_HEADERS: Final = tuple(
    Trick(f"two headers {first.partition(b':')[0].decode()}, {number}", MALFORMED, headers=(first, second))
    for number, (first, second) in enumerate(
        (
            (b"Authorization: Bearer view", b"Authorization: Bearer manage"), (b"Authorization: Bearer manage",
            b"authorization: Bearer view"),
            (b"Authorization: Bearer manage", b"Authorization: Bearer manage"), (b"Authorization: x", b"AUTHORIZATION: Bearer manage"),
            (b"Authorization:", b"Authorization: Bearer manage"),
            (b"Cookie: a=b", b"Cookie: c=d"), (b"X-CSRF-Token: a", b"X-CSRF-Token: a"), (b"Origin: http://localhost",
            b"Origin: http://localhost"),
            (b"Sec-Fetch-Site: none", b"Sec-Fetch-Site: none"), (b"Host: localhost", b"X: y"), (b"Host: evil.example", b"X: y"),
            (b"Content-Length: 0", b"Content-Length: 1"),
        )
    )
)  # fmt: skip
FOREIGN_HEADERS: Final = tuple(
    Trick(header.decode(), FOREIGN, headers=(header,))
    for header in (
    b"Origin: null", b"Origin:", b"Origin: http://evil.example", b"Origin: http://localhost.evil.example", b"Origin: https://localhost",
    b"Origin: http://localhost:1", b"Origin: http://localhost/", b"Origin: http://localhost, http://evil.example",
    b"Origin: file://", b"Origin: http://user@localhost", b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Site: same-site",
    b"Sec-Fetch-Site: x",
    b"Sec-Fetch-Site:",
    )
)  # fmt: skip
KNOWN_HOSTS: Final = (
    b"localhost", b"localhost:8672", b"localhost:", b"localhost.", b"localhost.:80", b"LOCALHOST", b"LocalHost:1", b"127.0.0.1",
    b"127.0.0.1:65535", b"127.0.0.1.", b"[::1]", b"[::1]:8672", b"[0:0:0:0:0:0:0:1]", b"[::ffff:127.0.0.1]", b"[FE80::1]",
    b"192.0.2.7", b"",
)  # fmt: skip
FOREIGN_HOSTS: Final = (
    b"evil.example", b"evil.example:8672", b"localhost.evil", b"localhost.evil.example", b"127.0.0.1.evil.example", b"[localhost].evil",
    b"[localhost]", b"[::1].evil", b"[::1]evil", b"[127.0.0.1]", b"[::1", b"::1", b"::1]:80", b"[::1%25lo]", b"[]", b"[evil.example]:80",
    b"localhost:99999", b"localhost:65536", b"localhost:-1", b"localhost:80:80", b"localhost:x", b"localhost:8672@evil.example",
    b"evil.example@localhost", b"localhost@evil.example", b"user:p@localhost", b"localhost..", b".localhost", b"localhost/",
    b"localhost/livez?",
    b"localhost#evil", b"localhost?", b"localhost\\evil", b"localhost,evil.example", b"localhost evil.example", b"localhost%00.evil",
    b"%6cocalhost", b"localhost%2eevil", b"127.1", b"0x7f.0.0.1", b"2130706433", b"0177.0.0.1", b"http://localhost",
    b"//localhost",
    b"xn--lcalhost-bzg", b"*", b"x" * 9000, b"localhost:" + b"0" * 9000,
)  # fmt: skip
HOSTS: Final = (
    *(Trick(f"host {host[:40]!r}", NONE, host=host) for host in KNOWN_HOSTS),
    *(Trick(f"host {host[:40]!r}", FOREIGN, host=host) for host in FOREIGN_HOSTS),
)
TRICKS: Final = (*PATHS, *METHODS, *IGNORED_HEADERS, *REPEATED_HEADERS, *FOREIGN_HEADERS, *HOSTS)


def head(method: bytes, target: bytes, *headers: bytes, host: bytes | None = b"localhost", length: int | None = None) -> bytes:
    """Return the head of a request."""
    fields = [] if host is None else [b"Host: " + host]
    fields += [] if length is None else [b"Content-Length: %d" % length]
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *fields, *headers, b"", b""])


#: Bytes that are not one HTTP request. Each is answered with 400 in JSON.
NOT_HTTP: Final = (
    b"GET\r\n\r\n", b"GET /livez\r\n\r\n", b"GET  /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /livez HTTP/1.1\r\n\r\n",
    b"G@T /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x00\x00\r\n\r\n",
    b"AMQP\x00\x01\x00\x00\r\n\r\n", b"GET /livez HTTP/1.1\r\nHost : localhost\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: localhost\r\n X: y\r\nX\r\n\r\n",
    head(b"GET", b"/livez", b"Host: localhost"), head(b"GET", b"/livez", b"X: \x00"), head(b"GET", b"/livez", b"Content-Length: -1"),
    head(b"GET", b"/livez", b"Content-Length: 1", b"Content-Length: 2"), head(b"GET", b"/livez", b"Transfer-Encoding: gzip"),
    head(b"GET", b"/" + b"a" * 30_000), head(b"GET", b"/livez?" + b"a" * 30_000), head(b"GET", b"/livez", b"Cookie: " + b"a" * 30_000),
    head(b"GET", b"/\xff"), head(b"GET", b""), head(b"", b"/livez"), head(b"GET", b"/a b"),
)  # fmt: skip
