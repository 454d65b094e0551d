"""Whether a selector wants a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.message import Bodies, BrokerMessage
from bascule.broker.turns import Allowance
from bascule.core.errors import BasculeError
from bascule.jms.lookup import MessageLookup, selector_lookup
from bascule.jms.selector import Selector

if TYPE_CHECKING:
    from bascule.broker.queue import BrokerQueue

#: Steps of reading what a selector asks for out of a message, beside those of the selector itself.
EVALUATION_STEPS: Final = 10


def wants(selector: Selector, body: bytes) -> bool:
    """Whether it is true of an encoded message. Of one whose properties cannot be read it is unknown, hence not true."""
    return wants_what(selector, selector_lookup(body))


def wants_what(selector: Selector, lookup: MessageLookup) -> bool:
    """The same of a message of which several selectors ask."""
    try:
        return selector.matches(lookup)
    except BasculeError:
        return False


class Matching:
    """Asks selectors of consumers and subscriptions about messages; an error of one concerns no other."""

    def __init__(self, bodies: Bodies, errors: ErrorContainment) -> None:
        self._bodies = bodies
        self._errors = errors

    def matches(self, selector: Selector, message: BrokerMessage, allowance: Allowance) -> bool:
        """Whether a selector wants a message. What that costs is taken from ``allowance``."""
        allowance.left -= EVALUATION_STEPS + selector.steps + self._bodies.read_steps(message)
        try:
            lookup = selector_lookup(self._bodies.read(message))
            wanted = wants_what(selector, lookup)
        except Exception as error:
            self._errors.contain(ErrorKind.SELECTOR, error, selector=selector.text, mid=message.mid)
            return False
        allowance.left -= lookup.steps
        return wanted

    def wants(self, queue: BrokerQueue, container: str, lookup: MessageLookup) -> bool:
        """Whether a subscription takes a message that a container sent. Not where its selector fails."""
        try:
            return queue.wants(container, lookup)
        except Exception as error:
            self._errors.contain(ErrorKind.SELECTOR, error, queue=queue.name)
            return False
