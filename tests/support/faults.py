"""Faults in the middle of a broker's commands: the n-th pass of a step raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.journaling import Journaling
from bascule.broker.message import Bodies, BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.core.build import build
from bascule.testing.broker import BrokerInMemory, Receiver, Sender


class InjectedFault(Exception):
    """A fault that a test has asked for."""


class Faults:
    """A counter of passes of steps. The pass that ``arm`` chooses raises; the step "" means any."""

    def __init__(self) -> None:
        self.contained: list[tuple[ErrorKind, Exception]] = []
        self.errors = ErrorContainment(lambda kind, error, _: self.contained.append((kind, error)))
        self._step = ""
        self._left = 0

    def arm(self, number: int, step: str = "") -> None:
        """Let the ``number``-th pass from now on raise."""
        self._step, self._left = step, number

    def disarm(self) -> bool:
        """Raise no more. Return True if the armed pass has come."""
        left, self._left = self._left, 0
        return left == 0

    def at(self, step: str) -> None:
        """Note that a step begins. Raises InjectedFault if it is the armed one."""
        if self._left and self._step in ("", step):
            self._left -= 1
            if not self._left:
                raise InjectedFault(step)

    def broker(self, **options: Any) -> BrokerInMemory:
        """Return a broker whose journal and bodies have these faults."""
        return BrokerInMemory(**self.options(), **options)

    def options(self) -> dict[str, Any]:
        """Return the options of a BrokerInMemory with these faults. Skips the test on a compiled build."""
        if build() == "compiled":
            pytest.skip("subclasses of compiled classes inject the faults")
        return {"errors": self.errors, "journaling": self._journaling, "bodies": partial(FaultyBodies, self)}

    def _journaling(self, append: Callable[[bytes, bytes], None], **options: Any) -> Journaling:
        return FaultyJournaling(self, append, **options)


class FaultyJournaling(Journaling):
    """A journaling in which each entry is a step."""

    def __init__(self, faults: Faults, append: Callable[[bytes, bytes], None], **options: Any) -> None:
        super().__init__(append, **options)
        self._faults = faults

    def add(self, entry: bytes) -> None:
        """Add an entry as Journaling does."""
        self._faults.at("entry")
        super().add(entry)

    def add_send(self, entry: bytes, duplicate_ids: tuple[bytes, ...]) -> int:
        """Add a message as Journaling does."""
        self._faults.at("send")
        return super().add_send(entry, duplicate_ids)

    def add_ack(self, queue: BrokerQueue, mid: int) -> None:
        """Add an acknowledgement as Journaling does."""
        self._faults.at("ack")
        super().add_ack(queue, mid)


class FaultyBodies(Bodies):
    """A store of bodies in which each access is a step."""

    def __init__(self, faults: Faults, memory_bytes: int) -> None:
        super().__init__(None, memory_bytes)
        self._faults = faults

    def read(self, message: BrokerMessage) -> bytes:
        """Read a body as Bodies does."""
        self._faults.at("read")
        return super().read(message)


class FaultyReceiver(Receiver):
    """A receiver in which each call is a step."""

    def __init__(self, faults: Faults, credit: int) -> None:
        super().__init__(credit)
        self._faults = faults

    def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
        """Deliver as Receiver does."""
        self._faults.at("deliver")
        return super().deliver(message, delivery_count)

    def dispatched(self) -> None:
        """Note a dispatch as Receiver does."""
        self._faults.at("dispatched")
        super().dispatched()

    def ended(self, error: Any) -> None:
        """End as Receiver does."""
        self._faults.at("ended")
        super().ended(error)


class FaultySender(Sender):
    """A sender in which each answer is a step."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def accepted(self, token: Any) -> None:
        """Accept as Sender does."""
        self._faults.at("accepted")
        super().accepted(token)
