"""Faults in the middle of a broker's commands: the n-th pass of a step raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.journaling import Journaling
from bascule.broker.message import Bodies, BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.testing.broker import BrokerInMemory, Receiver, Sender


class InjectedFault(Exception):
    """A fault that a test has asked for."""


class Faults:
    """Counts the passes of steps. The one that ``arm`` chooses raises; ``step`` "" stands for any."""

    def __init__(self) -> None:
        self.contained: list[tuple[ErrorKind, Exception]] = []
        self.errors = ErrorContainment(lambda kind, error, _: self.contained.append((kind, error)))
        self._step = ""
        self._left = 0

    def arm(self, number: int, step: str = "") -> None:
        """The ``number``-th pass from now on raises."""
        self._step, self._left = step, number

    def disarm(self) -> bool:
        """Raise no more. Whether the armed pass has come."""
        left, self._left = self._left, 0
        return left == 0

    def at(self, step: str) -> None:
        """A step begins."""
        if self._left and self._step in ("", step):
            self._left -= 1
            if not self._left:
                raise InjectedFault(step)

    def broker(self, **options: Any) -> BrokerInMemory:
        """A broker whose journal and bodies have these faults."""
        return BrokerInMemory(**self.options(), **options)

    def options(self) -> dict[str, Any]:
        """For a BrokerInMemory with these faults."""
        return {"errors": self.errors, "journaling": self._journaling, "bodies": partial(FaultyBodies, self)}

    def _journaling(self, append: Callable[[bytes, bytes], None], **options: Any) -> Journaling:
        return FaultyJournaling(self, append, **options)


class FaultyJournaling(Journaling):
    """Each entry is a step."""

    def __init__(self, faults: Faults, append: Callable[[bytes, bytes], None], **options: Any) -> None:
        super().__init__(append, **options)
        self._faults = faults

    def add(self, entry: bytes) -> None:
        """See Journaling."""
        self._faults.at("entry")
        super().add(entry)

    def add_send(self, entry: bytes, duplicate_ids: tuple[bytes, ...]) -> int:
        """See Journaling."""
        self._faults.at("send")
        return super().add_send(entry, duplicate_ids)

    def add_ack(self, queue: BrokerQueue, mid: int) -> None:
        """See Journaling."""
        self._faults.at("ack")
        super().add_ack(queue, mid)


class FaultyBodies(Bodies):
    """Each access to a body is a step."""

    def __init__(self, faults: Faults, memory_bytes: int) -> None:
        super().__init__(None, memory_bytes)
        self._faults = faults

    def read(self, message: BrokerMessage) -> bytes:
        """See Bodies."""
        self._faults.at("read")
        return super().read(message)


class FaultyReceiver(Receiver):
    """Each call is a step."""

    def __init__(self, faults: Faults, credit: int) -> None:
        super().__init__(credit)
        self._faults = faults

    def deliver(self, message: BrokerMessage, delivery_count: int) -> None:
        """See Receiver."""
        self._faults.at("deliver")
        super().deliver(message, delivery_count)

    def dispatched(self) -> None:
        """See Receiver."""
        self._faults.at("dispatched")
        super().dispatched()

    def ended(self, error: Any) -> None:
        """See Receiver."""
        self._faults.at("ended")
        super().ended(error)


class FaultySender(Sender):
    """Each answer is a step."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def accepted(self, token: Any) -> None:
        """See Sender."""
        self._faults.at("accepted")
        super().accepted(token)
