"""The link by which a session begins and ends its transactions (AMQP 1.0 part 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bascule.amqp.errors import AmqpError
from bascule.amqp.link import Link
from bascule.amqp.performatives import Coordinator, Declare, Discharge, Source
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Symbol
from bascule.client.links import OUTCOMES, ClientLink

if TYPE_CHECKING:
    from bascule.client.session_links import SessionLinks


class Control:
    """A declare or discharge on its way. ``lost``: the connection went before its answer."""

    def __init__(self) -> None:
        self.outcome: Any = None
        self.lost = False

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.outcome is not None or self.lost

    def answered(self, state: Any) -> None:
        """The broker's outcome."""
        self.outcome = state


class CoordinatorState(ClientLink):
    """The link that controls a session's transactions (AMQP 1.0 part 4)."""

    def __init__(self, session: SessionLinks, name: str) -> None:
        super().__init__(session, name)
        self._waiting: list[Control] = []

    def _make(self) -> Link:
        target = Coordinator(capabilities=(Symbol("amqp:local-transactions"),))
        return self.session.engine.attach_sender(self.name, Source(address=self.name, outcomes=OUTCOMES), target)

    @property
    def usable(self) -> bool:
        """Whether it may send now."""
        return self.attached and self.link.credit > 0

    def send(self, control: Declare | Discharge) -> Control:
        """Send one. Acknowledgements that belong to the transaction go before it."""
        self.session.engine.flush_settled()
        waiting = Control()
        self._waiting = [each for each in self._waiting if not each.done]
        self._waiting.append(waiting)
        self.link.send(encode_control(control), context=waiting)
        return waiting

    def detached(self, error: AmqpError | None) -> None:
        """What it controlled is rolled back."""
        super().detached(error)
        self._lose()

    def lost(self) -> None:
        """Answers will not come."""
        super().lost()
        self._lose()

    def _lose(self) -> None:
        for each in self._waiting:
            each.lost = each.outcome is None
        self._waiting.clear()
