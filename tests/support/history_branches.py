"""Judges what became of transaction branches (XA): a prepared one stays as it is until somebody ends it, and ends as it is told.

What their transactions send and take stands in the history like that of others, and is judged there. Here is what only the calls show: a
broker that forgets a branch, ends it otherwise, or gives its messages to others meanwhile.
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
#: What is answered: done; unknown, and perhaps what it remembers of it; what an administrator has made of it; not now. To a prepare and to
#: a commit in one phase also that there was nothing to do, or that the transaction has been rolled back.
Said = Literal["done", "unknown", "committed", "rolled-back", "forced-commit", "forced-rollback", "busy", "read-only", "gone"]
FORCED: Collection[Said] = ("forced-commit", "forced-rollback")
_FORGOTTEN: Collection[Said] = ("unknown", "committed", "rolled-back")
_OTHERWISE: Collection[tuple[Wanted, Said]] = (("commit", "rolled-back"), ("rollback", "committed"))


@dataclass(slots=True)
class End:
    """Somebody asks for the end of a branch. ``said`` is None where no answer came."""

    wanted: Wanted
    asked_ms: float
    answered_ms: float = NEVER_MS
    said: Said | None = None
    forced: bool = False


@dataclass(slots=True)
class Branch:
    """What was done to one branch; ``sent`` are ids by destination, ``taken`` ids from ``source``."""

    name: str
    source: Place | None = None
    taken: tuple[str, ...] = ()
    sent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Wanted = "rollback"  # for its transaction, where it was prepared
    prepared_ms: float = NEVER_MS  # answered
    one_phase_ms: float = NEVER_MS  # the first commit in one phase was asked for
    forget_ms: float = NEVER_MS  # an administrator first asked that his end be forgotten
    forgotten_ms: float = NEVER_MS  # answered
    ends: list[End] = field(default_factory=list)

    def asked_ms(self) -> float:
        """From when on it may be over."""
        return min((self.one_phase_ms, *(end.asked_ms for end in self.ends)))

    def forced_ms(self) -> float:
        """From when on an administrator's end of it was known."""
        return min((end.answered_ms for end in self.ends if end.said in FORCED), default=NEVER_MS)

    def gone_ms(self) -> float:
        """From when on nobody needs to see to it, as somebody was told."""
        ended_ms = (end.answered_ms for end in self.ends if end.said in _FORGOTTEN or (end.said == "done" and not end.forced))
        return min((self.forgotten_ms, *ended_ms))


class Listing(NamedTuple):
    """What the broker said when it was asked for prepared branches."""

    asked_ms: float
    answered_ms: float
    names: frozenset[str]


def judge(tally: Tally, operations: Sequence[Operation], branches: Iterable[Branch], listings: Sequence[Listing]) -> None:
    """Adds to a tally what is found."""
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
    """Whether the first who asked for its end was told that there is no such branch, or somebody whose administrator had ended it."""
    first = (
        end
        for end in branch.ends
        if end.asked_ms >= branch.prepared_ms and not any(other is not end and other.asked_ms < end.answered_ms for other in branch.ends)
    )
    forced_ms = branch.forced_ms()
    later = (end for end in branch.ends if forced_ms <= end.asked_ms and end.answered_ms < branch.forget_ms)
    return any(end.said in _FORGOTTEN for end in (*first, *later))


def _otherwise(branch: Branch) -> bool:
    """Not judged where an administrator has ended it: once that is forgotten, whoever asks for a rollback is told that there was one."""
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
    """Of what it sends that which others have before it may be over."""
    asked_ms = branch.asked_ms()
    for each in takes:
        assert each.ended_ms is not None
        if each.ended_ms < asked_ms:
            for target, ids in branch.sent.items():
                if target == each.source:
                    yield from (id for id in ids if id in each.ids)


def _released(branch: Branch, takes: Sequence[Operation]) -> Iterator[str]:
    """Of what it has taken that which others get while it is prepared."""
    asked_ms = branch.asked_ms()
    for each in takes:
        assert each.begun_ms is not None
        assert each.ended_ms is not None
        if each.place == branch.source and branch.prepared_ms <= each.begun_ms and each.ended_ms < asked_ms:
            yield from (id for id in branch.taken if id in each.ids)
