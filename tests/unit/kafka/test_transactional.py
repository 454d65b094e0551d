"""A writer whose client takes no more for the moment."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.kafka import transactional
from bascule.kafka.positions import Position
from bascule.kafka.transactional import Output, TransactionalWriter

BEFORE = Position("t", "id", 0, 0)
AFTER = Position("t", "id", 0, 2)


class Full:
    """A client that has room for one record and is full again, until it is polled."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.committed = False
        self._room = False

    def produce(self, topic: str, *_: object, **__: object) -> None:
        if not self._room:
            raise BufferError("Local: Queue full")
        self._room = False
        self.written.append(topic)

    def poll(self, _timeout_s: float) -> int:
        self._room = True
        return 1

    def flush(self, _timeout_s: float) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    def commit_transaction(self, _timeout_s: float) -> None:
        self.committed = True

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


class Positions:
    """The stored one."""

    def read(self) -> dict[str, Position]:
        return {"key": BEFORE}


def test_records_and_positions_wait_for_room_in_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Full()
    monkeypatch.setattr(transactional, "Producer", lambda *_, **__: client)
    monkeypatch.setattr(transactional, "PositionReader", lambda *_: Positions())
    writer = TransactionalWriter({}, "id", "positions", "key")
    writer.write([Output("a", None, b"", []), Output("b", None, b"", [])], BEFORE, AFTER, {"other": None})
    assert client.written == ["a", "b", "positions", "positions"]
    assert client.committed
