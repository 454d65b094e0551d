"""State machines as tables: the next state for each state and event."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)

#: All tables of the imported modules, by name.
TABLES: Final[dict[str, Transitions[enum.Enum, enum.Enum]]] = {}


class Transitions(Mapping[tuple[S, E], S]):
    """The transitions of one state machine. A transition that is not in the table raises KeyError.

    ``taken`` counts the transitions that are looked up, once a test has set it to a counter.
    """

    def __init__(self, name: str, table: Mapping[tuple[S, E], S]) -> None:
        """``name`` identifies the state machine in tests and documentation."""
        self.name = name
        self.taken: Counter[tuple[S, E]] | None = None
        self._table = dict(table)
        TABLES[name] = self  # type: ignore[assignment]

    def __getitem__(self, key: tuple[S, E]) -> S:
        after = self._table[key]
        if self.taken is not None:
            self.taken[key] += 1
        return after

    def __iter__(self) -> Iterator[tuple[S, E]]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def states(self) -> frozenset[S]:
        """The states in the table."""
        return frozenset(state for state, _ in self._table) | frozenset(self._table.values())
