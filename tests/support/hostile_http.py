"""A generator of hostile HTTP for the admin server that knows the classes of attack: heads, chunks, paths, queries and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Final

from bascule.server.actions import ACTIONS
from bascule.server.admin import LOOKS

LONG: Final = 30_000
#: Names of queues, addresses and ids: some exist, some have a meaning elsewhere.
NAMES: Final = (
    "q", "DLQ", "news", "client.sub", "é", "\U0010ffff\u202e", "a\nb\x1b[31m", "#", "a.*.#", "", ".", "..", "../../etc/passwd",
    "$management", "%s%n{}",
    "x" * 1000, "x" * 1001, "y" * LONG, "'\"\\", "queue://q", "127.0.0.1:5672", "client", "7:67:62", "9" * 5000 + ":67:62", "-1::", "::",
    "\x00", "a|b",
)  # fmt: skip
SELECTORS: Final = (
    "a = 1", "a LIKE '" + "%_" * 4000 + "'", "a IN (" + ",".join(["'x'"] * 5000) + ")", "(" * LONG, "NOT " * 5000 + "a", "a" * LONG, "'",
    "",
    " OR ".join(["a LIKE '%x%y%z%'"] * 60), "1" * 5000 + " = 1", "a = 1e999", "x'", "a = " + "-" * LONG + "1",
)  # fmt: skip
#: JSON that no action understands, or that costs much.
BODIES: Final = (
    b"", b"{", b"[]", b"null", b"1" * LONG, b"-", b"NaN", b'{"name": Infinity}', b"[" * LONG, b"[" * LONG + b"]" * LONG,
    b'{"name":' * 8000, b"\xff\xfe{}",
    b"\xed\xa0\x80", b'{"name": "\xff"}', b'{"name": "\\ud800"}', b'{"\\udfff": "q"}', b'{"name": "q", "name": "r"}', b'{"name": 1e400}',
    b'{"name": ' + b"9" * 4000 + b"}", b"{" + b",".join(b'"k%d": 0' % n for n in range(6000)) + b"}", b" " * LONG + b"{}",
    b'"' + b"\\u0041" * 9000 + b'"',
    b"[" + b"0," * LONG + b"0]", b"x" * 70_000, b'{"name": ["q"]}', b'{"name": {"name": "q"}}', b'{"name": true}',
    b'{"name": null, "force": 1}',
    b"\xef\xbb\xbf{}", b"\x00" * 100, b'{"name": "q"} {"name": "r"}',
)  # fmt: skip
PATHS: Final = (
    b"/", b"*", b"//", b"/status/", b"/status//", b"/./status", b"/%2e%2e/", b"/\xff", b"/%ff", b"/%00", b"/%0d%0aX: y",
    b"/" + b"a" * 15_000, b"/" + b"a/" * 7000,
    b"/%" * 5000, b"http://[/status", b"http://x/status", b"http://" + b"x" * 10_000 + b"/", b"status", b"/queues;name=q", b"/status#x",
    b"/metrics?name[]=x", b"",
)  # fmt: skip
HOSTS: Final = (b"x", b"", b"[", b"[::1", b"x:y", b"x:99999999", b"x/../y", b"\xff", b"x" * 9000, b"a b", b"x@y:1", b"%00")
METHODS: Final = (
    b"GET",
    b"POST",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"PATCH",
    b"get",
    b"G" * 5000,
    b"G\x00",
    b"",
)
HEADERS: Final = (
    b"Connection: close", b"Connection: upgrade\r\nUpgrade: websocket", b"Upgrade: h2c", b"Expect: 100-continue", b"Expect: " + b"x" * 500,
    b"Authorization: Bearer " + b"x" * 3000, b"Authorization: \xff\xfe", b"Origin: null", b"X: \x00", b": empty", b"no colon",
    b" folded", b"X\xff: y",
    b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: -1", b"Content-Length: " + b"9" * 30, b"Content-Length: \xd9\xa1",
    b"Content-Length: 1e3",
    b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, chunked", b"Content-Length: 3\r\nTransfer-Encoding: chunked",
    b"Content-Type: multipart/form-data",
    b"\r\n".join(b"%x: y" % n for n in range(2500)), b"X: " + b"y" * 17_000, b"Content-Encoding: gzip", b"X-Forwarded-For: 8.8.8.8",
    b"Cookie: " + b"a=b;" * 3000,
    b"Range: bytes=0-" + b",0-" * 2000, b"Accept: " + b"*/*," * 2000,
)  # fmt: skip


def chunk(data: bytes, head: bytes | None = None) -> bytes:
    """Encode a chunk of a body."""
    return (b"%x" % len(data) if head is None else head) + b"\r\n" + data + b"\r\n"


class HostileHttp:
    """A random choice of requests by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self) -> bytes:
        """Return a request, or other bytes. The peer sends nothing after it."""
        return self._pick((8, self._action), (5, self._look), (4, self._broken_head), (3, self._chunked), (1, self._garbage))

    def _pick(self, *weighted: tuple[int, Callable[[], bytes]]) -> bytes:
        return self.random.choices([make for _, make in weighted], [weight for weight, _ in weighted])[0]()

    def _head(self, method: bytes, path: bytes, *headers: bytes) -> bytes:
        host = b"Host: " + (b"localhost" if self.random.random() < 0.7 else self.random.choice(HOSTS))
        extra = [self.random.choice(HEADERS)] if self.random.random() < 0.2 else []
        return b"\r\n".join((method + b" " + path + b" HTTP/1.1", host, *headers, *extra, b"", b""))

    def _body(self) -> bytes:
        choose = self.random.choice
        if self.random.random() < 0.4:
            return choose(BODIES)
        names = ("name", "to", "id", "xid", "queue", "selector", "force", "other")
        values: tuple[object, ...] = (*NAMES, *NAMES, True, None, 1 << 70, -1, 1.5, [], {})
        given = {name: choose(values) for name in self.random.sample(names, self.random.randrange(4))}
        given["name"] = choose(NAMES)
        if self.random.random() < 0.5:
            given["selector"] = choose(SELECTORS)
        return json.dumps(given, ensure_ascii=choose((True, False))).encode(errors="surrogatepass")

    def _action(self) -> bytes:
        body, path = self._body(), f"/{self.random.choice(list(ACTIONS))}".encode()
        return self._head(b"POST", path, b"Content-Length: %d" % len(body)) + body

    def _query(self) -> bytes:
        values = (
            *(name.encode() for name in NAMES),
            b"%ED%A0%80",
            b"%zz",
            b"%",
            b"+",
            b"-1",
            b"0",
            b"1000",
            b"1" * 5000,
            b"\xd9\xa1",
            b"1e3",
            b"%00",
        )
        names = (b"name", b"queue", b"count", b"name", b"x", b"", b"%ff")
        pairs = [self.random.choice(names) + b"=" + self.random.choice(values) for _ in range(self.random.choice((1, 2, 3, 800)))]
        return b"?" + b"&".join(pairs).replace(b" ", b"+").replace(b"\n", b"%0A")

    def _look(self) -> bytes:
        paths = [path.encode() for path in LOOKS] + [b"/metrics", b"/livez", b"/readyz"]
        return self._head(self.random.choice((b"GET", b"GET", b"GET", b"HEAD", b"POST")), self.random.choice(paths) + self._query())

    def _broken_head(self) -> bytes:
        return self._head(self.random.choice(METHODS), self.random.choice(PATHS), *self.random.sample(HEADERS, self.random.randrange(3)))

    def _chunked(self) -> bytes:
        head = self._head(b"POST", b"/queues/purge", b"Transfer-Encoding: chunked")
        return head + self._pick(
            (2, lambda: chunk(b"x") * 12_000 + chunk(b"")),
            (1, lambda: chunk(b"{}") + chunk(b"")),
            (1, lambda: chunk(b"{}", b"2;" + b"e" * 9000) + chunk(b"")),
            (1, lambda: chunk(b"{}", b"f" * 40)),
            (1, lambda: chunk(b"{}", b"-2")),
            (1, lambda: chunk(b"{}", b"0x2")),
            (1, lambda: chunk(b"{}", b"1") + chunk(b"")),
            (1, lambda: b"0\r\n" + b"".join(b"%x: y\r\n" % n for n in range(2500)) + b"\r\n"),
            (1, lambda: chunk(b"x" * 60_000) * 4),
        )

    def _garbage(self) -> bytes:
        return self._pick(
            (1, lambda: self.random.randbytes(300)),
            (1, lambda: b"\r\n" * 20_000),
            (1, lambda: b"\x00" * 20_000),
            (1, lambda: b"GET /livez HTTP/9.9\r\n\r\n"),
            (1, lambda: b"GET /livez\r\n\r\n"),
            (1, lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            (1, lambda: b"AMQP\x03\x01\x00\x00"),
            (1, lambda: b"\x16\x03\x01" + bytes(200)),
            (1, lambda: b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40),
            (1, lambda: b"GET /livez HTTP/1.1\nHost: localhost\n\n"),
        )
