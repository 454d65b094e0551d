"""Decides which endpoint of a worker pool gets a free thread. Without IO: no Kafka, no clock, no threads.

Each endpoint can get a thread at any time: the others leave one free for each endpoint that has none. The remaining threads go to the
endpoint with the fewest, and among equals to the one that got its last thread longest ago.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from bascule.core.errors import InvalidInput

MemberT = TypeVar("MemberT", bound=Hashable)


@dataclass(slots=True)
class PoolShare:
    """The share of an endpoint in a pool. ``most``: maximum of busy threads; ``hanging``: threads in an endpoint that was given up."""

    most: int
    at_work: int = 0
    hanging: int = 0
    turn: int = 0
    left: bool = False

    @property
    def not_replaced(self) -> int:
        """Return the number of hanging threads that are not replaced: those beyond ``most``."""
        return max(0, self.hanging - self.most)

    @property
    def occupied(self) -> int:
        """Return the number of pool threads that other endpoints cannot use."""
        return self.at_work + self.not_replaced


class PoolShares(Generic[MemberT]):
    """The shares of the endpoints of one pool."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._shares: dict[MemberT, PoolShare] = {}
        self._turns = 0

    @property
    def members(self) -> list[MemberT]:
        """Return the endpoints that take records."""
        return [member for member, share in self._shares.items() if not share.left]

    @property
    def at_work(self) -> int:
        """Return the number of busy threads, without hanging ones."""
        return sum(share.at_work for share in self._shares.values())

    @property
    def hanging(self) -> int:
        """Return the number of threads in an endpoint that was given up."""
        return sum(share.hanging for share in self._shares.values())

    @property
    def wanted(self) -> int:
        """Return how many threads the pool should have, without hanging ones."""
        return self.threads - sum(share.not_replaced for share in self._shares.values())

    def join(self, member: MemberT, most: int) -> None:
        """Add an endpoint with at most ``most`` busy threads. Raises InvalidInput if the pool has fewer threads than endpoints."""
        if len(self.members) >= self.threads:
            raise InvalidInput(f"a pool of {self.threads} threads cannot serve more than {self.threads} endpoints; raise threads")
        self._shares[member] = PoolShare(min(most, self.threads))

    def leave(self, member: MemberT) -> None:
        """Let an endpoint take no more records. Its busy threads stay until they end or hang."""
        self._shares[member].left = True
        self._forget(member)

    def candidates(self) -> list[MemberT]:
        """Return the endpoints that may take a record now, in the order in which to ask them."""
        free = self.threads - sum(share.occupied for share in self._shares.values())
        kept = sum(1 for share in self._shares.values() if not share.left and not share.occupied)
        may = [
            (share.occupied, share.turn, member)
            for member, share in self._shares.items()
            if not share.left and free > 0 and share.occupied < share.most and (free > kept or not share.occupied)
        ]
        return [member for _, _, member in sorted(may, key=lambda each: each[:2])]

    def take(self, member: MemberT) -> None:
        """Note that a thread works for an endpoint."""
        share = self._shares[member]
        share.at_work += 1
        self._turns += 1
        share.turn = self._turns

    def give_back(self, member: MemberT) -> None:
        """Note that a thread no longer works for an endpoint."""
        self._shares[member].at_work -= 1
        self._forget(member)

    def hang(self, member: MemberT) -> None:
        """Note that a thread that works for an endpoint was given up."""
        share = self._shares[member]
        share.at_work -= 1
        share.hanging += 1

    def end(self, member: MemberT) -> None:
        """Note that a thread that was given up has ended."""
        self._shares[member].hanging -= 1
        self._forget(member)

    def _forget(self, member: MemberT) -> None:
        share = self._shares[member]
        if share.left and not share.at_work and not share.hanging:
            del self._shares[member]
