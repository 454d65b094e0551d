"""Pipelines that are paused or stopped: how a driver takes one of them out of its task, and lets it continue (docs/adr/0022-control.md).

A held divert has a position of its own, like a divert that is disabled. The diverts of a group share a task, so the task stops while one
transaction gives the held divert its position. A held ingress keeps its positions; its task stops. In both cases the driver then takes the
positions over, so that a task which Spark has not ended yet carries nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pyspark.errors import PySparkException

from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.pipelines.failures import described
from bascule.pipelines.offset_moves import OffsetMoves
from bascule.pipelines.positions import Positions
from bascule.pipelines.queries import Query
from bascule.pipelines.registry import DivertPlan
from bascule.writer.control import OffsetsWish, PipelineState
from bascule.writer.position import COMMON, DIVERT, PositionTaken, group_pipeline

log = get_log(__name__)

#: Why the broker keeps the journal for a divert that an administrator holds.
NOTES: Mapping[PipelineState, str] = {
    state: f"an administrator has {state.value} the divert; to continue: bascule divert resume {{name}}"
    for state in (PipelineState.PAUSED, PipelineState.STOPPED)
}


class Holds:
    """The pipelines of one driver that are held. ``held`` has their names; the driver starts no task for them.

    Performs the effects of ``writer.control.SteeringEffects``.
    """

    def __init__(
        self, positions: Positions, queries: dict[str, Query], separate: set[str], group_of: Callable[[str], str],
        start_separate: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``separate`` are the diverts with a position of their own, and ``start_separate`` starts the query of one of them.

        ``group_of`` returns the pipeline of a divert's group.
        """
        self.held: set[str] = set()
        self.moves = OffsetMoves(positions)
        self._positions = positions
        self._queries = queries
        self._separate = separate
        self._group_of = group_of
        self._start_separate = start_separate
        self._failures: dict[str, str] = {}
        #: Diverts that may have left their groups: the transaction has failed, or its result is not known.
        self._in_doubt: set[str] = set()

    def parted(self, plan: DivertPlan) -> DivertPlan:
        """Give each held divert that is a member of a group a position of its own, before any query starts. Raises Unavailable."""
        shared = {} if plan.vacant else {COMMON: plan.common}
        shared |= {group_pipeline(group): position for group, position in plan.groups.items()}
        separate = dict(plan.separate)
        for pipeline, position in shared.items():
            leaving = [name for name in position.members if f"{DIVERT}{name}" in self.held]
            if leaving:
                separate |= self._positions.part(pipeline, position, leaving)
                left = tuple(name for name in position.members if name not in leaving)
                shared[pipeline] = replace(position, members=left)
        groups = {group: shared[group_pipeline(group)] for group in plan.groups}
        return replace(plan, common=shared.get(COMMON, plan.common), groups=groups, separate=separate)

    # -- effects: see bascule.writer.control.SteeringEffects -----------------------------------------------------------

    def hold(self, pipeline: str) -> bool:
        """Take a pipeline out of its task. Returns False if this must be repeated. Raises PositionTaken."""
        self.held.add(pipeline)
        query = self._queries.get(pipeline)
        if query is not None:  # an ingress, or a divert with a position of its own
            query.restart()
            if query.superseded:
                return False  # the driver stops
        if pipeline in self._queries or not pipeline.startswith(DIVERT):
            return query is None or query.idle or query.stopped is not None
        return self._contained(pipeline, self._left_group)

    def release(self, pipeline: str) -> bool:
        """Let a pipeline continue from its position. Its query is started again until it runs."""
        self.held.discard(pipeline)
        if pipeline in self._in_doubt and not self._contained(pipeline, self._settled):
            return False
        query = self._queries.get(pipeline)
        if query is not None:
            query.retry()
        if pipeline.startswith(DIVERT) and query is not None:
            group = self._queries.get(self._group_of(pipeline.removeprefix(DIVERT)))
            if group is not None and group.idle:  # without members, until this divert joins
                group.restart()
        return True

    def move(self, pipeline: str, wish: OffsetsWish) -> bool:
        """Move the positions of a held pipeline, or refuse. Returns False if this must be repeated. Raises PositionTaken."""
        return self._contained(pipeline, partial(self._moved, wish))

    def restart(self, pipeline: str) -> None:
        """Start the task of a pipeline again. The other diverts of its group, which share the task, are restarted with it."""
        query = self._queries.get(pipeline) or self._queries.get(self._group_of(pipeline.removeprefix(DIVERT)))
        if query is not None:
            query.retry()

    def _left_group(self, pipeline: str) -> bool:
        """Give a member of a group a position of its own. The task of the group stops meanwhile, and starts again also if it has failed."""
        name = pipeline.removeprefix(DIVERT)
        group = self._queries.get(self._group_of(name))
        if group is None:
            return True  # no task carries the divert
        if group.superseded:
            return False  # the driver stops
        failed = group.stopped is not None
        group.stop()
        try:
            # The position of the group may be lost: the divert leaves it all the same, to be moved to a record that exists.
            shared = self._positions.taken(self._positions.key_of(group.name))
            if name not in shared.members and pipeline not in self._in_doubt:
                return True  # a new divert, which has not begun because the group cannot continue
            # From here on, the common position must not answer for the messages that the divert took, whether or not the transaction is
            # committed. It carries them as long as the divert is a member.
            self._separate.add(name)
            self._in_doubt.add(pipeline)
            if name in shared.members:  # unless an earlier attempt was committed
                self._positions.part(group.name, shared, [name])
            self._start_separate(name)
            self._in_doubt.remove(pipeline)
        finally:
            group.restart()
        if failed:
            group.retry()  # the divert may have been the reason
        return self._queries[pipeline].idle or self._queries[pipeline].stopped is not None

    def _moved(self, wish: OffsetsWish, pipeline: str) -> bool:
        self.moves.carry_out(pipeline, wish)
        query = self._queries.get(pipeline)
        if query is not None and query.stopped is not None:  # it could not continue from its old position
            name = pipeline.removeprefix(DIVERT)
            if pipeline.startswith(DIVERT) and self._group_of(name) != pipeline:  # perhaps the query could not start from any
                self._separate.add(name)
                self._start_separate(name)
            else:
                query.retry()
        return True

    def _settled(self, pipeline: str) -> bool:
        """Find out whether a divert has left its group. If it has, start its query."""
        name = pipeline.removeprefix(DIVERT)
        if self._positions.own_key(name) in self._positions.stored(decides=True):
            self._start_separate(name)
        else:
            self._separate.discard(name)
        self._in_doubt.remove(pipeline)
        return True

    def _contained(self, pipeline: str, act: Callable[[str], bool]) -> bool:
        """Return the result of a step. An error, which is logged once, means that the step must be repeated. Raises PositionTaken."""
        try:
            done = act(pipeline)
        except PositionTaken:
            raise
        except (BasculeError, PySparkException) as error:
            if self._failures.get(pipeline) != (text := described(error)):
                self._failures[pipeline] = text
                log.warning("could not control pipeline, will retry", pipeline=pipeline, error=text)
            return False
        with suppress(KeyError):
            del self._failures[pipeline]
        return done
