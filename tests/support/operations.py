"""The operations of clients and their outcomes: the history, and the file format for it.

Each operation ended in one of three ways for its client: ``ok`` (it took place), ``fail`` (it certainly did not) or ``indeterminate`` (the
connection broke, or a timeout passed), which allows both. A history file has one JSON object per line::

    {"t": 12.5, "client": "c1", "op": "send", "to": "orders", "ids": ["c1-0"], "outcome": "ok"}
    {"t": 14.0, "client": "c2", "op": "receive", "from": "orders", "ids": ["c1-0"], "redelivered": [], "outcome": "ok"}

``t`` is the end of the operation and ``begun`` its beginning, both in ms on one clock; without ``begun`` the operation began after the
client's previous one. ``op`` is send, receive, move (receive and send in one transaction), subscribe or unsubscribe. ``tx`` names the
transaction that several lines of one client share, ``subscription`` the durable subscription of a topic, ``selector`` is the receiver's
selector. ``facts`` are the values that the promises depend on, by id: ``{"priority": 4, "persistent": true, "expiry": ms, "due": ms,
"properties": {}}``. Lines without ``op`` are events for people. Additional fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

Outcome = Literal["ok", "fail", "indeterminate"]


class Facts(NamedTuple):
    """The values that the promises for a message depend on; times in ms on the history's clock, 0 for none."""

    priority: int = 4
    persistent: bool = True
    expiry_ms: float = 0
    due_ms: float = 0
    properties: Mapping[str, Any] = {}

    @property
    def must_arrive(self) -> bool:
        """Return True if neither a crash nor time may remove the message."""
        return self.persistent and not self.expiry_ms


class Place(NamedTuple):
    """A place that messages are taken from: a queue, or a subscription of a topic."""

    destination: str
    subscription: str = ""

    def __str__(self) -> str:
        return f"{self.destination}/{self.subscription}" if self.subscription else self.destination


@dataclass(frozen=True, slots=True)
class Operation:
    """One send, receive or transaction, and its outcome for the client. One line of a file describes it."""

    client: str
    ids: tuple[str, ...]
    outcome: Outcome
    source: str | None = None  # the destination that the ids were taken from
    target: str | None = None  # the destination that they were sent to
    op: str = ""
    redelivered: tuple[str, ...] = ()
    begun_ms: float | None = None
    ended_ms: float | None = None
    transaction: str = ""
    subscription: str = ""
    selector: str = ""
    facts: Mapping[str, Facts] = field(default_factory=dict)

    @property
    def place(self) -> Place | None:
        """Return the place that the ids were taken from."""
        return None if self.source is None else Place(self.source, self.subscription)


def operation_of(line: Mapping[str, Any]) -> Operation:
    """Return the operation that a line of a history describes."""
    facts = {
        id: Facts(
            said.get("priority", 4), said.get("persistent", True), said.get("expiry", 0), said.get("due", 0), said.get("properties", {})
        )
        for id, said in line.get("facts", {}).items()
    }
    return Operation(
        line["client"], tuple(line["ids"]), line["outcome"], line.get("from"), line.get("to"), line["op"],
        tuple(line.get("redelivered", ())), line.get("begun"), line.get("t"), line.get("tx", ""),
        line.get("subscription", ""), line.get("selector", ""), facts,
    )  # fmt: skip


def read_history(*files: Path) -> list[Operation]:
    """Return the operations of one or more files, in the order of their ends. An incomplete last line is ignored."""
    found = [operation for file in files for operation in operations_in(file.read_bytes().rpartition(b"\n")[0])]
    return found if len(files) == 1 else sorted(found, key=lambda operation: operation.ended_ms or 0)


def operations_in(text: bytes) -> list[Operation]:
    """Return the operations in some lines of a history."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return [operation_of(line) for line in lines if "op" in line]


def timed(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations with begin and end.

    A missing begin is the end of the client's previous operation; lines are in the order of ends.
    """
    last: dict[str, float] = {}
    found: list[Operation] = []
    for number, operation in enumerate(operations):
        ended_ms = float(number) if operation.ended_ms is None else operation.ended_ms
        begun_ms = last.get(operation.client, float("-inf")) if operation.begun_ms is None else operation.begun_ms
        last[operation.client] = ended_ms
        found.append(replace(operation, begun_ms=begun_ms, ended_ms=ended_ms))
    return found


def after(later: Operation, earlier: Operation) -> bool:
    """Return True if ``later`` began after the end of ``earlier``. Both are timed."""
    assert later.begun_ms is not None
    assert earlier.ended_ms is not None
    return later.begun_ms >= earlier.ended_ms
