"""Diagrams of the product's state machines, drawn from their tables: docs/internals/state-machines.md.

    python -m tests.support.state_diagrams        # writes the page

A state machine is a module constant ``Mapping[tuple[State, Event], State]`` whose states and events are enumerations.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import bascule

PAGE: Final = Path(__file__).parents[2] / "docs" / "internals" / "state-machines.md"
#: Packages that have protocols. Other packages import Spark or open sockets when they are imported.
PACKAGES: Final = ("adapter", "amqp", "broker", "journal", "writer", "xa")
HEAD: Final = """# State machines

Each protocol of Bascule keeps its state in a table: a state and an event give the next state, and an event that the table does not list is
refused with an error. The diagrams are drawn from the tables by `python -m tests.support.state_diagrams`, and a test compares this page
with them. How the product and the simulator run the protocols: [simulation](simulation.md).
"""


class Machine(NamedTuple):
    """A state table, and its place in the product."""

    module: str
    name: str
    table: Mapping[tuple[enum.Enum, enum.Enum], enum.Enum]

    @property
    def states(self) -> type[enum.Enum]:
        """Return the enumeration of the states."""
        return type(next(iter(self.table))[0])


def is_table(value: object) -> bool:
    """Return True if a module constant is a state table."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, enum.Enum) for part in key) for key in value)
        and all(isinstance(after, enum.Enum) and type(after) is type(key[0]) for key, after in value.items())
    )


def machines() -> Iterator[Machine]:
    """Yield every state machine of the product, by module."""
    for package in PACKAGES:
        for found in pkgutil.walk_packages([str(Path(bascule.__file__).parent / package)], f"bascule.{package}."):
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                if is_table(value) and type(next(iter(value))[0]).__module__ == module.__name__:
                    yield Machine(found.name, name, value)


def label(member: enum.Enum) -> str:
    """Return the name of a state or an event in a diagram: its value if that is a text, else its name."""
    return member.value if isinstance(member.value, str) else member.name.lower().replace("_", " ")


def diagram(machine: Machine) -> str:
    """Return a table as a Mermaid state diagram. The machine starts in the first state."""
    names = {state: f"s{number}" for number, state in enumerate(machine.states)}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {names[next(iter(machine.states))]}"]
    used = {state for (before, _), after in machine.table.items() for state in (before, after)}
    lines += [f'    state "{label(state)}" as {name}' for state, name in names.items() if state in used]
    events: dict[tuple[enum.Enum, enum.Enum], list[str]] = {}
    for (before, event), after in machine.table.items():
        events.setdefault((before, after), []).append(label(event))
    lines += [f"    {names[before]} --> {names[after]}: {'; '.join(texts)}" for (before, after), texts in events.items()]
    return "\n".join([*lines, "```"])


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for machine in machines():
        what = (machine.states.__doc__ or "").strip().splitlines()[0]
        parts.append(f"## `{machine.states.__name__}` of `{machine.module}`\n\n{what}\n\n{diagram(machine)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
