from __future__ import annotations

import enum

import pytest

from bascule.xa.resource import BranchState
from tests.support.state_diagrams import PAGE, Machine, diagram, machines, page

#: Other initial states of a machine: recovery finds a branch that an operator has finished.
ENTRIES = {"bascule.xa.resource.NEXT": {BranchState.HEURISTIC}}


class Door(enum.Enum):
    """The states of a door."""

    OPEN = "open"
    SHUT = "shut"


class Hand(enum.Enum):
    PUSH = "push"
    PULL = "pull"


def test_state_page_equals_the_page_generated_from_the_tables() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.support.state_diagrams` to regenerate the page"


def test_state_diagram_has_each_transition() -> None:
    table = {(Door.OPEN, Hand.PUSH): Door.SHUT, (Door.SHUT, Hand.PULL): Door.OPEN, (Door.SHUT, Hand.PUSH): Door.SHUT}
    text = diagram(Machine("doors", "TABLE", table))
    assert "[*] --> s0" in text
    assert "s0 --> s1: push" in text
    assert "s1 --> s0: pull" in text
    assert "s1 --> s1: push" in text


@pytest.mark.parametrize("machine", list(machines()), ids=lambda machine: f"{machine.module}.{machine.name}")
def test_each_state_is_reachable(machine: Machine) -> None:
    reached = {next(iter(machine.states)), *ENTRIES.get(f"{machine.module}.{machine.name}", ())}
    while more := {after for (before, _), after in machine.table.items() if before in reached} - reached:
        reached |= more
    assert set(machine.states) - reached == set()
