"""Delivery of Kafka records to endpoints: at least once, or each record in its own transaction.

The names below are imported when they are first used, so that the protocol modules of this package load no Kafka client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bascule.adapter.inbound.activation import Activation, ActivationStatus
    from bascule.adapter.inbound.adapter import ResourceAdapter
    from bascule.adapter.inbound.log import InboundLog
    from bascule.adapter.inbound.record import Record
    from bascule.adapter.inbound.spec import ActivationSpec, Backoff, Order, Start, Xa
    from bascule.adapter.inbound.worker_pool import PoolStatus, WorkerPool

__all__ = [
    "Activation",
    "ActivationSpec",
    "ActivationStatus",
    "Backoff",
    "InboundLog",
    "Order",
    "PoolStatus",
    "Record",
    "ResourceAdapter",
    "Start",
    "WorkerPool",
    "Xa",
]

_HOMES = {
    "Activation": "activation",
    "ActivationSpec": "spec",
    "Backoff": "spec",
    "InboundLog": "log",
    "Order": "spec",
    "PoolStatus": "worker_pool",
    "Record": "record",
    "ResourceAdapter": "adapter",
    "Start": "spec",
    "ActivationStatus": "activation",
    "WorkerPool": "worker_pool",
    "Xa": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
