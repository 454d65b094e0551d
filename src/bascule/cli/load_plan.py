"""The plan of a load: what ``bascule bench`` sends and receives, and when each message is due."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

#: A body begins with its mark: run, producer, number of the message, and when it was due, in ns of the monotonic clock.
_MARK = struct.Struct(">16sIQQ")
#: Smallest size of a body in bytes.
SIZE_MIN = _MARK.size


class LoadMark(NamedTuple):
    """The identity of a message, and when it was due, in seconds of the monotonic clock."""

    producer: int
    number: int
    due_s: float


@dataclass(frozen=True)
class LoadPlan:
    """What to send and receive."""

    topic: bool = False
    producers: int = 1
    consumers: int = 1
    #: Size of a body in bytes.
    size: int = 1024
    #: Messages a second of all producers together; 0 = as fast as possible.
    rate: float = 100.0
    #: Duration of the measurement, and of the load before the measurement.
    seconds: float = 10.0
    warm_up_s: float = 2.0
    persistent: bool = True
    #: Messages in a transaction; 0 = no transactions.
    transaction: int = 0
    #: Each producer waits for the answer to a message before it sends the next one.
    synchronous: bool = False
    #: How long to wait for the last messages.
    arrival_s: float = 10.0
    run: uuid.UUID = field(default_factory=uuid.uuid4)

    @property
    def destination_name(self) -> str:
        """Return the name of the destination, which no other run uses."""
        return f"bench.{self.run.hex}"

    @property
    def subscriptions(self) -> int:
        """Return how many times each message is to be delivered: to each consumer of a topic, to one consumer of a queue."""
        return self.consumers if self.topic else min(1, self.consumers)

    def described(self) -> dict[str, Any]:
        """Return the plan as data for JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "run"}
        return {"destination": self.destination_name, **fields}

    def due_times_s(self, producer: int, begin_s: float) -> Iterator[float]:
        """Yield the times, in seconds of the monotonic clock, at which a producer's messages are due in a run with a rate."""
        end_s = begin_s + self.warm_up_s + self.seconds
        number = producer
        while (due_s := begin_s + number / self.rate) < end_s:
            yield due_s
            number += self.producers

    def body(self, mark: LoadMark) -> bytes:
        """Return the body of a message."""
        head = _MARK.pack(self.run.bytes, mark.producer, mark.number, int(mark.due_s * 1e9))
        return head.ljust(self.size, b"x")

    def mark_of(self, body: object) -> LoadMark | None:
        """Return the mark in the body of a received message; None if the message is not one of this run."""
        if not isinstance(body, bytes) or len(body) < SIZE_MIN:
            return None
        run, producer, number, due_ns = _MARK.unpack_from(body)
        return LoadMark(producer, number, due_ns / 1e9) if run == self.run.bytes else None
