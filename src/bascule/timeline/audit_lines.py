"""Reads the audit topic for events that concern a message: sends, deliveries, and actions of administrators on its queues."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from bascule.core.errors import BasculeError
from bascule.kafka.admin import Topics
from bascule.kafka.history import READ_TIMEOUT_S, TopicHistory, content_of, known_offset
from bascule.timeline.budget import SearchBudget
from bascule.timeline.facts import LifeEvent, What
from bascule.timeline.wanted import WantedId

#: Lines of one partition that a search reads.
AUDIT_LINES_MAX: Final = 2_000_000
#: Events that a search returns.
AUDIT_EVENTS_MAX: Final = 1_000
#: Actions of administrators that remove messages from a queue, or put some back.
ACTIONS: Final = frozenset({"queues/purge", "queues/move", "queues/delete", "dead-letters/return", "subscriptions/delete"})
#: Names of the audit's actions for messages of clients.
SEND, RECEIVE = "send", "receive"
_WHO: Final = {SEND: "by", RECEIVE: "to"}


class AuditSearch:
    """Searches the lines since a time, and then those that are appended. ``gaps`` says what was not read, and why."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, lines_max: int = AUDIT_LINES_MAX, budget: SearchBudget | None = None) -> None:
        self._kafka = kafka
        self._budget = budget or SearchBudget()
        self._topic = topic
        self._lines_max = lines_max
        self._next: dict[int, int] = {}  # offset to continue at, by partition
        self._left = lines_max
        self._found: list[LifeEvent] = []
        self.gaps: list[str] = []
        self._more = 0  # events that are not kept
        #: Whether the audit recorded messages when a message with the id was sent: one of the lines is its send.
        self.has_send = False

    def events(self, wanted: WantedId, queues: Collection[str], from_ms: int, to_ms: int | None) -> list[LifeEvent]:
        """Return the events about messages with an id, and about queues, in the order of their times; a later call reads only new lines."""
        found, self.gaps = self._found, []
        try:
            partitions = Topics(self._kafka).partitions().get(self._topic, 0)
            if not partitions:
                self.gaps.append(f"audit topic {self._topic!r} does not exist")
            for partition in range(partitions):
                if why := self._budget.spent:
                    self.gaps.append(f"audit topic {self._topic!r} was not read from partition {partition} on: {why}")
                    break
                for event in self._of_partition(partition, wanted, queues, from_ms, to_ms):
                    if len(found) < AUDIT_EVENTS_MAX:
                        found.append(event)
                    else:
                        self._more += 1
        except BasculeError as error:
            self.gaps.append(f"audit topic {self._topic!r} cannot be read: {error}")
        found.sort(key=lambda event: event.time_ms)
        if self._more:
            self.gaps.append(f"{self._more} more events of the audit about the message and its queues are not shown")
        return list(found)

    def _of_partition(
        self, partition: int, wanted: WantedId, queues: Collection[str], from_ms: int, to_ms: int | None
    ) -> Iterator[LifeEvent]:
        history = TopicHistory(self._kafka, self._topic, partition, self._budget.timeout_s(READ_TIMEOUT_S))
        known = self._next.get(partition)
        start, end = max(history.earliest(), history.at_time(from_ms) if known is None else known), history.stable()
        if end < history.latest():
            self.gaps.append(f"an open transaction hides the end of audit topic {self._topic!r}, partition {partition}")
        if to_ms is not None:
            end = min(end, history.at_time(to_ms))
        if end - start > self._left:
            self.gaps.append(
                f"audit topic {self._topic!r}, partition {partition}, was read up to offset {start + self._left} only, of {end}"
            )
            end = start + self._left
        self._left -= max(0, end - start)
        self._next[partition] = start
        for record in history.records(start, end, committed=True):
            if why := self._budget.spent:
                at = f"audit topic {self._topic!r}, partition {partition}"
                self.gaps.append(f"{at}, was read up to offset {known_offset(record)} only, of {end}: {why}")
                return
            line = content_of(record)[1] or b""
            self._budget.take(len(line))
            self._next[partition] = known_offset(record) + 1
            event = self._event(line, wanted, queues)
            if event is not None:
                yield event
        self._next[partition] = max(start, end)

    def _event(self, line: bytes, wanted: WantedId, queues: Collection[str]) -> LifeEvent | None:
        """Return the event of a line; None if it concerns something else, or is none of the audit."""
        try:
            said = json.loads(line)
            action, on = str(said["action"]), str(said["on"])
            time_ms = int(datetime.fromisoformat(said["time"]).timestamp() * 1000)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        who = f"{said.get('who') or 'a client without login'} from {said.get('from', '')}"
        if action in (SEND, RECEIVE) and "message_id" in said:
            message_id = str(said["message_id"])
            if not wanted.is_written(message_id):
                return None
            self.has_send |= action == SEND
            as_id = "" if wanted.names_one else f"; as {message_id}"
            return LifeEvent(
                time_ms, -1, What.SENT if action == SEND else What.RECEIVED, detail=f"{on}, {_WHO[action]} {who}{_remarks(said)}{as_id}"
            )
        if action in ACTIONS and said.get("allowed") and (on in queues or not on):
            on = on or "the default dead-letter queue"
            detail = f"{action} on {on}, by {who}{_chosen(said)}: {said.get('result', '')}"
            return LifeEvent(time_ms, -1, What.ADMINISTERED, detail=detail)
        return None


def _chosen(said: Mapping[str, Any]) -> str:
    """Return a remark if an action was for some messages of the queue only."""
    try:
        arguments = json.loads(said.get("arguments", "{}"))
        some = any(arguments.get(name) for name in ("selector", "ids"))
    except (ValueError, TypeError, AttributeError, RecursionError):
        some = True  # cut, or of another version
    return ", for some messages only" if some else ""


def _remarks(said: Mapping[str, Any]) -> str:
    remarks = []
    if not said.get("allowed", True):
        remarks.append(f"refused: {said.get('result', '')}")
    if said.get("transacted"):
        remarks.append("in a transaction, whose outcome the audit does not record")
    if said.get("redelivered"):
        remarks.append("redelivered")
    return "".join(f"; {each}" for each in remarks)
