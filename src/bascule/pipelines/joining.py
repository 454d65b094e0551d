"""Diverts that join their groups. A divert, or its group, catches up in the background, while the driver serves all other pipelines."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from pyspark import SparkContext
from pyspark.errors import PySparkException

from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log
from bascule.pipelines.failures import described
from bascule.pipelines.jobs import CatchUp
from bascule.pipelines.positions import Positions
from bascule.pipelines.queries import Query
from bascule.pipelines.registry import joined
from bascule.pipelines.tasks import DivertTask
from bascule.writer.position import DIVERT, Position

log = get_log(__name__)

#: How long a divert or its group may take to catch up, in seconds. Both wait meanwhile. An attempt that takes longer is given up.
JOIN_S: Final = 30.0
#: How long the driver's thread waits for a short catch-up, in seconds. Meanwhile it serves no other pipeline.
JOIN_WAIT_S: Final = 0.25
#: After an attempt that was given up, the divert joins within this part of the distance: the next attempt should take about 5 s.
NEARER: Final = 6
#: The least distance, in records, within which a divert joins. Within a smaller one, two that carry new records would seldom be seen.
NEAREST: Final = 100
#: Pause, in seconds, after a join that failed: an attempt stops both queries, which carry records or find the fault meanwhile.
JOIN_PAUSE_S: Final = 30.0


class DivertJoins:
    """The joins of one driver, one after the other. ``in_doubt`` has the diverts whose join may have been committed."""

    def __init__(
        self, positions: Positions, queries: Mapping[str, Query], group_of: Callable[[str], str],
        task_of: Callable[[str, Position], DivertTask], context: Callable[[], SparkContext],
        catch_up: Callable[[str, DivertTask, Position, int, Callable[[], None]], None],
        configured: Container[str], has_joined: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``catch_up`` carries the records of a task before an offset, and blocks.

        Its last argument raises an error once the catch-up is told to stop. ``has_joined`` is told which divert has joined.
        """
        self._positions, self._queries, self._group_of, self._task_of = positions, queries, group_of, task_of
        self._context, self._catch_up, self._configured, self._has_joined = context, catch_up, configured, has_joined
        self.in_doubt: set[str] = set()
        #: The divert that joins, the offset to which one of the two catches up, and the distance between the two before.
        self._joining: tuple[str, CatchUp, int, int] | None = None
        #: The distance within which a divert joins, if an attempt took too long.
        self._distances: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Return whether a divert joins now."""
        return self._joining is not None

    def distance(self, name: str, most: int) -> int:
        """Return the distance within which a divert joins, in records: at most ``most``."""
        return min(most, self._distances.get(name, most))

    def begin(self, name: str) -> None:
        """Begin to join a divert with its group: stop both, and bring the one behind to the offset of the other, in the background."""
        query, group = self._queries[f"{DIVERT}{name}"], self._queries[self._group_of(name)]
        query.stop()
        group.stop()
        try:
            for each in (query, group):
                if each.ending:
                    raise Unavailable(f"the task of {each.name} has not ended yet")
            crash.point("join.before")
            own, shared = (self._positions.read(self._positions.key_of(each.name)) for each in (query, group))
            end, apart = max(own.offset, shared.offset), abs(own.offset - shared.offset)
            behind, position = (query, own) if own.offset < shared.offset else (group, shared)
            task = self._task_of(self._positions.key_of(behind.name), position)
            work = partial(self._catch_up, behind.name, task, position, end) if position.offset < end else lambda _look: None
            query.running = group.running = catch_up = CatchUp(self._context(), behind.name, work, JOIN_S)
            self._joining = name, catch_up, end, apart
            self.finish(JOIN_WAIT_S)
        except (BasculeError, PySparkException) as error:
            log.warning("could not join divert, will retry", divert=name, error=described(error))
            group.restart()

    def finish(self, wait_s: float = 0.0) -> str | None:
        """Merge the positions of a divert and its group in one transaction if both have the same offset, and let the queries continue.

        Returns the divert when its attempt has ended.
        """
        if self._joining is None or not self._joining[1].ended(wait_s):
            return None
        (name, catch_up, end, apart), self._joining = self._joining, None
        if catch_up.overdue:
            self._distances[name] = max(NEAREST, apart // NEARER)
        elif not catch_up.stopped:
            self._distances.pop(name, None)
        # A query that was stopped meanwhile, for example to be held, is started by the code that stopped it.
        query, group = (self._queries.get(each) for each in (f"{DIVERT}{name}", self._group_of(name)))
        waiting = [each for each in (query, group) if each is not None and each.running is catch_up]
        for each in waiting:
            each.running = None
        try:
            if catch_up.stopped or query not in waiting or group not in waiting:
                raise Unavailable(f"the divert could not catch up within {JOIN_S:.0f} s, or was stopped meanwhile")
            if (failure := catch_up.failure()) is not None:
                raise failure
            key, group_key = self._positions.own_key(name), self._positions.key_of(self._group_of(name))
            own, shared = self._positions.read(key), self._positions.read(group_key)
            if not own.offset == shared.offset == end:
                raise Unavailable(f"the positions reached the offsets {own.offset} and {shared.offset}, expected {end}")
            # From here on, the common position covers a divert that is no longer configured.
            after = joined(shared, own if name in self._configured else replace(own, members=()))
            crash.point("join.caught_up")
            self.in_doubt.add(name)
            self._positions.move(group_key, shared, after, {key: None})
            crash.point("join.after")
            self._has_joined(name)
        except (BasculeError, PySparkException) as error:
            log.warning("could not join divert, will retry", divert=name, error=described(error))
        finally:
            if group is not None and group in waiting:
                group.restart()
        return name
