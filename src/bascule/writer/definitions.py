"""Definitions of pipelines that administrators make at run time, without IO: how a driver follows them (docs/adr/0026-definitions.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final, Protocol

from bascule.writer.control import PipelineDefinition

#: The revision of a definition that is not started: positions with its id are stored, or may be.
UNKNOWN_REVISION: Final = 0


class DefinitionEffects(Protocol):
    """The steps of a driver. Each may be repeated, and returns False, or raises a BasculeError that it contains, if it is not complete."""

    def add(self, pipeline: str, definition: PipelineDefinition) -> bool:
        """Start a pipeline. If its positions belong to another definition, they are deleted, and it begins as a new one."""
        ...

    def change(self, pipeline: str, definition: PipelineDefinition) -> bool:
        """Restart a pipeline with other settings, at its positions."""
        ...

    def remove(self, pipeline: str, definition: str) -> bool:
        """Stop a pipeline and delete its positions, in this order. The pipeline may be one that this driver has not started.

        ``definition`` is the id of the definition that is deleted. Positions of another one stay.
        """
        ...


class DefinitionSteps:
    """Follows the definitions made at run time, one step at a time. Pipelines of the configuration file are left alone."""

    def __init__(self, configured: Collection[str]) -> None:
        """Start without definitions. A definition with one of the names in the file (``configured``) has no effect, whatever its kind."""
        self._configured = frozenset(configured)
        self._have: dict[str, PipelineDefinition] = {}
        self._wanted: dict[str, PipelineDefinition] = {}
        #: How often the steps of pipelines that are due were tried. Those that were not tried yet come first.
        self._attempts: dict[str, int] = {}
        #: Definitions without effect, because the file has a pipeline of the name.
        self.ignored: frozenset[str] = frozenset()
        #: Pipelines whose definitions cannot be read, or are lost.
        self.unreadable: frozenset[str] = frozenset()

    def begin(
        self, definitions: Mapping[str, PipelineDefinition], marks: Mapping[str, str], unreadable: Collection[str] = ()
    ) -> None:  # fmt: skip
        """Begin with the current definitions. ``marks`` has the ids of the definitions to which stored positions belong, by pipeline.

        The positions of definitions that do not exist any more are deleted by later steps. ``unreadable``: see ``follow``.
        """
        for pipeline, mark in marks.items():
            if self._is_free(pipeline):
                self._have[pipeline] = PipelineDefinition(mark, UNKNOWN_REVISION, {})
        self.follow(definitions, unreadable)

    def follow(self, definitions: Mapping[str, PipelineDefinition], unreadable: Collection[str] = ()) -> None:
        """Take note of the current definitions.

        Pipelines whose definitions cannot be read, or are lost (``unreadable``), stay as they are: their positions must not be deleted.
        """
        self._wanted = {pipeline: each for pipeline, each in definitions.items() if self._is_free(pipeline)}
        self._wanted |= {pipeline: self._have[pipeline] for pipeline in unreadable if pipeline in self._have}
        self.ignored = frozenset(definitions.keys() - self._wanted.keys())
        self.unreadable = frozenset(filter(self._is_free, unreadable))

    def step(self, effects: DefinitionEffects, more: Callable[[], bool] = lambda: True) -> bool:
        """Carry out what is due. Steps that are not complete are repeated by the next call.

        ``more`` is asked after each start or change, and ends the call. Pipelines that are deleted are all stopped before: nobody wants
        them to be paused any more. Returns False if there are steps that no call has tried.
        """
        due = sorted(self.due, key=lambda pipeline: (self._attempts.get(pipeline, 0), pipeline))
        self._attempts = {pipeline: self._attempts.get(pipeline, 0) for pipeline in due}
        left = {pipeline for pipeline in due if self._is_left(pipeline) and not self._removed(effects, pipeline)}
        for number, pipeline in enumerate(pipeline for pipeline in due if pipeline in self._wanted and pipeline not in left):
            if number and not more():
                break
            self._attempts[pipeline] += 1
            self._start(effects, pipeline, self._wanted[pipeline])
        return all(self._attempts.values())

    def _is_left(self, pipeline: str) -> bool:
        """Return whether what a driver has of a pipeline belongs to a definition that is deleted."""
        have, wanted = self._have.get(pipeline), self._wanted.get(pipeline)
        return have is not None and (wanted is None or wanted.id != have.id)

    def _removed(self, effects: DefinitionEffects, pipeline: str) -> bool:
        if not effects.remove(pipeline, self._have[pipeline].id):
            self._attempts[pipeline] += 1
            return False
        del self._have[pipeline]
        if pipeline not in self._wanted:
            del self._attempts[pipeline]
        return True

    def _start(self, effects: DefinitionEffects, pipeline: str, wanted: PipelineDefinition) -> None:
        have = self._have.get(pipeline)
        if have is None or have.revision == UNKNOWN_REVISION:
            # A step that fails may have stored positions: the pipeline must be removed if its definition is deleted now.
            self._have[pipeline] = replace(wanted, revision=UNKNOWN_REVISION)
            done = effects.add(pipeline, wanted)
        else:
            done = effects.change(pipeline, wanted)
        if done:
            self._have[pipeline] = wanted

    @property
    def due(self) -> Iterator[str]:
        """The pipelines whose steps are not complete."""
        for pipeline in {*self._have, *self._wanted}:
            # Two brokers may have stored different settings with the same id and revision.
            if self._have.get(pipeline) != self._wanted.get(pipeline):
                yield pipeline

    @property
    def pipelines(self) -> frozenset[str]:
        """The pipelines that are defined at run time, or were until their positions are deleted."""
        return frozenset({*self._have, *self._wanted, *self.unreadable})

    @property
    def begun(self) -> frozenset[str]:
        """The pipelines with positions, or with a step that may have stored them."""
        return frozenset(self._have)

    def revision(self, pipeline: str) -> int:
        """Return the revision with which a pipeline was started, 0 if it was not."""
        have = self._have.get(pipeline)
        return UNKNOWN_REVISION if have is None else have.revision

    def id_of(self, pipeline: str) -> str:
        """Return the id of the definition with which a pipeline was started, "" if it was not."""
        have = self._have.get(pipeline)
        return "" if have is None else have.id

    def _is_free(self, pipeline: str) -> bool:
        return pipeline.partition(":")[2] not in self._configured
