"""Messages out to Kafka: connection factories with a name, pooled connections, a Kafka and a JMS face."""

from bascule.adapter.outbound.factory import CommitInDoubt, KafkaConnection, KafkaConnectionFactory, KafkaTransactions, XaSends
from bascule.adapter.outbound.pool import LeaseInfo, PoolClosed, PoolExhausted, PoolLimits
from bascule.adapter.outbound.registry import Registry, bind, lookup, unbind

__all__ = [
    "CommitInDoubt",
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
