"""Which endpoint of a worker pool gets a free thread. Without IO: no Kafka, no clock, and none of the threads.

Each endpoint can have a thread at any time: others leave one free for each endpoint that has none. The other threads go to whoever has
fewest, and among equals to whoever has waited longest since its last one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from bascule.core.errors import InvalidInput

MemberT = TypeVar("MemberT", bound=Hashable)


@dataclass(slots=True)
class PoolShare:
    """What an endpoint has of a pool. ``most``: endpoints at work at once; ``hanging``: threads in an endpoint that was given up."""

    most: int
    at_work: int = 0
    hanging: int = 0
    turn: int = 0
    left: bool = False

    @property
    def not_replaced(self) -> int:
        """Hanging threads beyond those that are replaced: as many as may be at work."""
        return max(0, self.hanging - self.most)

    @property
    def occupied(self) -> int:
        """Threads of the pool that others cannot have."""
        return self.at_work + self.not_replaced


class PoolShares(Generic[MemberT]):
    """The shares of the endpoints of one pool."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._shares: dict[MemberT, PoolShare] = {}
        self._turns = 0

    @property
    def members(self) -> list[MemberT]:
        """The endpoints that take records."""
        return [member for member, share in self._shares.items() if not share.left]

    @property
    def at_work(self) -> int:
        """Threads at work, but for those that hang."""
        return sum(share.at_work for share in self._shares.values())

    @property
    def hanging(self) -> int:
        """Threads in an endpoint that was given up."""
        return sum(share.hanging for share in self._shares.values())

    @property
    def wanted(self) -> int:
        """How many threads that do not hang there should be."""
        return self.threads - sum(share.not_replaced for share in self._shares.values())

    def join(self, member: MemberT, most: int) -> None:
        """An endpoint begins, with ``most`` at work at once. Raises InvalidInput if each endpoint could not have a thread any more."""
        if len(self.members) >= self.threads:
            raise InvalidInput(f"a pool of {self.threads} threads cannot serve more than {self.threads} endpoints; raise threads")
        self._shares[member] = PoolShare(min(most, self.threads))

    def leave(self, member: MemberT) -> None:
        """An endpoint takes no more records. What of it is at work has its threads until it ends, or hangs."""
        self._shares[member].left = True
        self._forget(member)

    def candidates(self) -> list[MemberT]:
        """Who may take a record now, in the order in which they are asked for one."""
        free = self.threads - sum(share.occupied for share in self._shares.values())
        kept = sum(1 for share in self._shares.values() if not share.left and not share.occupied)
        may = [
            (share.occupied, share.turn, member)
            for member, share in self._shares.items()
            if not share.left and free > 0 and share.occupied < share.most and (free > kept or not share.occupied)
        ]
        return [member for _, _, member in sorted(may, key=lambda each: each[:2])]

    def take(self, member: MemberT) -> None:
        """A thread is at work for it."""
        share = self._shares[member]
        share.at_work += 1
        self._turns += 1
        share.turn = self._turns

    def give_back(self, member: MemberT) -> None:
        """A thread is at work for it no more."""
        self._shares[member].at_work -= 1
        self._forget(member)

    def hang(self, member: MemberT) -> None:
        """A thread that was at work for it is given up."""
        share = self._shares[member]
        share.at_work -= 1
        share.hanging += 1

    def end(self, member: MemberT) -> None:
        """A thread that was given up has ended."""
        self._shares[member].hanging -= 1
        self._forget(member)

    def _forget(self, member: MemberT) -> None:
        share = self._shares[member]
        if share.left and not share.at_work and not share.hanging:
            del self._shares[member]
