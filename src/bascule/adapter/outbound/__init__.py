"""Outgoing connections to Kafka and to a JMS broker: named connection factories with pooled connections."""

from bascule.adapter.outbound.broker import JmsConnectionFactory
from bascule.adapter.outbound.factory import CommitInDoubt, KafkaConnection, KafkaConnectionFactory, KafkaTransactions, XaSends
from bascule.adapter.outbound.pool import LeaseInfo, PoolClosed, PoolExhausted, PoolLimits
from bascule.adapter.outbound.registry import Registry, bind, lookup, unbind

__all__ = [
    "CommitInDoubt",
    "JmsConnectionFactory",
    "KafkaConnection",
    "KafkaConnectionFactory",
    "KafkaTransactions",
    "LeaseInfo",
    "PoolClosed",
    "PoolExhausted",
    "PoolLimits",
    "Registry",
    "XaSends",
    "bind",
    "lookup",
    "unbind",
]
