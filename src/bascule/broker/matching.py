"""Whether a selector wants a message."""

from __future__ import annotations

from typing import Final

from bascule.core.errors import BasculeError
from bascule.jms.lookup import selector_lookup
from bascule.jms.selector import Selector

#: Steps of reading what a selector asks for out of a message, beside those of the selector itself.
EVALUATION_STEPS: Final = 10


def wants(selector: Selector, body: bytes) -> bool:
    """Whether it is true of an encoded message. Of one whose properties cannot be read it is unknown, hence not true."""
    try:
        return selector.matches(selector_lookup(body))
    except BasculeError:
        return False
