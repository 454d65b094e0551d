"""The error classes. Each class defines what its errors mean to the caller, the peer, the operator and the process.

A class attribute holds each answer, so no caller chooses an answer by the type of the error. A subclass inherits the answers of its base.
Each direct subclass of BasculeError sets ``retriable`` and ``scope`` itself. A class name occurs once in the product: it identifies the
class where an error is sent as text or data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from bascule.core.xa_codes import Code


class Scope(enum.IntEnum):
    """What ends because of an error, from the smallest to the largest."""

    #: The operation that raises the error, and nothing else.
    OPERATION = 0
    #: The AMQP link on which the error occurs, or the queue, consumer or reader behind it.
    LINK = 1
    SESSION = 2
    CONNECTION = 3
    #: The divert or ingress that raises the error; the other pipelines of the driver continue.
    PIPELINE = 4
    #: The broker's epoch: the broker closes its connections, and the next epoch loads its state from the journal.
    EPOCH = 5
    #: The process: nothing that it does from now on can be trusted, or it cannot start.
    PROCESS = 6


class BasculeError(Exception):
    """The base class of every error that Bascule raises on purpose.

    An instance may replace an answer of its class, for example with the condition that a peer has sent.
    """

    #: Whether the same call may succeed later without a change by the caller.
    retriable: bool = False
    #: What ends. The broker reads it in two places: ``ClientConnection`` for errors of a client's frames, ``NodeProtocol`` for epochs.
    scope: Scope = Scope.OPERATION
    #: The AMQP error condition that a peer receives (AMQP 1.0 part 2, section 2.8.14).
    condition: str = "amqp:internal-error"
    #: The answer to a call on a transaction branch that fails with this error.
    xa_code: Code = Code.XAER_RMERR
    #: The answer to a call on a transaction branch that this error has rolled back.
    xa_rollback_code: Code = Code.XA_RBROLLBACK
    #: The status of an HTTP response, and of a response of the AMQP management node.
    http_status: int = 500
    #: The exit code of a command that ends with this error.
    exit_code: int = 1


class InvalidInput(BasculeError):
    """An input of a user or a peer cannot be used. The text names the input and its place, and says what is expected."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:invalid-field"
    xa_code = Code.XAER_INVAL
    http_status = 400
    exit_code = 2


class Unavailable(BasculeError):
    """A service or file that Bascule needs (Kafka, a JDK, a port) is missing or does not answer."""

    retriable = True
    scope = Scope.OPERATION
    condition = "amqp:connection:forced"
    xa_code = Code.XAER_RMFAIL
    xa_rollback_code = Code.XA_RBTRANSIENT
    http_status = 503
    exit_code = 3


class BadRecord(BasculeError):
    """A message or Kafka record cannot be converted; the text says why."""

    retriable = False
    scope = Scope.PIPELINE


class TooLarge(InvalidInput, Unavailable):
    """A record is larger than its topic or the client accepts. It is not stored, and a retry would fail in the same way."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:link:message-size-exceeded"
    http_status = 413


class TopicMissing(InvalidInput):
    """``topic`` does not exist and must."""

    scope = Scope.PIPELINE
    http_status = 404

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic!r} {reason}")
        self.topic = topic


class Denied(Unavailable):
    """Kafka does not let this client create ``topic``, or write to it."""

    http_status = 403

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic!r} {reason}")
        self.topic = topic


class TransactionError(BasculeError):
    """The base class of the errors that a transaction reports to its application.

    ``transaction_id`` names the transaction in logs and for ``bascule xa``; it is empty for a local transaction of a JMS session.
    ``cause`` is the error that ended the transaction, or None.
    """

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:transaction:rollback"
    http_status = 409

    def __init__(self, text: str, *, transaction_id: str = "", cause: BaseException | None = None) -> None:
        super().__init__(f"transaction {transaction_id} {text}" if transaction_id else text)
        self.transaction_id = transaction_id
        self.cause = cause


class TransactionRolledBack(TransactionError):
    """The transaction was rolled back: its sends are removed, its received messages are redelivered. The work can be repeated.

    The answers to peers are those of ``cause``: Qpid JMS reports a transaction in doubt when a commit is answered with
    ``amqp:transaction:rollback``.
    """

    retriable = True
    xa_code = Code.XA_RBROLLBACK

    def __init__(self, text: str, *, transaction_id: str = "", cause: BaseException | None = None) -> None:
        super().__init__(text, transaction_id=transaction_id, cause=cause)
        if isinstance(cause, BasculeError):
            self.condition = cause.condition
            self.http_status = cause.http_status
            self.xa_code = cause.xa_rollback_code


class TransactionTimedOut(TransactionRolledBack):
    """The transaction was rolled back because it took longer than its timeout."""

    condition = "amqp:transaction:timeout"
    xa_code = Code.XA_RBTIMEOUT
    xa_rollback_code = Code.XA_RBTIMEOUT


class TransactionInDoubt(TransactionError):
    """The outcome of the transaction is unknown: either all of it was committed or nothing.

    Do not repeat the work without looking at its results, or repeat it with ``_AMQ_DUPL_ID`` set on its messages. Recovery finishes a
    transaction of a transaction manager.
    """

    xa_code = Code.XAER_RMFAIL


def error_classes(root: type[BasculeError] = BasculeError) -> Iterator[type[BasculeError]]:
    """Yield all imported error classes below ``root``, each once, base classes first."""
    seen: set[type[BasculeError]] = set()
    waiting = [root]
    while waiting:
        each = waiting.pop(0)
        if each not in seen:
            seen.add(each)
            yield each
            waiting += each.__subclasses__()


#: Errors of these scopes are not answered by refusing a message or a link.
ENDS_MORE = frozenset({Scope.SESSION, Scope.CONNECTION, Scope.EPOCH, Scope.PROCESS})


def check_answerable(error: BasculeError) -> None:
    """Raise the error again if it ends more than a message or a link, which can be refused."""
    if error.scope in ENDS_MORE:
        raise error
