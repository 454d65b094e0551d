"""An unmodified Apache Qpid JMS client in its own JVM, driven from Python: the peer of the interoperability tests.

One JVM serves a whole test run. Give each test its own connections:

    with QpidPeer() as peer:
        session = peer.connect("amqp://127.0.0.1:5672").session("TRANSACTED")
        session.producer("queue:orders").send("hello", properties={"region": "EU"})
        session.commit()
        message = session.consumer("queue:orders").receive()

Destinations are written ``queue:NAME`` and ``topic:NAME``. A value of a certain Java type is a pair, ``("short", 3)``; plain Python values
become boolean, int (or long), double, string. JMS exceptions arrive as JmsError. Each session has a thread in the JVM, so a blocked call
blocks no other session.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bascule.core.errors import BasculeError, Unavailable
from tests.support.java import java_command
from tests.support.speed import SLOWNESS

Mode = Literal["AUTO", "CLIENT", "DUPS_OK", "INDIVIDUAL", "TRANSACTED"]
MessageType = Literal["text", "bytes", "map", "stream", "object", "message"]
#: Far above any answer of a healthy broker, also on a loaded machine: a longer wait means a fault.
CALL_TIMEOUT_S = 60.0 * SLOWNESS
RECEIVE_TIMEOUT_S = 30.0 * SLOWNESS


class JmsError(BasculeError):
    """An exception of the JMS client. ``name`` is the class without its package, ``linked`` are the causes as text."""

    def __init__(self, name: str, message: str, code: str | None, linked: Sequence[str]) -> None:
        """Create an error from the fields of an answer."""
        super().__init__(f"{name}: {message}")
        self.name, self.message, self.code, self.linked = name, message, code, tuple(linked)


class PeerDied(Unavailable):
    """Raised when the JVM has ended, killed or by itself."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message as the client sees it. ``types`` is the Java type of each property, ``body_types`` that of each map or stream entry."""

    tag: int
    type: MessageType
    body: Any
    body_types: Any
    properties: dict[str, Any]
    types: dict[str, str]
    message_id: str | None
    correlation_id: str | None
    destination: str | None
    reply_to: str | None
    jms_type: str | None
    persistent: bool
    priority: int
    timestamp_ms: int
    expiration_ms: int
    delivery_time_ms: int
    redelivered: bool

    @property
    def delivery_count(self) -> int:
        """Return JMSXDeliveryCount, which is 1 for the first delivery."""
        return int(self.properties["JMSXDeliveryCount"])


class QpidPeer:
    """The JVM with the client."""

    def __init__(self, log_file: Path | None = None) -> None:
        """Start the JVM. Its standard error goes to ``log_file``, or to that of this process."""
        self._names = itertools.count(1)
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        log = log_file.open("ab") if log_file else None
        self._process = subprocess.Popen(
            java_command("Tool"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        if log:
            log.close()
        threading.Thread(target=self._read_answers, name="qpid-peer", daemon=True).start()

    def __enter__(self) -> Self:
        """Return the peer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the JVM."""
        self.close()

    @property
    def pid(self) -> int:
        """Return the process id of the JVM."""
        return self._process.pid

    def connect(
        self, url: str, *, client_id: str | None = None, user: str | None = None, password: str | None = None, start: bool = True
    ) -> Connection:
        """Open a connection, and start it unless ``start`` is false. Raises JmsError."""
        name = self.new_name("connection")
        given = self.call("connect", as_=name, thread=name, url=url, client_id=client_id, user=user, password=password, start=start)
        return Connection(self, name, name, given)

    def call(self, command: str, *, timeout_s: float = CALL_TIMEOUT_S, as_: str | None = None, **fields: Any) -> Any:
        """Send a command and return its answer (java/tool/Tool.java lists them). Raises JmsError, PeerDied, TimeoutError."""
        return self.submit(command, as_=as_, **fields).result(timeout_s)

    def submit(self, command: str, *, as_: str | None = None, **fields: Any) -> Future[Any]:
        """Send a command. The future gets its answer."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._names)
            self._calls[number] = future
            given = {key: value for key, value in fields.items() if value is not None}
            line = json.dumps({"id": number, "do": command, "as": as_, **given})
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line + "\n")
            except (OSError, ValueError):
                del self._calls[number]
                future.set_exception(PeerDied(f"the JVM of the JMS client has ended ({self._process.poll()})"))
        return future

    def new_name(self, kind: str) -> str:
        """Return a new name for an object in the JVM."""
        with self._lock:
            return f"{kind}-{next(self._names)}"

    def kill(self) -> None:
        """End the JVM as a crash would (SIGKILL), without closing connections."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the JVM. Connections that are still open are dropped."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(CALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    future = self._calls.pop(answer["id"])
                if "error" in answer:
                    future.set_exception(JmsError(answer["error"], answer["message"] or "", answer.get("code"), answer["linked"]))
                else:
                    future.set_result(answer["ok"])
        with self._lock:
            orphans = list(self._calls.values())
            self._calls.clear()
        for future in orphans:
            future.set_exception(PeerDied("the JVM of the JMS client has ended"))


@dataclass(frozen=True, slots=True)
class _Object:
    """An object in the JVM with a name. Its calls run on one thread there."""

    peer: QpidPeer
    name: str
    thread: str

    def call(self, command: str, **fields: Any) -> Any:
        """Send a command to this object, and return its answer."""
        return self.peer.call(command, on=self.name, **{"thread": self.thread, **fields})

    def submit(self, command: str, **fields: Any) -> Future[Any]:
        """Send a command to this object that may block."""
        return self.peer.submit(command, on=self.name, **{"thread": self.thread, **fields})

    def close(self) -> None:
        """Close the object in the JVM."""
        self.call("close")

    def _collected(self, count: int, timeout_s: float) -> list[Any]:
        waits = {"thread": f"{self.name} collector", "timeout_s": timeout_s + CALL_TIMEOUT_S}
        return list(self.call("collect", count=count, timeout_ms=int(timeout_s * 1000), **waits))


@dataclass(frozen=True, slots=True)
class Connection(_Object):
    """A JMS connection."""

    client_id: str | None

    def session(self, mode: Mode = "AUTO") -> Session:
        """Open a session with its own thread. Raises JmsError."""
        name = self.peer.new_name("session")
        self.call("session", as_=name, mode=mode)
        return Session(self.peer, name, name)

    def start(self) -> None:
        """Start delivery."""
        self.call("start")

    def stop(self) -> None:
        """Stop delivery. Returns when running listeners have returned."""
        self.call("stop")

    def metadata(self) -> dict[str, Any]:
        """Return ``jms``, ``provider``, ``version``, and ``jmsx`` (the names of the JMSX properties)."""
        return dict(self.call("metadata"))

    def events(self, count: int = 0, timeout_s: float = RECEIVE_TIMEOUT_S) -> list[dict[str, Any]]:
        """Return the events of the connection since the last call, and wait for ``count`` of them.

        ``event`` is interrupted, restored, failed, session-closed, consumer-closed or producer-closed. An entry without it is from the
        exception listener.
        """
        return self._collected(count, timeout_s)


@dataclass(frozen=True, slots=True)
class Session(_Object):
    """A JMS session. Every call raises JmsError for exceptions of JMS."""

    def producer(self, to: str | None = None) -> Producer:
        """Create a producer. Without a destination each send names one."""
        name = self.peer.new_name("producer")
        self.call("producer", as_=name, to=to)
        return Producer(self.peer, name, self.thread, self.name)

    def consumer(
        self,
        source: str,
        *,
        selector: str | None = None,
        name: str | None = None,
        durable: bool = False,
        shared: bool = False,
        no_local: bool = False,
    ) -> Consumer:
        """Create a consumer of a queue or topic, or of a durable or shared subscription called ``name``."""
        own = self.peer.new_name("consumer")
        how = {"selector": selector, "name": name, "durable": durable, "shared": shared, "no_local": no_local}
        self.call("consumer", as_=own, **{"from": source}, **how)
        return Consumer(self.peer, own, self.thread)

    def temporary_queue(self) -> Temporary:
        """Create a temporary queue, which lives as long as the connection."""
        return self._temporary("temp_queue")

    def temporary_topic(self) -> Temporary:
        """Create a temporary topic, which lives as long as the connection."""
        return self._temporary("temp_topic")

    def _temporary(self, command: str) -> Temporary:
        name = self.peer.new_name("temporary")
        return Temporary(self.peer, name, self.thread, self.call(command, as_=name))

    def commit(self) -> None:
        """Commit the local transaction."""
        self.call("commit")

    def rollback(self) -> None:
        """Roll the local transaction back."""
        self.call("rollback")

    def recover(self) -> None:
        """Redeliver unacknowledged messages."""
        self.call("recover")

    def acknowledge(self, message: Received) -> None:
        """Acknowledge a message, and in mode CLIENT all messages that the session got."""
        self.call("acknowledge", tag=message.tag)

    def unsubscribe(self, name: str) -> None:
        """Delete a durable subscription."""
        self.call("unsubscribe", name=name)

    def browse(self, queue: str, selector: str | None = None) -> list[Received]:
        """Return the messages of a queue without removing them."""
        return [_received(each) for each in self.call("browse", selector=selector, **{"from": queue})]


@dataclass(frozen=True, slots=True)
class Temporary(_Object):
    """A temporary destination. ``address`` is its name for clients."""

    address: str

    def delete(self) -> None:
        """Delete the destination."""
        self.call("delete")


@dataclass(frozen=True, slots=True)
class Producer(_Object):
    """A message producer."""

    session: str

    def send(self, body: Any = None, *, count: int = 1, timeout_s: float = CALL_TIMEOUT_S, **options: Any) -> str:
        """Send one message, or ``count`` copies, and return the last one's id.

        ``{n}`` in texts is the number of the copy, from ``first`` on.

        ``type`` is taken from the body (str, bytes, dict, list, None) if not given. Further ``options``: properties, correlation_id,
        jms_type, reply_to (of the message); to, persistent, priority, ttl_ms, delay_ms, first (of the send).
        """
        return str(self.call("send", timeout_s=timeout_s, count=count, **self._fields(body, options))["message_id"])

    def submit_send(self, body: Any = None, *, count: int = 1, **options: Any) -> Future[Any]:
        """Send as ``send`` does, for a send that may block."""
        return self.submit("send", count=count, **self._fields(body, options))

    def send_async(self, body: Any = None, *, count: int = 1, **options: Any) -> None:
        """Send with a CompletionListener (JMS 2.0); see ``completions``. Options as for send, except to, priority, ttl_ms and delay_ms."""
        self.call("send_async", count=count, **self._fields(body, options))

    def completions(self, count: int, timeout_s: float = RECEIVE_TIMEOUT_S) -> list[dict[str, Any]]:
        """Wait for ``count`` completions. ``n`` is the number of the copy; a failed one has ``error`` and ``message``."""
        return self._collected(count, timeout_s)

    def _fields(self, body: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        fields = dict(options)
        message = {key: fields.pop(key) for key in ("properties", "correlation_id", "jms_type", "reply_to") if key in fields}
        kind = fields.pop("type", None) or _BODY_TYPES[type(body)]
        return {**fields, "session": self.session, "message": {**message, "type": kind, "body": _plain(body, kind)}}


@dataclass(frozen=True, slots=True)
class Consumer(_Object):
    """A message consumer."""

    def receive(self, timeout_s: float = RECEIVE_TIMEOUT_S) -> Received | None:
        """Return the next message; None if none arrives in time."""
        return next(iter(self.receive_many(1, timeout_s)), None)

    def receive_many(self, count: int, timeout_s: float = RECEIVE_TIMEOUT_S) -> list[Received]:
        """Return up to ``count`` messages; end early if ``timeout_s`` passes without one. 0 asks without waiting (receiveNoWait).

        The client asks the broker (AMQP 2.6.7, drain) before it reports that there is none, even after a wait, so no answer depends on
        time.
        """
        answer = self.call("receive", count=count, timeout_ms=int(timeout_s * 1000), timeout_s=timeout_s * count + CALL_TIMEOUT_S)
        return [_received(each) for each in answer]

    def receive_all(self, count: int) -> list[Received]:
        """Return the ``count`` expected messages, and one more if the broker has it. The broker is asked for it without waiting."""
        return [*self.receive_many(count), *self.receive_many(1, 0)]

    def listen(self, *, fail_first: int = 0, acknowledge: bool = False) -> None:
        """Receive with a MessageListener, which throws for the first ``fail_first`` messages; see ``collect``."""
        self.call("listen", fail_first=fail_first, acknowledge=acknowledge)

    def unlisten(self) -> None:
        """Remove the listener."""
        self.call("unlisten")

    def collect(self, count: int, timeout_s: float = RECEIVE_TIMEOUT_S) -> list[Received]:
        """Return the messages of the listener since the last call; wait for ``count`` of them."""
        return [_received(each) for each in self._collected(count, timeout_s)]


_BODY_TYPES: dict[type, MessageType] = {str: "text", bytes: "bytes", dict: "map", list: "stream", type(None): "message"}


def _plain(body: Any, kind: MessageType) -> Any:
    if kind == "bytes":
        return base64.b64encode(body or b"").decode()
    if kind == "map":
        return {name: _typed(value) for name, value in body.items()}
    if kind == "stream":
        return [_typed(value) for value in body]
    return body


def _typed(value: Any) -> Any:
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    return ["null", None] if value is None else value


def _untyped(pair: Sequence[Any]) -> Any:
    kind, value = pair
    return base64.b64decode(value) if kind == "bytes" else value


def _received(fields: dict[str, Any]) -> Received:
    if "error" in fields:
        raise JmsError(fields["error"], fields["message"] or "", fields.get("code"), fields["linked"])
    properties = fields.pop("properties")
    body: Any = fields.pop("body", None)
    body_types: Any = None
    match fields["type"]:
        case "bytes":
            body = base64.b64decode(body)
        case "map":
            body, body_types = {name: _untyped(pair) for name, pair in body.items()}, {name: pair[0] for name, pair in body.items()}
        case "stream":
            body, body_types = [_untyped(pair) for pair in body], [pair[0] for pair in body]
        case "object":
            body, body_types = _untyped(body), body[0]
    return Received(
        body=body,
        body_types=body_types,
        properties={name: _untyped(pair) for name, pair in properties.items()},
        types={name: pair[0] for name, pair in properties.items()},
        **fields,
    )
