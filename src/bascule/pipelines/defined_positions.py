"""Positions of the pipelines that are defined at run time: how a driver registers and deletes them (docs/adr/0026-definitions.md, 0028)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Final

from bascule.core import crash
from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka.admin import delete_group
from bascule.pipelines.positions import TAKEN_AT_ONCE, Positions
from bascule.pipelines.registry import DivertPlan, journal_position, offset_of
from bascule.pipelines.spec import DivertSpec, PipelinesSpec, StartPosition
from bascule.pipelines.takeover import StoredKeys
from bascule.writer.position import DEFINED, DIVERT, LATEST, MOVED, Position, PositionLost, PositionTaken, defined_mark

log = get_log(__name__)

#: The group of diverts that are defined at run time: they join nobody. No group of the configuration can have this name.
NO_GROUP: Final = "/"


class DefinedPositions(Positions):
    """The positions of one driver run, also of the pipelines that are defined at run time."""

    def __init__(self, pipelines: PipelinesSpec, owner: str) -> None:
        super().__init__(pipelines, owner)
        #: Keys of diverts that are defined at run time: each is taken for itself, like an ingress.
        self._apart: set[str] = set()

    def leader_of(self, key: str) -> str:
        """Return the key that is taken before a position of diverts."""
        return key if key in self._apart else super().leader_of(key)

    def take_diverts(self, diverts: tuple[DivertSpec, ...], topic_id: str) -> DivertPlan | None:
        """Do the same as for a driver without definitions, and leave the positions of diverts that are defined at run time alone.

        A divert that was in the file, too, and has left it, leaves its group with a position of its own, like one that is disabled.
        """
        apart = (DivertSpec(name, "#", enabled=False, group=NO_GROUP) for name in sorted(self._defined_apart(diverts)))
        return super().take_diverts((*diverts, *apart), topic_id)

    def _stored_keys(self, diverts: tuple[DivertSpec, ...]) -> StoredKeys:
        found = super()._stored_keys(diverts)
        # Read after the keys: an earlier driver may register a divert until its transactional id is taken.
        apart = self._defined_apart(tuple(divert for divert in diverts if divert.group != NO_GROUP))
        return replace(
            found,
            own={name: key for name, key in found.own.items() if name not in apart},
            begun={name: key for name, key in found.begun.items() if name not in apart},
        )

    def _defined_apart(self, diverts: tuple[DivertSpec, ...]) -> set[str]:
        """Return the diverts with positions that belong to definitions made at run time, and that are not in the file."""
        defined = {pipeline.removeprefix(DIVERT) for pipeline in self.definitions() if pipeline.startswith(DIVERT)}
        return defined - {divert.name for divert in diverts}

    def take_defined(self, divert: DivertSpec, definition: str, covered: int) -> None:
        """Take over the position of a divert that is defined at run time, or register it in one transaction with the id of its definition.

        A new divert begins where its start says; ``latest`` is the offset ``covered`` from which the journal has its messages. Call
        ``forget`` before if a stored position belongs to another definition. Raises PositionLost, PositionTaken, PositionMoved and
        Unavailable.
        """
        key, mark = self.own_key(divert.name), f"{DEFINED}{DIVERT}{divert.name}"
        self._apart.add(key)
        with closing(self.writer(key)) as writer:
            found = self._take(writer, key)
            if found is None and (begun := self.current(mark)) is not None and begun.owner == definition:
                raise PositionLost(f"position {key!r} is missing; restore topic {self.pipelines.topics.positions!r}")
            if found is None:
                begin = replace(self._divert_beginning(divert.start, covered), members=(divert.name,))
                marks = {mark: defined_mark(definition), self.begun_key(divert.name): begin}
                crash.point("define.before")
                writer.write([], None, replace(begin, owner=self._claims.name(key)), marks)
                crash.point("define.after")
                log.info("divert begins", divert=divert.name, offset=begin.offset, covered=covered)
            self._claims.hold([key])

    def _divert_beginning(self, start: StartPosition, covered: int) -> Position:
        topic, partition = self.pipelines.topics.journal, self.pipelines.topics.partition
        topic_id = self.topics.ids([topic]).get(topic)
        if topic_id is None:
            raise Unavailable(f"topic {topic!r} does not exist")
        history, lineage = self._looks(topic, partition)
        end = run_blocking(lineage.end())
        if end.offset < covered:
            raise Unavailable(f"stale end offset {end.offset} of journal {topic!r}: the Kafka node is cut off from the cluster")
        wanted = covered if start.at == LATEST else min(offset_of(start, history), end.offset)
        first = history.earliest()
        if wanted < first:
            log.warning("records before the beginning of a divert are deleted", offset=wanted, first=first)
        found = journal_position(topic, topic_id, partition, max(wanted, first), history)
        return replace(found, leader_epoch=end.leader_epoch)

    def definitions(self) -> dict[str, str]:
        """Return the ids of the definitions made at run time to which stored positions belong, by pipeline. Raises Unavailable."""
        return {key.removeprefix(DEFINED): at.owner for key, at in self.stored(decides=True).items() if key.startswith(DEFINED)}

    def forget(self, pipeline: str, deleted: Callable[[str], bool]) -> None:
        """Delete the positions of an ingress, or of a divert that is defined at run time, without a query, and its consumer group.

        Nothing is left of the pipeline; this may be repeated. ``deleted`` returns whether the definition with an id is deleted: positions
        of another one belong to a driver that has replaced this one.

        The group is deleted first: it would look like a lost position. A task that Spark has not ended yet carries nothing more, because
        its positions have another owner from the beginning. Raises PositionTaken, Unavailable, Denied.
        """
        stored = self.stored(decides=True)
        self._check_deleted(pipeline, stored.get(f"{DEFINED}{pipeline}"), deleted)
        keys = [key for key in stored if key.startswith(f"{pipeline}/")]
        marks = [key for key in (f"{DEFINED}{pipeline}", f"{MOVED}{pipeline}") if key in stored]
        first = pipeline
        if pipeline.startswith(DIVERT):
            first = self.own_key(pipeline.removeprefix(DIVERT))
            self._apart.add(first)
            keys = [key for key in keys if key != first]
            marks += [key for key in (self.begun_key(pipeline.removeprefix(DIVERT)),) if key in stored]
        if not (keys or marks or first in stored):
            return
        with closing(self.writer(first)) as leader, ThreadPoolExecutor(TAKEN_AT_ONCE) as pool:
            known = self._take(leader, first)
            # From here on, no other driver can begin the pipeline.
            self._check_deleted(pipeline, self.current(f"{DEFINED}{pipeline}"), deleted)
            list(pool.map(partial(self._taken, leader=first), keys))
            delete_group(self.pipelines.kafka, self.group(pipeline))
            crash.point("forget.before")
            leader.write([], known, None, dict.fromkeys([*keys, *marks]))
            crash.point("forget.after")
            self._claims.give_up([first, *keys])

    def _check_deleted(self, pipeline: str, begun: Position | None, deleted: Callable[[str], bool]) -> None:
        """Raise PositionTaken if the positions of a pipeline belong to a definition that is not deleted."""
        if begun is not None and not deleted(begun.owner):
            raise PositionTaken(f"another driver has begun {pipeline} by another definition; this driver stops")
