"""Which of two matches counts for an address that both match: Artemis and Bascule do not always choose the same one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key
from typing import Final, NamedTuple

from bascule.cli.imports.context import AddressSyntax, ImportContext
from bascule.cli.imports.report import shortened
from bascule.cli.imports.xml_tree import XmlNode
from bascule.core.address_index import AddressIndex
from bascule.core.destination import has_wildcards, specificity

#: Matches with wildcards that are compared in pairs.
COMPARED_MAX: Final = 1000
_NAMED_MAX: Final = 3


class TakenMatch(NamedTuple):
    """A match of the source that became a table, and its pattern in Bascule."""

    node: XmlNode
    match: str
    pattern: str


class MatchInheritance:
    """Finds the elements from which another one inherits the settings that it does not have."""

    def __init__(self, syntax: AddressSyntax, taken: Sequence[TakenMatch]) -> None:
        self._syntax = syntax
        self._taken = taken
        self._index = AddressIndex((each.pattern, place) for place, each in enumerate(taken))

    def general(self, pattern: str) -> list[XmlNode]:
        """Return the elements that match every address of a pattern; of two, Artemis prefers the first one."""
        near = [self._taken[place] for place in self._index.matching(pattern)]
        found = [each for each in near if each.pattern != pattern and _covers(each.pattern.split("."), pattern.split("."))]
        return [each.node for each in sorted(found, key=cmp_to_key(self._order))]

    def _order(self, one: TakenMatch, other: TakenMatch) -> int:
        return -1 if _artemis_prefers(one.match, other.match, self._syntax) else 1


def _covers(general: Sequence[str], special: Sequence[str]) -> bool:
    for word, theirs in zip(general, special, strict=False):
        if word == "#":
            return True
        if theirs == "#" or word not in ("*", theirs):
            return False
    return len(general) == len(special) or list(general[len(special) :]) == ["#"]


def report_precedence(context: ImportContext, taken: Sequence[TakenMatch], advice: str) -> None:
    """Report the matches that Artemis prefers to another one, and Bascule does not. ``taken`` are in the order of the tables."""
    found = [each for each in taken if has_wildcards(each.pattern)]
    if len(found) > COMPARED_MAX:
        note = f"more than {COMPARED_MAX:,} matches with wildcards: not checked whether Artemis and Bascule prefer the same ones"
        context.remark(found[0].node, "", note)
        return
    for place, preferred in enumerate(found):
        others = [other.pattern for at, other in enumerate(found) if _is_reversed(context.syntax, preferred, other, later=at > place)]
        if others:
            more = f" and {len(others) - _NAMED_MAX} others" if len(others) > _NAMED_MAX else ""
            names = ", ".join(map(repr, others[:_NAMED_MAX])) + more
            note = f"for an address that also matches {names}, Artemis prefers this match, and Bascule the other one; {advice}"
            context.remark(preferred.node, "", note, part="@match", value=shortened(preferred.match))


def _is_reversed(syntax: AddressSyntax, preferred: TakenMatch, other: TakenMatch, *, later: bool) -> bool:
    """Return whether Artemis prefers the first match, and Bascule the other one. Of equal ones, Bascule takes the later table."""
    ours, theirs = specificity(preferred.pattern), specificity(other.pattern)
    return (
        preferred is not other
        and (ours < theirs or (ours == theirs and later))
        and _artemis_prefers(preferred.match, other.match, syntax)
        and _meet(preferred.pattern.split("."), other.pattern.split("."))
    )


def _artemis_prefers(match: str, other: str, syntax: AddressSyntax) -> bool:
    """Compare as ``HierarchicalObjectRepository.MatchComparator`` of Artemis."""
    any_words, single = syntax.any_words, syntax.single_word
    if any_words in match or any_words in other:
        return any_words not in match or (any_words in other and len(match) > len(other))
    left, right = match.split(syntax.delimiter), other.split(syntax.delimiter)
    for word, theirs in zip(left, right, strict=False):
        if (word == single) != (theirs == single):
            return theirs == single
    return len(left) > len(right) or len(match) < len(other)


def _meet(left: Sequence[str], right: Sequence[str]) -> bool:
    """Return whether an address can match both patterns. In Artemis, only the last word may stand for any number of words."""
    for word, theirs in zip(left, right, strict=False):
        if "#" in (word, theirs):
            return True
        if word != theirs and "*" not in (word, theirs):
            return False
    rest = [*left[len(right) :], *right[len(left) :]]
    return rest in ([], ["#"])
