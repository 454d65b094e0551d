"""Coverage of diverts that are defined at run time: performs the effects of :mod:`bascule.broker.coverage`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from bascule.broker.coverage import ControlledDiverts, CoverageMark, CoveredDivert
from bascule.broker.divert_access import DivertAccess, DivertUser
from bascule.config.pipeline import Divert
from bascule.core.log import get_log
from bascule.core.topics import JournalTopics
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.control import ControlTopics
from bascule.kafka.replication import CLUSTER_DEFAULT
from bascule.server.divert_users import DivertUsers, user_of
from bascule.server.effects import LoopEffects
from bascule.writer.control import PipelineDefinition

log = get_log(__name__)

#: How long the broker waits for Kafka to answer a read of the definitions, in seconds.
READ_TIMEOUT_S: Final = 10.0
#: How long the end of an epoch waits for the clients to close, in seconds.
CLOSE_S: Final = 2.0
#: The addresses of a divert whose definition this version cannot read: no message for it may be missing later.
ALL_ADDRESSES: Final = "#"


class CoverageControl(LoopEffects):
    """The topic with the definitions, for one epoch."""

    def __init__(
        self, kafka: Mapping[str, Any], topics: JournalTopics,
        *, replication_factor: int = CLUSTER_DEFAULT, min_insync_replicas: int | None = None, users: DivertUsers | None = None,
    ) -> None:  # fmt: skip
        """Read and write nothing yet. ``users`` decides about diverts with a user.

        The other two are for a topic that must be created; None is the default of the cluster.
        """
        super().__init__("divert-coverage")
        self._replication_factor, self._min_insync_replicas = replication_factor, min_insync_replicas
        self._kafka = kafka
        self._topic = topics.control
        self._topics = ControlTopics(kafka, topics)
        self._sure = self._there = False
        #: What was made of each definition: the check of a long selector takes a while, and the loop looks every second.
        self._diverts: dict[str, tuple[PipelineDefinition | None, _FollowedDivert]] = {}
        self._users = users
        self._access: Mapping[str, DivertAccess] = {}

    async def controlled(self) -> ControlledDiverts:
        """Return the definitions and marks. Raises Unavailable, UnsafeTopic."""
        # A new reader, also after an error, could find a former leader; later reads never go back.
        sure, self._sure = self._sure, False
        if not self._there:  # no epoch can begin without the topic; later, an administrator may be about to restore it
            await self.off_loop(self._make_topic)
            self._there = True
        found = await self.off_loop(self._read, not sure)
        self._sure = True
        return found

    def _read(self, decides: bool) -> ControlledDiverts:
        definitions, covered, self._access, deleted = self._topics.controlled_diverts(READ_TIMEOUT_S, decides=decides)
        before = self._diverts
        # A definition that is missing and that nobody has deleted was lost with the topic: its divert will continue.
        definitions = {**{name: each for name, (each, _) in before.items() if name not in deleted}, **definitions}
        self._diverts = {
            name: before[name] if name in before and before[name][0] == definition else (definition, _divert_of(name, definition))
            for name, definition in definitions.items()
        }
        return ControlledDiverts(
            {name: divert.covered for name, (_, divert) in self._diverts.items()},
            covered,
        )

    def _make_topic(self) -> None:
        """Create the topic if somebody has deleted it since the start of the process. Raises Unavailable, UnsafeTopic."""
        if self._topic in Topics(self._kafka).partitions():
            return
        log.warning("topic with definitions and wishes is missing, creating it", topic=self._topic)
        own_topics.ensure(
            self._kafka, {self._topic: own_topics.CONTROL},
            replication_factor=self._replication_factor, min_insync_replicas=self._min_insync_replicas,
        )  # fmt: skip

    async def store(self, name: str, epoch: int, mark: CoverageMark) -> None:
        """Store the mark of an epoch. Raises Unavailable."""
        await self.off_loop(self._topics.say_covered, name, epoch, mark)

    async def decide_access(self) -> None:
        """Store the decisions about diverts with a user that have changed since the last read. Raises Unavailable."""
        if self._users is None:
            return
        defined = {name: divert.user for name, (_, divert) in self._diverts.items() if divert.user is not None}
        # Not on the event loop: a pattern is compared with each [[permission]], word by word.
        changes = await self.off_loop(self._users.changes, defined, self._access)
        for name, said in changes.items():
            await self.off_loop(self._topics.say_access, name, said)
            if said is not None:
                self._users.record(name, said, self._access.get(name))

    async def close(self) -> None:
        """Free the clients. Without Kafka, a client waits for the records in flight, and this does not wait for the client."""
        self.cancel_spawned()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.off_loop(self._topics.close)), CLOSE_S)


class _FollowedDivert(NamedTuple):
    """What is made of a definition; ``user`` is None if the divert acts as the owner of the broker, or cannot be read."""

    covered: CoveredDivert
    user: DivertUser | None = None


def _divert_of(name: str, definition: PipelineDefinition | None) -> _FollowedDivert:
    if definition is None:
        return _FollowedDivert(CoveredDivert("", 0, ALL_ADDRESSES))
    try:
        divert = Divert.model_validate({**definition.settings, "name": name})
    except ValidationError:
        return _FollowedDivert(CoveredDivert(definition.id, definition.revision, ALL_ADDRESSES))
    return _FollowedDivert(CoveredDivert(definition.id, definition.revision, divert.from_address), user_of(divert))
