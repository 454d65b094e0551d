"""A pool of costly objects: a limited number, a wait with a timeout, and a report on objects that are not returned."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.core.log import get_log

#: Depth of the taker's stack that is kept, enough to identify the taker.
STACK_DEPTH = 6
#: Frames of this package, which do not show the taker.
_OURS = "/bascule/adapter/outbound/"

_log = get_log("bascule.adapter")


class Physical(Protocol):
    """An object in a pool."""

    def validate(self) -> None:
        """Raise BasculeError if the object is unusable."""

    def close(self) -> None:
        """Close the object."""


PhysicalT = TypeVar("PhysicalT", bound=Physical)


class PoolExhausted(Unavailable):
    """Raised when all objects are taken and none was returned in time. The text says who has them."""


class PoolClosed(InvalidInput):
    """Raised when the pool is closed."""

    http_status = 409


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of a pool: maximum number of objects; seconds to wait for one, of idleness before a check, and before a leak is reported."""

    most: int = 8
    wait_s: float = 10.0
    validate_after_s: float = 30.0
    leak_after_s: float = 60.0

    def __post_init__(self) -> None:
        if self.most < 1 or self.wait_s < 0 or self.validate_after_s < 0 or self.leak_after_s <= 0:
            raise InvalidInput(f"invalid {self}: must have most >= 1, no negative time, and leak_after_s above 0")


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """An object in use: who took it, for how many seconds, and where in the program (innermost call last)."""

    by: str
    for_s: float
    where: str

    def __str__(self) -> str:
        return f"{self.by} for {self.for_s:.1f} s, taken at\n{self.where}"


class Taker(NamedTuple):
    """Who takes an object from a pool, and where in the program."""

    by: str
    where: str

    @classmethod
    def here(cls) -> Taker:
        """Return the calling thread and its innermost calls."""
        return cls(threading.current_thread().name, _where())


@dataclass(slots=True, eq=False)
class _Lease(Generic[PhysicalT]):
    physical: PhysicalT
    by: str
    since_s: float
    where: str
    reported: bool = False


class Pool(Generic[PhysicalT]):
    """A thread-safe pool."""

    def __init__(self, name: str, make: Callable[[int], PhysicalT], limits: PoolLimits) -> None:
        """``make`` gets the number of the object, at least 0 and below ``limits.most``. A number is not used twice at once."""
        self.name = name
        self.limits = limits
        self._make = make
        self._idle: list[tuple[int, PhysicalT, float]] = []
        self._out: dict[int, _Lease[PhysicalT]] = {}
        self._free = list(reversed(range(limits.most)))
        self._changed = threading.Condition()
        self._closed = False

    def take(self, taker: Taker | None = None) -> tuple[int, PhysicalT]:
        """Return a working object, with the number to return it by. Raises PoolExhausted, PoolClosed, and the errors of ``make``.

        ``taker`` says who takes it, if not the calling thread.
        """
        taker = taker or Taker.here()
        deadline_s = time.monotonic() + self.limits.wait_s
        while True:
            number, physical, idle_s = self._reserve(deadline_s)
            try:
                if physical is None:
                    physical = self._make(number)
                elif idle_s >= self.limits.validate_after_s:
                    physical.validate()
            except BaseException as error:
                self._release(number, physical)
                if physical is None or not isinstance(error, BasculeError):
                    raise
                _log.info("connection replaced", pool=self.name, connection=number, error=error)
                continue
            with self._changed:
                self._out[number] = _Lease(physical, taker.by, time.monotonic(), taker.where)
            return number, physical

    def give_back(self, number: int, *, broken: bool = False) -> None:
        """Return an object to the pool, or close it if it is ``broken``."""
        with self._changed:
            lease = self._out.pop(number)
            if not broken and not self._closed:
                self._idle.append((number, lease.physical, time.monotonic()))
                self._changed.notify()
                return
        self._release(number, lease.physical)

    def leases(self, longer_than_s: float = 0.0) -> list[LeaseInfo]:
        """Return who has which objects, the longest lease first."""
        now_s = time.monotonic()
        with self._changed:
            leases = sorted(self._out.values(), key=lambda lease: lease.since_s)
        return [LeaseInfo(lease.by, now_s - lease.since_s, lease.where) for lease in leases if now_s - lease.since_s >= longer_than_s]

    @property
    def idle(self) -> int:
        """Return the number of idle objects."""
        return len(self._idle)

    def close(self) -> None:
        """Close the idle objects now, and the others when they are returned."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._free += [number for number, _, _ in idle]
            self._changed.notify_all()
        for _, physical, _ in idle:
            physical.close()

    def _reserve(self, deadline_s: float) -> tuple[int, PhysicalT | None, float]:
        with self._changed:
            self._report_leaks()
            while not self._idle and not self._free and not self._closed:
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())) and time.monotonic() >= deadline_s:
                    break
            if self._closed:
                raise PoolClosed(f"{self.name} is closed")
            if self._idle:  # the object used last: objects beyond the need stay idle
                number, physical, since_s = self._idle.pop()
                return number, physical, time.monotonic() - since_s
            if self._free:
                return self._free.pop(), None, 0.0
        holders = "\n".join(map(str, self.leases()))
        raise PoolExhausted(
            f"{self.name}: no free connection within {self.limits.wait_s:g} s; all {self.limits.most} connections are held by\n{holders}"
        )

    def _release(self, number: int, physical: PhysicalT | None) -> None:
        """Close an object before its number becomes free: a number is not used twice at once."""
        try:
            if physical is not None:
                with suppress(BasculeError):
                    physical.close()
        finally:
            with self._changed:
                self._free.append(number)
                self._changed.notify()

    def _report_leaks(self) -> None:
        now_s = time.monotonic()
        for lease in self._out.values():
            if not lease.reported and now_s - lease.since_s >= self.limits.leak_after_s:
                lease.reported = True
                _log.warning(
                    "possible connection leak",
                    pool=self.name,
                    held_by=lease.by,
                    held_s=round(now_s - lease.since_s, 1),
                    taken_at=lease.where,
                )


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack() if _OURS not in frame.filename and not frame.filename.endswith("contextlib.py")]
    return "".join(traceback.format_list(frames[-STACK_DEPTH:]))
