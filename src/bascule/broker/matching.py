"""Matching of messages with selectors."""

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

#: Steps to read the values that a selector needs from a message, besides the steps of the selector itself.
EVALUATION_STEPS: Final = 10


def wants(selector: Selector, body: bytes) -> bool:
    """Return True if a selector matches an encoded message. The result is False if the properties of the message cannot be read."""
    return wants_what(selector, selector_lookup(body))


def wants_what(selector: Selector, lookup: MessageLookup) -> bool:
    """Return True if a selector matches a message, as ``wants`` does. Several selectors can share the lookup."""
    try:
        return selector.matches(lookup)
    except BasculeError:
        return False


class Matching:
    """Matching for consumers and subscriptions. An error of one selector does not affect the others."""

    def __init__(self, bodies: Bodies, errors: ErrorContainment) -> None:
        self._bodies = bodies
        self._errors = errors

    def matches(self, selector: Selector, message: BrokerMessage, allowance: Allowance) -> bool:
        """Return True if a selector matches a message. The cost in steps is subtracted from ``allowance``."""
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
        """Return True if a subscription takes a message of the connection ``container``; False if its selector fails."""
        try:
            return queue.wants(container, lookup)
        except Exception as error:
            self._errors.contain(ErrorKind.SELECTOR, error, queue=queue.name)
            return False
