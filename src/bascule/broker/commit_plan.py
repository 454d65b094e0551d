"""What a commit decides, worked out ahead in short turns: the commit itself is then one short turn, whatever it holds.

Nothing changes while a plan is made. A plan of a message rests on the bindings of its address: the commit makes it anew where these have
changed since. Whether a message repeats another one is asked by the commit alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final

from bascule.broker.leaving import Ack
from bascule.broker.queue import BrokerQueue
from bascule.broker.sending import Sending, SendPlan
from bascule.broker.transactions import Draft
from bascule.broker.turns import StepwiseWork, Work

#: Steps to plan a message, beside those of selectors; to put down an acknowledgement: so many for one step.
SEND_STEPS: Final = 4
ACKS_PER_STEP: Final = 2
PIECE_STEPS: Final = 200


class CommitPlan:
    """The messages and acknowledgements of one commit, which must not change while they are planned."""

    __slots__ = ("acks", "gone", "sends", "work")

    def __init__(self, sending: Sending, drafts: Iterable[Draft], acks: Iterable[Ack], now_ms: int) -> None:
        self.sends: list[tuple[Draft, SendPlan | None]] = []  # None where the commit itself has to plan
        self.acks: list[Ack] = []
        self.gone: dict[BrokerQueue, list[int]] = {}  # mids of journaled messages that are acknowledged
        self.work = StepwiseWork(chain(self._plan(sending, drafts, now_ms), self._collect(acks)))

    def _plan(self, sending: Sending, drafts: Iterable[Draft], now_ms: int) -> Work:
        steps = 0
        for draft in drafts:
            try:
                plan, cost = sending.plan_ahead(draft, now_ms)
            except Exception:
                plan, cost = None, 0  # the commit tries it itself, and is refused if that fails
            self.sends.append((draft, plan))
            steps += SEND_STEPS + cost
            if steps >= PIECE_STEPS:
                yield steps
                steps = 0
        yield steps

    def _collect(self, acks: Iterable[Ack]) -> Work:
        gone = self.gone
        for number, ack in enumerate(acks, 1):
            self.acks.append(ack)
            queue, message = ack
            if queue.durable and message.mid >= 0:
                mids = gone.get(queue)
                if mids is None:
                    gone[queue] = [message.mid]
                else:
                    mids.append(message.mid)
            if not number % (PIECE_STEPS * ACKS_PER_STEP):
                yield PIECE_STEPS
