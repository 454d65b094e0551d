"""Answers what happened to a message: one pass over the journal, then the audit topic and the target topics. Blocking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from bascule.core.masking import PropertyMask
from bascule.pipelines.spec import PipelinesSpec
from bascule.timeline.audit_lines import AuditSearch
from bascule.timeline.budget import SearchBudget
from bascule.timeline.facts import LifeEvent, QueueName
from bascule.timeline.scan import JournalScan, ScanLimits
from bascule.timeline.story import MessageStory
from bascule.timeline.targets import FINAL_STATES, PARTITION_RECORDS_MAX, DivertOutcome, DivertState, TargetSearch
from bascule.timeline.wanted import WantedId

#: How long before and after the known life of a message its audit is read, in ms: a client's send precedes the journal record.
AUDIT_MARGIN_MS: Final = 60_000
#: Records of diverts, and statements why there is none, of all messages with the id.
OUTCOMES_MAX: Final = 2_000


class MessageQuestion:
    """One search for the messages with an id, which can be continued. Close it."""

    def __init__(
        self, pipelines: PipelinesSpec, message_id: str, limits: ScanLimits, *, names: Mapping[int, QueueName] | None = None,
        mask: PropertyMask | None = None, target_records_max: int | None = None, budget: SearchBudget | None = None,
    ) -> None:  # fmt: skip
        """``names`` are the queues of a running broker, None for those of its newest snapshot. Raises BasculeError."""
        wanted = WantedId(message_id)
        self._budget = budget or SearchBudget()
        self.scan = JournalScan(pipelines, wanted, limits, names, self._budget)
        self._pipelines = pipelines
        self._limits = limits
        self._mask = mask or PropertyMask()
        self._targets: TargetSearch | None = None
        self._target_records_max = target_records_max
        self._more_outcomes = 0  # messages whose diverts are not shown
        self._outcomes: dict[tuple[str, str], list[DivertOutcome]] = {}  # by message and divert
        self._audit_events: list[LifeEvent] = []
        self._audit: AuditSearch | None = None
        self._audited_queues: frozenset[str] = frozenset()

    def close(self) -> None:
        """Free the clients."""
        self.scan.close()
        if self._targets is not None:
            self._targets.close()

    def steps(self) -> Iterator[None]:
        """Read everything, step by step. Raises BasculeError."""
        if self.scan.first > 0:
            yield from self.scan.read_store()
        yield from self.scan.read()
        self.look_elsewhere()

    def read_on(self) -> bool:
        """Read on in the journal; return whether there was something. Raises BasculeError."""
        return self.scan.read_on()

    def look_elsewhere(self) -> None:
        """Look for the records of diverts, and for events in the audit topic."""
        self._look_at_targets()
        self._look_at_audit()

    def _look_at_targets(self) -> None:
        waiting = [message for message in self.scan.life.messages.values() if not self._is_diverted(message.identity, message.takers)]
        if not waiting:
            return
        if self._targets is None:
            limit = PARTITION_RECORDS_MAX if self._target_records_max is None else self._target_records_max
            # The text of an error may quote a property. If some are masked, only the kind of the error is shown.
            self._targets = TargetSearch(self._pipelines, limit, self._budget, errors=not self._mask)
        self._more_outcomes = 0
        for message in waiting:
            for name in message.takers:
                self._outcomes.pop((message.identity, name), None)
            if sum(map(len, self._outcomes.values())) >= OUTCOMES_MAX:
                self._more_outcomes += 1
                continue
            for outcome in self._targets.outcomes(message):
                self._outcomes.setdefault((message.identity, outcome.divert), []).append(outcome)

    def _is_diverted(self, identity: str, takers: tuple[str, ...]) -> bool:
        """Return whether nothing more can come of the diverts of a message."""
        return all(
            (found := self._outcomes.get((identity, name))) is not None and all(each.state in FINAL_STATES for each in found)
            for name in takers
        )

    def _look_at_audit(self) -> None:
        topic, life = self._pipelines.topics.audit_topic, self.scan.life
        if not topic:
            return
        times_ms = [event.time_ms for event in life.events]
        since_ms = self._limits.since_ms or 0
        from_ms = max(since_ms, min(times_ms) - AUDIT_MARGIN_MS, 0) if times_ms else since_ms
        to_ms = None if not times_ms or not life.ended else max(times_ms) + AUDIT_MARGIN_MS
        queues = frozenset(life.queue_name(stay.queue) for message in life.messages.values() for stay in message.stays.values())
        if self._audit is None or queues != self._audited_queues:  # lines about another queue may have been read already
            self._audit, self._audited_queues = AuditSearch(self._pipelines.kafka, topic, budget=self._budget), queues
        self._audit_events = self._audit.events(life.wanted, queues, from_ms, to_ms)

    def story(self) -> MessageStory:
        """Return what is known so far."""
        life, scan = self.scan.life, self.scan
        diverted = all(self._is_diverted(message.identity, message.takers) for message in life.messages.values())
        outcomes = [outcome for found in self._outcomes.values() for outcome in found]
        unread = [f"divert {each.divert!r}: {each.detail}" for each in outcomes if each.state is DivertState.UNKNOWN]
        if self._more_outcomes:
            unread.append(f"the diverts of {self._more_outcomes} messages are not shown")
        cut = [scan.cut] if scan.cut and not scan.complete else []
        audit_gaps = [] if self._audit is None else self._audit.gaps
        return MessageStory(
            life, self._pipelines.topics.journal, scan.first, scan.start, scan.position, self._mask, outcomes, self._audit_events,
            self._audit is not None and self._audit.has_send, [*scan.gaps, *cut, *audit_gaps, *unread], diverted, scan.complete,
        )  # fmt: skip
