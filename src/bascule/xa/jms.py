"""The Bascule broker as a resource: what is sent and received over JMS, in one transaction with databases and Kafka.

A branch works in a local transaction of its own; ``prepare`` hands it over to the broker under the branch's xid, by a request to the
broker's management node. From then on any connection may end it, over restarts and takeovers of the broker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bascule.client import ConnectionFactory, ConnectionLost, Context, Message, TransactionRolledBack
from bascule.client.branch import BranchContext, Workplace, ended
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.xid import Xid
from bascule.xa.errors import (
    XA_OK,
    XA_RDONLY,
    BranchHeuristic,
    BranchRolledBack,
    Code,
    DuplicateXid,
    ResourceError,
    ResourceFailed,
    RetryLater,
    UnknownXid,
    XaError,
)
from bascule.xa.resource import Branches, Call, State, Vote

#: Workplaces kept between branches: as many as threads usually work at once.
IDLE_MAX = 8
#: Consumers that each of them keeps.
CONSUMERS_MAX = 32
#: ``type`` of the requests.
TYPE = "bascule.xa"
COMMITTED = "committed"
#: A commit that was not answered is asked about so often, for so long: it may be on its way into the journal.
ASK_AGAIN_S = 0.05
SETTLE_S = 30.0
#: What the broker answers, by its ``xaCode``; XA_RB* and XA_HEUR* aside.
ERRORS: dict[Code, type[XaError]] = {
    Code.XAER_NOTA: UnknownXid,
    Code.XAER_DUPID: DuplicateXid,
    Code.XA_RETRY: RetryLater,
    **dict.fromkeys((code for code in Code if code.name.startswith("XA_RB")), BranchRolledBack),
    **dict.fromkeys((code for code in Code if code.name.startswith("XA_HEUR")), BranchHeuristic),
}


class _Known(UnknownXid):
    """A branch that has ended, and the broker remembers how."""

    def __init__(self, text: str, outcome: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class JmsResource:
    """A broker. The handle is a context of ``bascule.client`` that sends and receives; commit and rollback are the manager's.

    Consumers are made once and kept for later branches. A consumer asks for no message ahead unless it is given a ``prefetch``; what it was
    sent and did not receive goes back at the end of its branch, so that an idle program keeps nothing from others.
    """

    def __init__(self, name: str, url: str, *, idle_max: int = IDLE_MAX, consumers_max: int = CONSUMERS_MAX, **options: Any) -> None:
        """``url`` and ``options`` are those of ``bascule.client.ConnectionFactory``; nothing is opened before it is needed.

        Up to ``idle_max`` sessions are kept between branches, each with up to ``consumers_max`` consumers. A kept consumer keeps what it
        has for itself alone: message groups, an exclusive queue, a durable subscription. 0 closes them with their branch.
        """
        self.name = name
        self._factory = ConnectionFactory(url, **options)
        self._idle_max = idle_max
        self._consumers_max = consumers_max
        self._connection: Context | None = None
        self._idle: list[Workplace] = []
        self._work: dict[Xid, tuple[Workplace, BranchContext]] = {}
        self._branches = Branches()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._failures = 0
        self._failure: BasculeError | None = None

    def start(self, xid: Xid, *, timeout_s: float) -> BranchContext:  # noqa: ARG002 - the broker has its own: broker.transaction_timeout_s
        """See Resource. The handle is for one thread at a time."""
        self._branches.check(xid, Call.START)
        with _translated():
            workplace = self._borrowed()
        handle = BranchContext(workplace)
        with self._lock:
            self._work[xid] = workplace, handle
        self._branches.move(xid, State.ACTIVE)
        return handle

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        after = self._branches.check(xid, Call.END if success else Call.END_FAILED)
        with self._lock:
            workplace, handle = self._work[xid]
        handle.end_branch()
        self._branches.move(xid, after)
        if success:
            with self._working(xid):
                workplace.end()

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        self._branches.check(xid, Call.PREPARE)
        with self._working(xid) as workplace:
            txn_id = workplace.hand_over()
            code = XA_RDONLY if txn_id is None else _ask(workplace, "prepare", xid, txnId=txn_id.hex())
        self._over(xid)
        return Vote.READ_ONLY if code == XA_RDONLY else Vote.YES

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        if one_phase or self._branches.state(xid) is not State.NONE:
            self._branches.check(xid, Call.COMMIT_ONE_PHASE if one_phase else Call.COMMIT)
        if not one_phase:
            self._from_outside("commit", xid)
            return
        try:
            with self._working(xid) as workplace:
                txn_id = workplace.hand_over()
                if txn_id is not None:
                    _ask(workplace, "commit", xid, txnId=txn_id.hex())
        except ResourceFailed as error:
            self._settle(xid, error)
            return
        self._over(xid)

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        if self._branches.state(xid) is State.NONE:
            self._from_outside("rollback", xid)
            return
        with self._lock:
            workplace, handle = self._work[xid]
        handle.end_branch()
        try:
            workplace.rollback()
        except BasculeError:
            self._over(xid, reusable=False)  # the end of its sessions rolls it back
        else:
            self._over(xid)

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        answer = self._asked(_request("recover"))
        return [_listed(line) for line in str(answer.body or "").splitlines()]

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        self._from_outside("forget", xid)

    def close(self) -> None:
        """Closes the connection. Branches that are not prepared are rolled back."""
        with self._lock:
            connection, self._connection = self._connection, None
            places, self._idle = [*self._idle, *(workplace for workplace, _ in self._work.values())], []
        for each in places:
            each.close()
        if connection is not None:
            _close(connection)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _from_outside(self, operation: str, xid: Xid) -> None:
        """Asks the broker to end a branch that it has, whoever prepared it."""
        self._asked(_request(operation, **_fields(xid)))

    def _asked(self, request: Message) -> Message:
        """The broker's answer to what may be asked again: once more where the connection turns out to be lost."""
        with _translated():
            try:
                return self._asked_once(request)
            except ConnectionLost:
                return self._asked_once(request)

    def _settle(self, xid: Xid, error: ResourceFailed) -> None:
        """What became of a commit in one phase that has not been answered. The broker refuses it from now on, if it has not done it."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                self._from_outside("rollback", xid)
            except _Known as known:
                if known.outcome == COMMITTED:
                    return
            except RetryLater:  # it is being stored
                if time.monotonic() > deadline:
                    raise error from None
                time.sleep(ASK_AGAIN_S)
                continue
            except UnknownXid:
                pass
            raise BranchRolledBack(f"{self.name} lost it: {error}", Code.XA_RBCOMMFAIL, cause=error) from error

    @contextmanager
    def _working(self, xid: Xid) -> Iterator[Workplace]:
        """After a failure the branch is in the broker's hands alone: rolled back there, unless it is prepared."""
        with self._lock:
            workplace, _ = self._work[xid]
        try:
            with _translated():
                yield workplace
        except BaseException:
            self._over(xid, reusable=False)
            raise

    def _asked_once(self, request: Message) -> Message:
        workplace = self._borrowed()
        try:
            answer = workplace.ask(request)
        except BaseException:
            workplace.close()
            raise
        self._take_back(workplace)
        _checked(answer)
        return answer

    def _over(self, xid: Xid, *, reusable: bool = True) -> None:
        self._branches.move(xid, State.NONE)
        with self._lock:
            workplace, _ = self._work.pop(xid)
        if reusable:
            self._take_back(workplace)
        else:
            workplace.close()

    def _borrowed(self) -> Workplace:
        """One that nobody uses. Raises Unavailable, Refused."""
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

    def _another(self) -> Workplace:
        """On the connection that there is, or on a new one where that has ended."""
        connection = self._connection
        if connection is not None:
            try:
                return Workplace(connection, self._consumers_max)
            except BasculeError:
                if not ended(connection):
                    raise  # the broker is away, or takes no more sessions: others work on this connection
                _close(connection)
        failures = self._failures
        with self._connecting:
            if self._connection is connection:
                if self._failure is not None and self._failures > failures:
                    # Another one's try, which this one has waited for: no need to wait for as long again. A copy: one exception
                    # object that several threads raise would gather the tracebacks of all.
                    raise type(self._failure)(*self._failure.args)
                self._connection = self._connect()
            assert self._connection is not None
            return Workplace(self._connection, self._consumers_max)

    def _connect(self) -> Context:
        try:
            return self._factory.connect()
        except BasculeError as error:
            self._failure = error
            self._failures += 1
            raise

    def _take_back(self, workplace: Workplace) -> None:
        with self._lock:
            if len(self._idle) < self._idle_max:
                self._idle.append(workplace)
                return
        workplace.close()


def _close(connection: Context) -> None:
    try:
        connection.close()
    except BasculeError:
        return  # it is broken, which is why it is closed


@contextmanager
def _translated() -> Iterator[None]:
    """Whatever the client raises within is raised as an XaError."""
    try:
        yield
    except XaError:
        raise
    except TransactionRolledBack as error:
        raise BranchRolledBack(str(error), error.xa_code, cause=error) from error
    except Unavailable as error:
        raise ResourceFailed(str(error)) from error
    except BasculeError as error:
        raise ResourceError(str(error)) from error


def _request(operation: str, **properties: Any) -> Message:
    return Message(properties={"operation": operation, "type": TYPE, **properties})


def _ask(workplace: Workplace, operation: str, xid: Xid, **properties: Any) -> int:
    """Have an operation on a branch carried out. Returns XA_OK or XA_RDONLY, raises XaError for any other answer."""
    return _checked(workplace.ask(_request(operation, **_fields(xid), **properties)))


def _fields(xid: Xid) -> dict[str, Any]:
    return {"formatId": xid.format_id, "gtrid": xid.gtrid.hex(), "bqual": xid.bqual.hex()}


def _checked(answer: Message) -> int:
    said = answer.properties
    code = said.get("xaCode")
    if code in (XA_OK, XA_RDONLY):
        return int(code)
    if code not in set(Code):
        raise ResourceError(f"the broker answered {said.get('statusCode')} {said.get('statusDescription')}: it knows no branches")
    description = str(said.get("statusDescription"))
    error = ERRORS.get(Code(code), ResourceError)(description, Code(code))
    raise _Known(str(error), said["outcome"]) if "outcome" in said else error


def _listed(line: str) -> Xid:
    """The branch that a line of ``recover`` names: STATE SINCE_MS FORMAT:GTRID:BQUAL, the last two in hexadecimal digits."""
    format_id, gtrid, bqual = line.split(" ")[2].split(":")
    return Xid(int(format_id), bytes.fromhex(gtrid), bytes.fromhex(bqual))
