"""Names of subscriptions: of the queue that holds the messages of a subscription, and of the client whose subscription it is."""

from __future__ import annotations

import re
from typing import Final

#: Link names of shared subscriptions carry a suffix: "name|2" for the second consumer, "name|global", "name|volatile3".
NAME_DELIMITER: Final = "|"


def subscription_queue(owner: str | None, name: str, *, durable: bool) -> str:
    """Return the name of the queue of a subscription: ``CLIENT.NAME``, or ``NAME`` for a global subscription.

    The names are unique: the first unescaped dot ends the client id, and the delimiter behind it ends the name, which contains none.
    """
    queue = _escaped(name) if owner is None else f"{_escaped(owner)}.{name}"
    return queue if durable else f"{queue}{NAME_DELIMITER}volatile"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace(".", r"\.")


def owner_of(queue: str, name: str) -> str | None:
    """Return the client id of the subscription ``name`` with this queue, None for a global subscription: undoes ``subscription_queue``.

    An earlier version of the broker escaped no dots, and stored the name of the queue as the subscription's name: its client id is unknown,
    and the subscription counts as global.
    """
    if queue in (name, _escaped(name)) or not queue.endswith(f".{name}"):
        return None
    return re.sub(r"\\(.)", r"\1", queue.removesuffix(f".{name}"))
