"""How a driver follows definitions: random definitions, steps that fail, and drivers that are killed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from bascule.writer.control import PipelineDefinition
from bascule.writer.definitions import DefinitionSteps

NAMES = ("ingress:a", "ingress:b")


class Failed(Exception):
    """The end of a driver in a step."""


@dataclass
class World:
    """What is stored, and the pipelines that the driver of this moment runs."""

    random: random.Random
    definitions: dict[str, PipelineDefinition] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    running: dict[str, PipelineDefinition] = field(default_factory=dict)
    faults: bool = True

    def fails(self) -> bool:
        """Return whether a step is not complete; it may have been carried out. Raises Failed if the driver is killed."""
        if not self.faults:
            return False
        if self.random.random() < 0.1:
            raise Failed
        return self.random.random() < 0.2

    # -- effects of the steps ------------------------------------------------------------------------------------------

    def add(self, pipeline: str, definition: PipelineDefinition) -> bool:
        if self.fails():
            return False
        assert self.marks.get(pipeline) in (None, definition.id), "positions of another definition are used"
        self.marks[pipeline] = definition.id
        self.running[pipeline] = definition
        return not self.fails()

    def change(self, pipeline: str, definition: PipelineDefinition) -> bool:
        if self.fails():
            return False
        assert self.running[pipeline].id == definition.id
        self.running[pipeline] = definition
        return not self.fails()

    def remove(self, pipeline: str, definition: str) -> bool:
        self.running.pop(pipeline, None)
        if self.fails():
            return False
        assert self.marks.get(pipeline) in (None, definition), "positions of another definition are deleted"
        self.marks.pop(pipeline, None)
        return not self.fails()

    # -- what administrators do ----------------------------------------------------------------------------------------

    def change_something(self, number: int) -> None:
        name = self.random.choice(NAMES)
        found = self.definitions.get(name)
        if found is None:
            self.definitions[name] = PipelineDefinition(str(number), 1, {})
        elif self.random.random() < 0.5:
            self.definitions[name] = replace(found, revision=found.revision + 1)
        else:
            del self.definitions[name]


@pytest.mark.parametrize("seed", range(200))
def test_driver_reaches_the_definitions_whatever_fails(seed: int) -> None:
    world = World(random.Random(seed))
    steps = started(world)
    for number in range(40):
        if world.random.random() < 0.5:
            world.change_something(number)
        try:
            steps.follow(world.definitions)
            steps.step(world)
        except Failed:
            world.running.clear()
            steps = started(world)
    world.faults = False
    for _ in range(3):
        steps.follow(world.definitions)
        steps.step(world)
    assert world.running == world.definitions
    assert world.marks == {name: each.id for name, each in world.definitions.items()}
    assert list(steps.due) == []
    assert {name: steps.revision(name) for name in NAMES} == {
        name: world.definitions[name].revision if name in world.definitions else 0 for name in NAMES
    }


def started(world: World) -> DefinitionSteps:
    steps = DefinitionSteps(())
    steps.begin(world.definitions, world.marks)
    return steps


def test_names_of_the_file_are_left_alone_whatever_their_kind() -> None:
    world = World(random.Random(1), faults=False)
    world.definitions = {name: PipelineDefinition("1", 1, {}) for name in NAMES}
    world.marks = {"ingress:b": "an earlier one"}
    steps = DefinitionSteps({"b"})
    steps.begin(world.definitions, world.marks)
    steps.step(world)
    assert set(world.running) == {"ingress:a"}
    assert world.marks["ingress:b"] == "an earlier one"
    assert (set(steps.ignored), set(steps.pipelines)) == ({"ingress:b"}, {"ingress:a"})


def test_definition_of_another_broker_with_the_same_revision_is_followed() -> None:
    world = World(random.Random(1), faults=False)
    steps = started(world)
    for settings in ({}, {"to": "a"}, {"to": "b"}):
        world.definitions = {NAMES[0]: PipelineDefinition("1", 2, settings)}
        steps.follow(world.definitions)
        steps.step(world)
        assert world.running == world.definitions


class Slow(World):
    """A driver that has time for one step in each call, and whose steps for one pipeline always fail."""

    def add(self, pipeline: str, definition: PipelineDefinition) -> bool:
        return pipeline != NAMES[0] and super().add(pipeline, definition)


def test_steps_that_fail_leave_time_for_others() -> None:
    world = Slow(random.Random(1), faults=False)
    names = (*NAMES, "ingress:c", "ingress:d")
    world.definitions = {name: PipelineDefinition(name, 1, {}) for name in names}
    steps = started(world)
    assert [steps.step(world, lambda: False) for _ in names] == [False, False, False, True]
    assert (sorted(world.running), list(steps.due)) == (sorted(names[1:]), [NAMES[0]])
    assert {steps.id_of(name) for name in names[1:]} == set(names[1:])
    world.definitions["ingress:e"] = PipelineDefinition("e", 1, {})
    steps.follow(world.definitions)
    steps.step(world, lambda: False)
    assert "ingress:e" in world.running, "a step that has failed often comes last"
    del world.definitions["ingress:e"], world.definitions["ingress:d"]
    world.definitions |= {f"ingress:0{number}": PipelineDefinition("0", 1, {}) for number in range(3)}
    world.definitions["ingress:c"] = PipelineDefinition("again", 1, {})
    steps.follow(world.definitions)
    assert not steps.step(world, lambda: False), "not all were tried"
    assert sorted(world.running) == ["ingress:00", "ingress:b"], "a pipeline that is deleted is stopped at once"
    assert [steps.step(world, lambda: False) for _ in range(3)] == [False, False, True]
    assert world.running == {name: each for name, each in world.definitions.items() if name != NAMES[0]}
