"""The plan of a large commit: its decisions, worked out in short turns. The commit itself is then one short turn.

Making a plan changes nothing else. The plan of a message depends on the bindings of its address. If these have changed, the commit plans
the message again. Only the commit itself finds out whether a message is a duplicate.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice
from typing import Final

from bascule.broker.leaving import Ack, collect, count
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.memory import MemoryAccount
from bascule.broker.plans import PlanInTurns
from bascule.broker.queue import BrokerQueue
from bascule.broker.sending import Sending, SendPlan
from bascule.broker.transactions import Draft

#: Steps to plan a message, besides those of its route.
SEND_STEPS: Final = 4
#: Acknowledgements that are planned in one step.
ACKS_PER_STEP = 2
PIECE_STEPS = 200


class CommitPlan(PlanInTurns):
    """The plan of the messages and acknowledgements of one commit."""

    __slots__ = ("acks", "drafts", "entry", "gone", "held", "now_ms", "sends")

    def __init__(
        self, sending: Sending, drafts: Iterable[Draft], acks: Iterable[Ack], account: MemoryAccount, size_bytes: int, now_ms: int
    ) -> None:
        """Begin a plan. ``now_ms`` is the time of the messages in the journal; ``size_bytes`` is the approximate memory of the plan."""
        self.drafts: list[Draft] = []
        self.sends: list[SendPlan | None] = []  # of the drafts; None if the commit must create the queue first
        self.acks: list[Ack] = []
        self.gone: dict[BrokerQueue, list[int]] = {}  # mids of journaled messages that are acknowledged
        self.held: dict[BrokerQueue, list[int]] = {}  # number and bytes of the acknowledged messages
        self.now_ms = now_ms
        self.entry = b""  # journal entry of the branch that is committed, or empty
        super().__init__(self._work_out(sending, drafts, acks), account, size_bytes)

    def _work_out(self, sending: Sending, drafts: Iterable[Draft], acks: Iterable[Ack]) -> Generator[int, None, None]:
        steps = 0
        for draft in drafts:
            plan = sending.plan_ahead(draft, self.now_ms)
            self.drafts.append(draft)
            self.sends.append(plan)
            steps += SEND_STEPS
            if plan is not None:
                route = plan[0]
                steps += route.steps + len(route.exclusive) * EVALUATION_STEPS
            if steps >= PIECE_STEPS:
                yield steps
                steps = 0
        yield steps
        remaining = iter(acks)
        while piece := list(islice(remaining, PIECE_STEPS * ACKS_PER_STEP)):
            self.acks += piece
            collect(piece, self.gone)
            count(piece, self.held)
            yield PIECE_STEPS
