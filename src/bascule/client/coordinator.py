"""The coordinator link of a session, which begins and ends its transactions (AMQP 1.0 part 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bascule.amqp.errors import AmqpError
from bascule.amqp.link import Link
from bascule.amqp.performatives import Coordinator, Declare, Declared, Discharge, Source
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Symbol
from bascule.client.links import OUTCOMES, ClientLink

if TYPE_CHECKING:
    from bascule.client.session_links import SessionLinks


class Control:
    """A declare or discharge without an answer yet. ``lost``: the connection was lost before the answer."""

    def __init__(self) -> None:
        self.outcome: Any = None
        self.lost = False

    @property
    def done(self) -> bool:
        """Whether there is an answer, or none can arrive."""
        return self.outcome is not None or self.lost

    def answered(self, state: Any) -> None:
        """Store the broker's outcome."""
        self.outcome = state


class CoordinatorState(ClientLink):
    """The link that controls a session's transactions (AMQP 1.0 part 4)."""

    def __init__(self, session: SessionLinks, name: str) -> None:
        super().__init__(session, name)
        self._waiting: list[Control] = []
        self._kept: list[Control] = []
        self._ahead: Control | None = None

    def _make(self) -> Link:
        target = Coordinator(capabilities=(Symbol("amqp:local-transactions"),))
        return self.session.engine.attach_sender(self.name, Source(address=self.name, outcomes=OUTCOMES), target)

    @property
    def usable(self) -> bool:
        """Whether the link can send now."""
        return self.attached and self.link.credit > 0

    def declare(self) -> Control:
        """Declare a transaction, or return the answer with a declared transaction that nobody has taken."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (not ahead.done or isinstance(ahead.outcome, Declared)):
            return ahead
        self._kept = [each for each in self._kept if not each.done or isinstance(each.outcome, Declared)]
        return self.take() or self.send(Declare())

    def declare_ahead(self) -> None:
        """Ask for the next transaction now, so that its first message need not wait for the answer."""
        if self._ahead is None and not self._kept:
            self._ahead = self.send(Declare())

    def keep(self, declare: Control) -> None:
        """Keep the answer of a declare whose caller has given up, so that the next caller uses its transaction."""
        self._kept.append(declare)

    def take(self) -> Control | None:
        """Return an answer with a declared transaction that nobody has taken, or None."""
        found = next((each for each in self._kept if isinstance(each.outcome, Declared)), None)
        if found is not None:
            self._kept.remove(found)
        return found

    @property
    def kept_one(self) -> bool:
        """Whether ``take`` returns an answer."""
        return any(isinstance(each.outcome, Declared) for each in self._kept)

    def send(self, control: Declare | Discharge) -> Control:
        """Send a declare or discharge, after the acknowledgements that belong to the transaction."""
        self.session.engine.flush_settled()
        waiting = Control()
        self._waiting = [each for each in self._waiting if not each.done]
        self._waiting.append(waiting)
        self.link.send(encode_control(control), context=waiting)
        return waiting

    def detached(self, error: AmqpError | None) -> None:
        """Mark the open requests as lost; the broker has rolled the transactions of the link back."""
        super().detached(error)
        self._lose()

    def lost(self) -> None:
        """Mark the open requests as lost."""
        super().lost()
        self._lose()

    def _lose(self) -> None:
        for each in self._waiting:
            each.lost = each.outcome is None
        self._waiting.clear()
