"""An index of address patterns: it finds the patterns that match an address without testing each pattern.

Patterns with wildcards form a radix tree over their words. A search visits only nodes whose path matches the first words of the address,
each at most once: it keeps the set of places in the address at which the path can end. The cost of a search depends on the branches of the
address's words. In the worst case, patterns chosen so that all match up to their last word, it is two microseconds for each pattern,
and one for each ten words behind those that other patterns share.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

from bascule.core.destination import has_wildcards

V = TypeVar("V", bound=Hashable)

#: Cost of a search for each node that it examines, and for each 32 characters of the words of the node.
CHILD_STEPS: Final = 2
_CHARS_PER_STEP_BITS: Final = 5

#: The words that the head of a pattern consumes of an address, before the tree. If an address begins with an empty word, a leading ``#``
#: stands for that word only, and two of them also for the words after it.
_NONE, _ONE_LEADING, _SEVERAL_LEADING = range(3)


class _Node(Generic[V]):
    """A node: the words from its parent to it, and the values whose pattern ends here, each with its number."""

    __slots__ = ("children", "label", "values")

    def __init__(self, label: str) -> None:
        self.label = label  # one string: a list of words would need far more memory
        self.children: dict[str, _Node[V]] = {}  # by the first word of their label
        self.values: dict[V, int] = {}


class _Address:
    """An address during a search. Bit ``n`` of a set of places stands for the place after the first ``n`` words."""

    __slots__ = ("end", "filled", "places", "words")

    def __init__(self, address: str) -> None:
        self.words = address.split(".")
        self.end = 1 << len(self.words)
        self.places: dict[str, int] = {}  # by word
        for index, word in enumerate(self.words):
            self.places[word] = self.places.get(word, 0) | 1 << index
        self.filled = self.end - 1 & ~self.places.get("", 0)  # neither * nor # matches an empty word

    def behind(self, places: int, label: str) -> int:
        """Return the places after some words of a pattern."""
        for word in label.split("."):
            if word == "#":
                places = self._spread(places)
                continue
            places = (places & (self.filled if word == "*" else self.places.get(word, 0))) << 1
            if not places:
                break
        return places

    def _spread(self, places: int) -> int:
        """Return the places after any number of words.

        All places of a set are in one run of words that are not empty, or at its end: only an empty word of a pattern leads out of it.
        """
        lowest = places & -places
        empty = self.places.get("", 0) & -lowest  # from that place on
        last = empty & -empty or self.end
        return (last << 1) - lowest

    def behind_head(self, head: int) -> int:
        """Return the places after the head of a pattern."""
        if head == _NONE:
            return 1
        return 0b10 if head == _ONE_LEADING and not self.words[0] else self._spread(0b10)

    def following(self, places: int) -> set[str]:
        """Return the words that follow one of the places."""
        words, places = set(), places & (self.end - 1)
        while places:
            index = places.bit_length() - 1
            words.add(self.words[index])
            places ^= 1 << index
        return words


class AddressIndex(Generic[V]):
    """Values by address pattern, with the patterns of ``address_matches``. A value has one pattern at a time."""

    def __init__(self, values: Iterable[tuple[str, V]] = ()) -> None:
        """``values`` are patterns, each with its value."""
        self._count = 0  # number of values added so far
        self.searched = 0  # cost of all searches so far, in steps of about a microsecond
        self._values: dict[str, dict[V, int]] = {}  # by pattern
        self._roots: Final[tuple[_Node[V], ...]] = tuple(_Node("") for _ in (_NONE, _ONE_LEADING, _SEVERAL_LEADING))
        for pattern, value in values:
            self.add(pattern, value)

    def add(self, pattern: str, value: V) -> None:
        """Add a value."""
        self._count += 1
        self._values.setdefault(pattern, {})[value] = self._count
        if has_wildcards(pattern):
            head, words = _canonical(pattern)
            _grown(self._roots[head], words).values[value] = self._count

    def remove(self, pattern: str, value: V) -> None:
        """Remove a value if it exists."""
        values = self._values.get(pattern, {})
        if values.pop(value, None) is None:
            return
        if not values:
            del self._values[pattern]
        if has_wildcards(pattern):
            head, words = _canonical(pattern)
            _prune(self._roots[head], words, value)

    def under(self, pattern: str) -> list[V]:
        """Return the values of exactly this pattern, in the order in which they were added."""
        return list(self._values.get(pattern, ()))

    def matching(self, address: str) -> list[V]:
        """Return the values whose pattern matches an address, in the order in which they were added."""
        found = dict(self._values.get(address, {}))
        if any(root.children or root.values for root in self._roots):
            self._search(_Address(address), found)
        return sorted(found, key=found.__getitem__)

    def _search(self, address: _Address, found: dict[V, int]) -> None:
        waiting = [(root, address.behind_head(head)) for head, root in enumerate(self._roots)]
        while waiting:
            node, places = waiting.pop()
            if places & address.end:
                found |= node.values
            for child in _children(node, address, places):
                self.searched += CHILD_STEPS + (len(child.label) >> _CHARS_PER_STEP_BITS)
                behind = address.behind(places, child.label)
                if behind:
                    waiting.append((child, behind))


def _children(node: _Node[V], address: _Address, places: int) -> Iterable[_Node[V]]:
    """Return the children of a node that may match the words after one of the places."""
    children = node.children
    if len(children) <= places.bit_count() + 2:
        return children.values()
    words = {"*", "#"} | address.following(places)
    return [children[word] for word in words if word in children]


def _canonical(pattern: str) -> tuple[int, list[str]]:
    """Return the head of a pattern and its other words, with one ``#`` for several in a row."""
    words: list[str] = []
    for word in pattern.split("."):
        if word != "#" or words[-1:] != ["#"]:
            words.append(word)
    if words[0] != "#":
        return _NONE, words
    return _SEVERAL_LEADING if pattern == "#.#" or pattern.startswith("#.#.") else _ONE_LEADING, words[1:]


def _common(ours: list[str], theirs: list[str]) -> int:
    """Return the number of common words at the beginning of two lists."""
    count = 0
    for our, their in zip(ours, theirs, strict=False):
        if our != their:
            break
        count += 1
    return count


def _grown(node: _Node[V], words: list[str]) -> _Node[V]:
    """Return the node for the words of a pattern below ``node``; create it if needed."""
    while words:
        child = node.children.get(words[0])
        if child is None:
            leaf: _Node[V] = _Node(".".join(words))
            node.children[words[0]] = leaf
            return leaf
        label = child.label.split(".")
        common = _common(label, words)
        if common < len(label):  # the paths diverge within the label
            fork: _Node[V] = _Node(".".join(label[:common]))
            fork.children[label[common]] = child
            child.label = ".".join(label[common:])
            node.children[words[0]] = child = fork
        node, words = child, words[common:]
    return node


def _prune(node: _Node[V], words: list[str], value: V) -> None:
    """Remove a value from the node for the words of a pattern, and remove the nodes that become empty."""
    path: list[_Node[V]] = [node]
    while words:
        node = node.children[words[0]]
        words = words[len(node.label.split(".")) :]
        path.append(node)
    del node.values[value]
    while len(path) > 1:
        node = path.pop()
        if node.values or len(node.children) > 1:
            return
        siblings, first = path[-1].children, node.label.split(".", 1)[0]
        if node.children:
            (child,) = node.children.values()
            child.label = f"{node.label}.{child.label}"
            siblings[first] = child
            return
        del siblings[first]
