"""Coverage of diverts that are defined at run time: performs the effects of :mod:`bascule.broker.coverage`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from pydantic import ValidationError

from bascule.broker.coverage import ControlledDiverts, CoverageMark, CoveredDivert
from bascule.config.pipeline import Divert
from bascule.core.topics import JournalTopics
from bascule.kafka.control import ControlTopics
from bascule.server.effects import LoopEffects
from bascule.writer.control import DivertCovered, PipelineDefinition

#: How long the broker waits for Kafka to answer a read of the definitions, in seconds.
READ_TIMEOUT_S: Final = 10.0
#: How long the end of an epoch waits for the clients to close, in seconds.
CLOSE_S: Final = 2.0
#: The addresses of a divert whose definition this version cannot read: no message for it may be missing later.
ALL_ADDRESSES: Final = "#"


class CoverageControl(LoopEffects):
    """The topic with the definitions, for one epoch."""

    def __init__(self, kafka: Mapping[str, Any], topics: JournalTopics) -> None:
        super().__init__("divert-coverage")
        self._topics = ControlTopics(kafka, topics)
        self._sure = False

    async def controlled(self) -> ControlledDiverts:
        """Return the definitions and marks. Raises Unavailable."""
        # A new reader, also after an error, could find a former leader; later reads never go back.
        sure, self._sure = self._sure, False
        definitions, covered = await self.off_loop(lambda: self._topics.divert_definitions(READ_TIMEOUT_S, decides=not sure))
        self._sure = True
        return ControlledDiverts(
            {name: _divert_of(name, definition) for name, definition in definitions.items()},
            {name: [CoverageMark(each.id, each.revision, each.offset) for each in found] for name, found in covered.items()},
        )

    async def store(self, name: str, epoch: int, mark: CoverageMark) -> None:
        """Store the mark of an epoch. Raises Unavailable."""
        await self.off_loop(self._topics.say_covered, name, epoch, DivertCovered(mark.definition, mark.revision, mark.offset))

    async def close(self) -> None:
        """Free the clients. Without Kafka, a client waits for the records in flight, and this does not wait for the client."""
        self.cancel_spawned()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.off_loop(self._topics.close)), CLOSE_S)


def _divert_of(name: str, definition: PipelineDefinition | None) -> CoveredDivert:
    if definition is None:
        return CoveredDivert("", 0, ALL_ADDRESSES)
    try:
        pattern = Divert.model_validate({**definition.settings, "name": name}).from_address
    except ValidationError:
        pattern = ALL_ADDRESSES
    return CoveredDivert(definition.id, definition.revision, pattern)
