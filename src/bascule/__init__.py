"""Bascule: a JMS broker whose journal is Kafka and whose bridge to Kafka is Spark; and JMS and XA transactions for Python.

The names in ``__all__`` are the public API that needs no extra (docs/reference/api.md). Each is imported when it is first used, so
``import bascule`` loads nothing else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.client import (
        Acknowledge,
        AsyncConsumer,
        AsyncContext,
        AsyncProducer,
        Byte,
        Char,
        ConnectionFactory,
        ConnectionLost,
        Consumer,
        Context,
        Destination,
        Float,
        IllegalState,
        Int,
        InvalidClientId,
        InvalidDestination,
        InvalidSelector,
        Long,
        Message,
        MessageRefused,
        Producer,
        Queue,
        Refused,
        SecurityDenied,
        Short,
        TemporaryQueue,
        TemporaryTopic,
        TimedOut,
        Topic,
        connect,
        connect_async,
    )
    from bascule.core.errors import (
        BasculeError,
        InvalidInput,
        TransactionError,
        TransactionInDoubt,
        TransactionRolledBack,
        TransactionTimedOut,
        Unavailable,
    )
    from bascule.core.extras import MissingExtra
    from bascule.xa import (
        CommitPriority,
        FileLog,
        HeuristicOutcome,
        Propagation,
        Resource,
        Transaction,
        TransactionFinding,
        TransactionManager,
        TransactionReport,
        Vote,
        Xid,
    )
    from bascule.xa.aio import AsyncTransaction, AsyncTransactionManager
    from bascule.xa.jms import JmsResource
    from bascule.xa.local_database import LocalDatabaseResource

__version__ = "0.1.0"

__all__ = [
    "Acknowledge",
    "AsyncConsumer",
    "AsyncContext",
    "AsyncProducer",
    "AsyncTransaction",
    "AsyncTransactionManager",
    "BasculeError",
    "Byte",
    "Char",
    "CommitPriority",
    "ConnectionFactory",
    "ConnectionLost",
    "Consumer",
    "Context",
    "Destination",
    "FileLog",
    "Float",
    "HeuristicOutcome",
    "IllegalState",
    "Int",
    "InvalidClientId",
    "InvalidDestination",
    "InvalidInput",
    "InvalidSelector",
    "JmsResource",
    "LocalDatabaseResource",
    "Long",
    "Message",
    "MessageRefused",
    "MissingExtra",
    "Producer",
    "Propagation",
    "Queue",
    "Refused",
    "Resource",
    "SecurityDenied",
    "Short",
    "TemporaryQueue",
    "TemporaryTopic",
    "TimedOut",
    "Topic",
    "Transaction",
    "TransactionError",
    "TransactionFinding",
    "TransactionInDoubt",
    "TransactionManager",
    "TransactionReport",
    "TransactionRolledBack",
    "TransactionTimedOut",
    "Unavailable",
    "Vote",
    "Xid",
    "__version__",
    "connect",
    "connect_async",
]

#: The module that exports each name: ``bascule.client``, unless another one is named.
_HOMES = {
    **{name: "bascule.client" for name in __all__ if name != "__version__"},
    **dict.fromkeys(
        (
            "BasculeError", "InvalidInput", "TransactionError", "TransactionInDoubt", "TransactionRolledBack", "TransactionTimedOut",
            "Unavailable",
        ),
        "bascule.core.errors",
    ),
    "MissingExtra": "bascule.core.extras",
    **dict.fromkeys(
        (
            "CommitPriority", "FileLog", "HeuristicOutcome", "Propagation", "Resource", "Transaction", "TransactionFinding",
            "TransactionManager", "TransactionReport", "Vote", "Xid",
        ),
        "bascule.xa",
    ),
    **dict.fromkeys(("AsyncTransaction", "AsyncTransactionManager"), "bascule.xa.aio"),
    "JmsResource": "bascule.xa.jms",
    "LocalDatabaseResource": "bascule.xa.local_database",
}  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name):
        """Import a name of the public API when it is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found

    def __dir__():
        """Return the names of the public API, those that are not loaded yet included."""
        return sorted(__all__)
