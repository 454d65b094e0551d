"""The plan of a large commit: its decisions, worked out in short turns. The commit itself is then one short turn."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice

from bascule.broker.leaving import Ack, collect, count
from bascule.broker.planned_sends import PIECE_STEPS, PlannedSends
from bascule.broker.queue import BrokerQueue
from bascule.broker.sending import Sending
from bascule.broker.transactions import Draft

#: Acknowledgements that are planned in one step.
ACKS_PER_STEP = 2


class CommitPlan(PlannedSends[Draft]):
    """The plan of the messages and acknowledgements of one commit."""

    __slots__ = ("_remaining", "acks", "entry", "gone", "held")

    def __init__(self, sending: Sending, drafts: Iterable[Draft], acks: Iterable[Ack], size_bytes: int, now_ms: int) -> None:
        """Begin a plan. ``now_ms`` is the time of the messages in the journal; ``size_bytes`` is the approximate memory of the plan."""
        self._remaining = iter(acks)
        self.acks: list[Ack] = []
        self.gone: dict[BrokerQueue, list[int]] = {}  # mids of journaled messages that are acknowledged
        self.held: dict[BrokerQueue, list[int]] = {}  # number and bytes of the acknowledged messages
        self.entry = b""  # journal entry of the branch that is committed, or empty
        super().__init__(sending, sending.plan_ahead, drafts, size_bytes, now_ms, admits=True)

    def _work_out(self, items: Iterable[Draft]) -> Generator[int, None, None]:
        yield from super()._work_out(items)
        while piece := list(islice(self._remaining, PIECE_STEPS * ACKS_PER_STEP)):
            self.acks += piece
            collect(piece, self.gone)
            count(piece, self.held)
            yield PIECE_STEPS
