"""The calls on a decision log by the protocol that ships, for the simulated logs, which differ in how a record reaches the topic."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

from bascule.xa import log_topic
from bascule.xa.log import Decision, Heuristic, LogState
from bascule.xa.log_topic import TopicCalls
from bascule.xa.xid import Xid


class TopicDecisions(TopicCalls):
    """A ``bascule.xa.effects.Decisions`` over the calls on a topic that a subclass makes."""

    _violations: Collection[StrEnum]

    async def decide(self, decision: Decision) -> Decision:
        """See Decisions."""
        return await log_topic.decide(self, decision, violations=self._violations)

    async def read(self) -> LogState:
        """See Decisions."""
        return await log_topic.read(self, violations=self._violations)

    async def record(self, heuristic: Heuristic) -> None:
        """See Decisions."""
        await log_topic.store_heuristic(self, heuristic)

    async def forget(self, gtrids: Iterable[bytes]) -> None:
        """See Decisions."""
        log_topic.forget(self, gtrids)

    async def forget_heuristic(self, xid: Xid) -> None:
        """See Decisions."""
        log_topic.forget_heuristic(self, xid)
