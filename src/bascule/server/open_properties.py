"""The properties of the broker's open frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import bascule
from bascule.amqp.types import Symbol

#: The capability with which a client asks to be the only one with its container id. JMS clients do.
SOLE_CONNECTION: Final = "sole-connection-for-container"
CAPABILITIES: Final = (SOLE_CONNECTION, "ANONYMOUS-RELAY", "DELAYED_DELIVERY", "SHARED-SUBS")


def open_properties(failover: Iterable[Mapping[str, Any]]) -> dict[Any, Any]:
    """Return the properties of the broker's open frame. ``failover`` has the addresses of the broker and its standbys."""
    properties: dict[Any, Any] = {
        Symbol("product"): "Bascule", Symbol("version"): bascule.__version__, Symbol("platform"): "Python",
    }  # fmt: skip
    # The keys must be symbols: the Java client does not find string keys.
    if offered := [{Symbol(field): value for field, value in other.items()} for other in failover]:
        properties[Symbol("failover-server-list")] = offered
    return properties
