"""The Bascule broker as a resource: JMS messages are sent and received in one transaction with databases and Kafka.

A branch works in a local transaction of the broker. ``prepare`` hands it over to the broker under the branch's xid, by a request to the
broker's management node. Afterwards any connection can end it, across restarts and takeovers of the broker.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from bascule.client import ConnectionFactory, ConnectionLost, Context, Long, Message, TransactionRolledBack
from bascule.client.async_branch import AsyncBranchContext
from bascule.client.async_managed import LentRunner
from bascule.client.branch import BranchContext, BranchSession, end_branch, ended
from bascule.client.temporary import TemporaryDestinations
from bascule.core.effects import run_blocking
from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.core.xid import Xid
from bascule.xa import broker_protocol
from bascule.xa.branches import BranchStates
from bascule.xa.broker_protocol import COMMITTED, ROLLED_BACK, AnswerLost, Reply
from bascule.xa.errors import XA_OK, XA_RDONLY, BranchRolledBack, ResourceError, ResourceFailed, XaError
from bascule.xa.forks import abandon, register_for_forks
from bascule.xa.resource import BranchState, Call, CommitPriority, Vote, beside_a_call

T = TypeVar("T")
#: Sessions kept between branches: as many as threads usually work at once.
IDLE_MAX = 8
#: Consumers that each session keeps.
CONSUMERS_MAX = 32
#: ``type`` of the requests.
TYPE = "bascule.xa"


class JmsResource:
    """A broker. The handle is a context of ``bascule.client`` that sends and receives; the manager commits and rolls back.

    Consumers are created once and kept for later branches. A consumer prefetches no message unless it has a ``prefetch``. Messages that
    were prefetched and not received go back at the end of the branch, so that an idle program withholds no messages from others.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        idle_max: int = IDLE_MAX,
        consumers_max: int = CONSUMERS_MAX,
        priority: int = CommitPriority.JMS,
        **options: Any,
    ) -> None:
        """Use ``url`` and ``options`` of ``bascule.client.ConnectionFactory``. Nothing is opened before it is needed.

        Up to ``idle_max`` sessions are kept between branches, each with up to ``consumers_max`` consumers. A kept consumer keeps its
        exclusive claims: message groups, an exclusive queue, a durable subscription. 0 closes them with their branch. See CommitPriority
        for ``priority``. Raises InvalidInput for ``on_exception``, because a resource has no exception listeners.
        """
        if options.get("on_exception") is not None:
            raise InvalidInput(
                "on_exception is not supported: contexts of a resource have no listeners, and each call raises its own errors"
            )
        self.name = name
        self.priority = priority
        self._factory = ConnectionFactory(url, **options)
        self._idle_max = idle_max
        self._consumers_max = consumers_max
        self._connection: Context | None = None
        self._idle: list[BranchSession] = []
        self._work: dict[Xid, tuple[BranchSession, BranchContext | AsyncBranchContext]] = {}
        #: Of branches that are not over, prepared ones included.
        self._temporary: dict[Xid, TemporaryDestinations] = {}
        self._branches = BranchStates()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._position: int | None = None
        self._failures = 0
        self._failure: BasculeError | None = None
        register_for_forks(self)

    def start(self, xid: Xid, *, timeout_s: float) -> BranchContext:  # noqa: ARG002 - the broker has its own: broker.transaction_timeout_s
        """See Resource. Use the handle in one thread at a time."""
        self._branches.check(xid, Call.START)
        with _translated():
            workplace = self._borrowed()
        temporary = TemporaryDestinations(workplace.thread)
        handle = BranchContext(workplace, temporary)
        with self._lock:
            self._work[xid] = workplace, handle
            self._temporary[xid] = temporary
        self._branches.move(xid, BranchState.ACTIVE)
        return handle

    def start_on_loop(self, xid: Xid, *, timeout_s: float, loop: asyncio.AbstractEventLoop) -> AsyncBranchContext:
        """See WorksOnLoop. The handle is a context of the asyncio interface of ``bascule.client``, for one task at a time."""
        self.start(xid, timeout_s=timeout_s)
        with self._lock:
            workplace, _ = self._work[xid]
            handle = AsyncBranchContext(workplace, self._temporary[xid], LentRunner(workplace.thread, loop))
            self._work[xid] = workplace, handle
        return handle

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        after = self._branches.check(xid, Call.END if success else Call.END_FAILED)
        with self._lock:
            workplace, handle = self._work[xid]
        if not end_branch(handle) and success:
            self._branches.move(xid, BranchState.FAILED)
            raise beside_a_call(xid)
        self._branches.move(xid, after)
        if success:
            with self._working(xid):
                workplace.end()

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        self._branches.check(xid, Call.PREPARE)
        with self._ending(xid):
            vote = run_blocking(broker_protocol.prepare(_Calls(self), xid))
        if vote is Vote.READ_ONLY:
            self._delete_temporary(xid)
        return vote

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        if one_phase or self._branches.state(xid) is not BranchState.NONE:
            self._branches.check(xid, Call.COMMIT_ONE_PHASE if one_phase else Call.COMMIT)
        if one_phase:
            with self._ending(xid):
                run_blocking(broker_protocol.commit_one_phase(_Calls(self), xid))
        else:
            run_blocking(broker_protocol.end(_Calls(self), xid, COMMITTED))
        self._delete_temporary(xid)

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        if self._branches.state(xid) is BranchState.NONE:
            run_blocking(broker_protocol.end(_Calls(self), xid, ROLLED_BACK))
            self._delete_temporary(xid)
            return
        with self._lock:
            workplace, handle = self._work[xid]
        if not end_branch(handle):
            # A thread is within a call, perhaps waiting for a message: it would get one of the next branch.
            self._over(xid, reusable=False)
            return
        try:
            workplace.rollback()
        except BasculeError:
            self._over(xid, reusable=False)  # the end of its sessions rolls it back
        else:
            self._over(xid)
            self._delete_temporary(xid)

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        return run_blocking(broker_protocol.recover(_Calls(self)))

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        run_blocking(broker_protocol.request(_Calls(self), "forget", xid))

    def context(self) -> Context:
        """Return a new context outside of transactions, on the connection of the branches. Raises Unavailable, Refused."""
        return self._made(lambda connection: connection.create_context())

    def close(self) -> None:
        """Close the connection. Branches that are not prepared are rolled back."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._temporary.clear()  # they end with the connection
            places, self._idle = [*self._idle, *(workplace for workplace, _ in self._work.values())], []
        for each in places:
            each.close()
        if connection is not None:
            _close(connection)

    def after_fork(self) -> None:
        """See Forks."""
        abandon(self._connection, self._idle, self._work, self._temporary, self._lock, self._connecting)
        self._connection, self._idle, self._work, self._temporary, self._branches = None, [], {}, {}, BranchStates()
        self._lock, self._connecting = threading.Lock(), threading.Lock()

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _ending(self, xid: Xid) -> Iterator[None]:
        """Make the last request of a branch: afterwards only the broker has the branch."""
        try:
            yield
        except BaseException:
            self._over(xid, reusable=False)
            raise
        self._over(xid)

    @contextmanager
    def _working(self, xid: Xid) -> Iterator[BranchSession]:
        """Yield the session of a branch. After a failure only the broker has the branch: rolled back, unless it is prepared."""
        with self._lock:
            workplace, _ = self._work[xid]
        try:
            with _translated():
                yield workplace
        except BaseException:
            self._over(xid, reusable=False)
            raise

    def _ask(self, request: Message) -> Reply:
        """Return the broker's answer. Raises AnswerLost, ResourceFailed, ResourceError."""
        with _translated():
            workplace = self._borrowed()
            try:
                answer = workplace.ask(request)
            except BaseException:
                workplace.close()
                raise
        self._take_back(workplace)
        return self._heard(answer)

    def _heard(self, answer: Message) -> Reply:
        reply = _reply(answer)
        if reply.position is not None:
            with self._lock:
                self._position = max(self._position or 0, reply.position)
        return reply

    def _hand_over(self, operation: str, xid: Xid, since: int | None) -> Reply | None:
        """Return the broker's answer to a request about the branch's own transaction, or None if the branch has not begun one."""
        prepares = operation == "prepare"  # a prepare can be undone; a commit in one phase waits until the broker has taken all messages
        with self._working(xid) as workplace:
            transaction = workplace.hand_over(answered=not prepares)
            if transaction is None or transaction.id is None:
                return None
            request = _request(operation, **_fields(xid), txnId=transaction.id.hex(), **_since(since))
            reply = self._heard(workplace.ask(request, begins_next=self._idle_max > 0))
            refused = workplace.refusal(transaction) if prepares else None
            if refused is None or not (reply.code in (XA_OK, XA_RDONLY) or broker_protocol.is_rolled_back(reply)):
                return reply
            if reply.code == XA_OK:
                broker_protocol.check_gone(self._heard(workplace.ask(_request("rollback", **_fields(xid)))), xid)
            raise TransactionRolledBack(f"the broker refused a message of the transaction: {refused}", cause=refused)

    def _over(self, xid: Xid, *, reusable: bool = True) -> None:
        self._branches.move(xid, BranchState.NONE)
        with self._lock:
            found = self._work.pop(xid, None)
        if found is None:
            return  # its request has failed
        workplace, _ = found
        if reusable:
            self._take_back(workplace)
        else:
            workplace.close()
            self._delete_temporary(xid)

    def _delete_temporary(self, xid: Xid) -> None:
        with self._lock:
            temporary = self._temporary.pop(xid, None)
        if temporary is not None:
            temporary.delete()

    def _borrowed(self) -> BranchSession:
        """Return an idle session, or a new one. Raises Unavailable, Refused."""
        while True:
            with self._lock:
                workplace = self._idle.pop() if self._idle else None
            if workplace is None:
                return self._another()
            try:
                workplace.check()
            except BasculeError:
                workplace.close()
            else:
                return workplace

    def _another(self) -> BranchSession:
        return self._made(lambda connection: BranchSession(connection, self._consumers_max))

    def _made(self, make: Callable[[Context], T]) -> T:
        """Return the result of ``make`` on the existing connection, or on a new one if that has ended."""
        connection = self._connection
        if connection is not None:
            try:
                return make(connection)
            except BasculeError:
                if not ended(connection):
                    raise  # the broker is unavailable, or takes no more sessions: others use this connection
                _close(connection)
        failures = self._failures
        with self._connecting:
            current = self._connection
            if current is None or current is connection:
                if self._failure is not None and self._failures > failures:
                    # Another thread's attempt, which this thread has waited for, has failed: do not wait as long again. Copy the exception:
                    # one object that several threads raise would collect the tracebacks of all.
                    raise type(self._failure)(*self._failure.args)
                current = self._connection = self._connect()
            return make(current)

    def _connect(self) -> Context:
        try:
            return self._factory.connect()
        except BasculeError as error:
            self._failure = error
            self._failures += 1
            raise

    def _take_back(self, workplace: BranchSession) -> None:
        with self._lock:
            if len(self._idle) < self._idle_max:
                self._idle.append(workplace)
                return
        workplace.close()


def _close(connection: Context) -> None:
    try:
        connection.close()
    except BasculeError:
        return  # it is closed because it is broken


@contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of the client as XaError within the block."""
    try:
        yield
    except XaError:
        raise
    except ConnectionLost as error:
        raise AnswerLost(str(error)) from error
    except TransactionRolledBack as error:
        raise BranchRolledBack(str(error), error.xa_code, cause=error) from error
    except Unavailable as error:
        raise ResourceFailed(str(error)) from error
    except BasculeError as error:
        raise ResourceError(str(error)) from error


def _request(operation: str, **properties: Any) -> Message:
    return Message(properties={"operation": operation, "type": TYPE, **properties})


def _fields(xid: Xid) -> dict[str, Any]:
    return {"formatId": xid.format_id, "gtrid": xid.gtrid.hex(), "bqual": xid.bqual.hex()}


def _since(position: int | None) -> dict[str, Any]:
    return {} if position is None else {"since": Long(position)}


def _reply(answer: Message) -> Reply:
    said = answer.properties
    text = answer.body if isinstance(answer.body, str) else ""
    description, outcome, position = str(said.get("statusDescription")), said.get("outcome", ""), said.get("position")
    return Reply(said.get("xaCode"), said.get("statusCode"), description, outcome, text, position)


class _Calls:
    """The effects of the protocol, performed by the calling thread."""

    def __init__(self, resource: JmsResource) -> None:
        self._resource = resource

    async def ask(self, operation: str, xid: Xid | None, since: int | None = None) -> Reply:
        """See BrokerCalls."""
        return self._resource._ask(_request(operation, **({} if xid is None else _fields(xid)), **_since(since)))

    async def hand_over(self, operation: str, xid: Xid, since: int | None = None) -> Reply | None:
        """See BrokerCalls."""
        return self._resource._hand_over(operation, xid, since)

    def position(self) -> int | None:
        """See BrokerCalls."""
        return self._resource._position

    async def sleep(self, seconds: float) -> None:
        """See BrokerCalls."""
        time.sleep(seconds)

    def monotonic_s(self) -> float:
        """See BrokerCalls."""
        return time.monotonic()
