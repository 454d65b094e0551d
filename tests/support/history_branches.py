"""Judges the fate of transaction branches (XA): a prepared branch stays unchanged until it is ended, and ends as requested.

The sends and receives of their transactions are part of the history and judged with it. This module checks what only the calls show: a
broker that forgets a branch, ends it with the wrong outcome, or gives its messages to others meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tests.support.history import Tally
from tests.support.operations import Operation, Place

NEVER_MS = float("inf")
#: What a branch is told to do, by its manager or (forced) by an administrator.
Wanted = Literal["commit", "rollback"]
#: The answers: done; unknown, perhaps with the remembered outcome; ended by an administrator; busy. A prepare or a one-phase commit may
#: also be read-only, or find that the transaction was rolled back.
Said = Literal["done", "unknown", "committed", "rolled-back", "forced-commit", "forced-rollback", "busy", "read-only", "gone"]
FORCED: Collection[Said] = ("forced-commit", "forced-rollback")
_FORGOTTEN: Collection[Said] = ("unknown", "committed", "rolled-back")
_OTHERWISE: Collection[tuple[Wanted, Said]] = (("commit", "rolled-back"), ("rollback", "committed"))


@dataclass(slots=True)
class End:
    """A request to end a branch. ``said`` is None if no answer came."""

    wanted: Wanted
    asked_ms: float
    answered_ms: float = NEVER_MS
    said: Said | None = None
    forced: bool = False


@dataclass(slots=True)
class Branch:
    """The calls on one branch. ``sent`` are ids by destination, ``taken`` are ids from ``source``."""

    name: str
    source: Place | None = None
    taken: tuple[str, ...] = ()
    sent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Wanted = "rollback"  # the decision for its transaction, if the branch was prepared
    prepared_ms: float = NEVER_MS  # when the prepare was answered
    one_phase_ms: float = NEVER_MS  # when the first one-phase commit was requested
    forget_ms: float = NEVER_MS  # when an administrator first requested to forget the heuristic outcome
    forgotten_ms: float = NEVER_MS  # when that was answered
    ends: list[End] = field(default_factory=list)

    def asked_ms(self) -> float:
        """Return the time from which the branch may have ended."""
        return min((self.one_phase_ms, *(end.asked_ms for end in self.ends)))

    def forced_ms(self) -> float:
        """Return the time from which a heuristic outcome was known."""
        return min((end.answered_ms for end in self.ends if end.said in FORCED), default=NEVER_MS)

    def gone_ms(self) -> float:
        """Return the time from which, by the answers, nobody has to end or forget the branch."""
        ended_ms = (end.answered_ms for end in self.ends if end.said in _FORGOTTEN or (end.said == "done" and not end.forced))
        return min((self.forgotten_ms, *ended_ms))


class Listing(NamedTuple):
    """One answer of the broker to a request for prepared branches."""

    asked_ms: float
    answered_ms: float
    names: frozenset[str]


def judge(tally: Tally, operations: Sequence[Operation], branches: Iterable[Branch], listings: Sequence[Listing]) -> None:
    """Add the findings to a tally."""
    takes = [each for each in operations if each.place is not None and each.ids and each.ended_ms is not None]
    prepared = [branch for branch in branches if branch.prepared_ms < NEVER_MS]
    tally.report(
        "lost",
        "branches that are prepared, or ended by an administrator, are unknown",
        (each.name for each in prepared if _forgotten(each)),
    )
    tally.report(
        "lost",
        "branches that are prepared, or ended by an administrator, are not listed",
        (each.name for each in prepared if _unlisted(each, listings)),
    )
    tally.report("unexpected", "branches are listed after their end", (each.name for each in prepared if _listed_again(each, listings)))
    tally.report("xa-split", "branches have ended otherwise than was decided", (each.name for each in prepared if _otherwise(each)))
    tally.report("unexpected", "given out before the end of their branch", (id for each in branches for id in _early(each, takes)))
    tally.report("duplicated", "given out while a prepared branch had them", (id for each in prepared for id in _released(each, takes)))


def _forgotten(branch: Branch) -> bool:
    """Return True if the first request to end the branch got "no such branch", or a request after a heuristic outcome did."""
    first = (
        end
        for end in branch.ends
        if end.asked_ms >= branch.prepared_ms and not any(other is not end and other.asked_ms < end.answered_ms for other in branch.ends)
    )
    forced_ms = branch.forced_ms()
    later = (end for end in branch.ends if forced_ms <= end.asked_ms and end.answered_ms < branch.forget_ms)
    return any(end.said in _FORGOTTEN for end in (*first, *later))


def _otherwise(branch: Branch) -> bool:
    """Return True if the branch ended against its decision.

    Not judged after a heuristic outcome: once it is forgotten, a rollback reports that there was one.
    """
    return any((branch.decided, end.said) in _OTHERWISE for end in branch.ends) and not any(end.forced for end in branch.ends)


def _unlisted(branch: Branch, listings: Sequence[Listing]) -> bool:
    known = ((branch.prepared_ms, branch.asked_ms()), (branch.forced_ms(), branch.forget_ms))
    return any(
        branch.name not in each.names
        for each in listings
        for since_ms, until_ms in known
        if since_ms <= each.asked_ms and each.answered_ms < until_ms
    )


def _listed_again(branch: Branch, listings: Sequence[Listing]) -> bool:
    gone_ms = branch.gone_ms()
    return any(branch.name in each.names for each in listings if each.asked_ms >= gone_ms)


def _early(branch: Branch, takes: Sequence[Operation]) -> Iterator[str]:
    """Yield the sent messages that others received before the branch may have ended."""
    asked_ms = branch.asked_ms()
    for each in takes:
        assert each.ended_ms is not None
        if each.ended_ms < asked_ms:
            for target, ids in branch.sent.items():
                if target == each.source:
                    yield from (id for id in ids if id in each.ids)


def _released(branch: Branch, takes: Sequence[Operation]) -> Iterator[str]:
    """Yield the received messages that others received while the branch was prepared."""
    asked_ms = branch.asked_ms()
    for each in takes:
        assert each.begun_ms is not None
        assert each.ended_ms is not None
        if each.place == branch.source and branch.prepared_ms <= each.begun_ms and each.ended_ms < asked_ms:
            yield from (id for id in branch.taken if id in each.ids)
