"""A database server of the simulation, and its driver as PEP 249 describes one: product code that blocks makes the calls on it.

Such code runs in a greenlet of a coroutine of its process (``greenlet_spawn``), and each call on the driver waits there in virtual time.
A statement may arrive when its client has given up, an answer may get lost, and a session ends some time after its client.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from sqlalchemy.util import await_

from tests.sim.world import Process, Promise, World

T = TypeVar("T")
#: How long a statement or its answer is on its way at most, and how long a client waits for an answer that does not come.
WAY_MS: Final = 6.0
PATIENCE_MS: Final = 60.0
#: So much later a statement may arrive that is held up, and the end of a session whose client has gone.
HELD_MS: Final = 250.0
DROPPED_MS: Final = 80.0
_DECISIONS: Final = "bascule_decisions"
_LIKE: Final = re.compile(r" LIKE ")
XidParts = tuple[int, str, str]


class Error(Exception):
    """What a driver raises."""


class OperationalError(Error):
    """The server has not answered."""


class IntegrityError(Error):
    """The key is there."""


class ServerError(Error):
    """What the server says, by its SQLSTATE."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(f"SQLSTATE {sqlstate}")
        self.sqlstate = sqlstate


@dataclass(slots=True)
class ServerFaults:
    """How often an answer is lost, a statement is held up, a branch is refused, and the answer to the commit of a decision is lost."""

    lost_answers: float = 0.0
    held: float = 0.0
    refusals: float = 0.0
    lost_commits: float = 0.0


@dataclass(slots=True, eq=False)
class Session:
    """The open transaction of a connection."""

    decisions: dict[str, str] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)  # for its end

    def clear(self) -> None:
        """It has ended: what waits for it goes on."""
        self.decisions, self.deleted, self.rows = {}, [], []
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


class _Locked(Exception):
    def __init__(self, by: Session) -> None:
        super().__init__()
        self.by = by


class Server:
    """A database: rows of the application, a table of decisions whose key is unique, and prepared branches."""

    def __init__(self, world: World, name: str, faults: ServerFaults) -> None:
        self.world = world
        self.name = name
        self.faults = faults
        self.away_until_ms = 0.0
        self.rows: Counter[str] = Counter()
        self.decisions: dict[str, str] = {}
        self.prepared: dict[XidParts, list[str]] = {}
        self._sessions: dict[Session, None] = {}

    def session(self) -> Session:
        """A new one."""
        session = Session()
        self._sessions[session] = None
        return session

    def carry_out(self, session: Session, effect: Callable[[], T], answer: Promise[T], lost: float) -> None:
        """A statement arrives."""
        if self.world.now_ms < self.away_until_ms:
            self.world.note("lose database", self.name)
            self.world.after(PATIENCE_MS, answer.fail, OperationalError("no answer"))
            return
        try:
            value = effect()
        except _Locked as locked:
            locked.by.waiting.append(lambda: self.world.after(0, self.carry_out, session, effect, answer, lost))
            return
        except Error as error:
            self.world.after(self.world.random.random() * WAY_MS, answer.fail, error)
            return
        if self.world.chance(lost):
            self.world.note("lose verdict")
            self.world.after(PATIENCE_MS, answer.fail, OperationalError("no answer"))
        else:
            self.world.after(self.world.random.random() * WAY_MS, answer.keep, value)

    def insert_decision(self, session: Session, key: str, value: str) -> None:
        """INSERT into the table of decisions: waits for another session that has inserted the key. Raises IntegrityError."""
        if key in self.decisions or key in session.decisions:
            raise IntegrityError(key)
        for other in self._sessions:
            if other is not session and key in other.decisions:
                raise _Locked(other)
        session.decisions[key] = value

    def commit(self, session: Session) -> None:
        """COMMIT."""
        self.decisions.update(session.decisions)
        for key in session.deleted:
            self.decisions.pop(key, None)
        self.rows.update(session.rows)
        session.clear()

    def prepare(self, session: Session, xid: XidParts) -> None:
        """PREPARE TRANSACTION."""
        if self.world.chance(self.faults.refusals):
            session.clear()
            raise ServerError("40001")
        self.prepared[xid] = session.rows
        session.clear()

    def commit_prepared(self, xid: XidParts) -> None:
        """COMMIT PREPARED."""
        self.rows.update(self._taken(xid))

    def rollback_prepared(self, xid: XidParts) -> None:
        """ROLLBACK PREPARED."""
        self._taken(xid)

    def end(self, session: Session) -> None:
        """Its client has gone."""
        session.clear()
        self._sessions.pop(session, None)

    def _taken(self, xid: XidParts) -> list[str]:
        if xid not in self.prepared:
            raise ServerError("42704")
        return self.prepared.pop(xid)


class Connection:
    """A connection of the driver, for one process."""

    def __init__(self, server: Server, process: Process) -> None:
        self._server, self._process = server, process
        self._session = server.session()
        self._closed = False
        self._last_ms = 0.0  # when the last statement arrives
        self._branch: XidParts | None = None
        self._prepared = False
        self._saved = False  # the transaction has a savepoint
        self.call(lambda: None)

    def call(self, effect: Callable[[], T], lost: float = 0.0) -> T:
        """Have the server do something, and wait for its answer, which is ``lost`` so often at least.

        Raises OperationalError; then the connection is closed.
        """
        if self._closed or not self._process.alive:
            raise OperationalError("the connection is closed")
        world, server, answer = self._server.world, self._server, Promise[T]()
        way_ms = world.random.random() * WAY_MS
        if world.chance(server.faults.held):
            world.note("hold up statement", self._process.name)
            way_ms += world.random.random() * HELD_MS
            world.after(PATIENCE_MS, answer.fail, OperationalError("no answer in time"))
        self._last_ms = max(self._last_ms, world.now_ms + way_ms)
        world.after(self._last_ms - world.now_ms, server.carry_out, self._session, effect, answer, max(lost, server.faults.lost_answers))
        try:
            return await_(answer)
        except OperationalError:
            self.close()
            raise

    def close(self) -> None:
        """Close it, or break it: the server ends the session when the last statement has arrived, or later."""
        if not self._closed:
            self._closed = True
            world = self._server.world
            left_ms = max(0.0, self._last_ms - world.now_ms) + world.random.random() * DROPPED_MS
            world.after(left_ms, self._server.end, self._session)

    def cursor(self) -> Cursor:
        """A cursor."""
        return Cursor(self)

    def commit(self) -> None:
        """Commit."""
        self._saved = False
        lost = self._server.faults.lost_commits if self._session.decisions else 0.0
        self.call(lambda: self._server.commit(self._session), lost)

    def rollback(self) -> None:
        """Roll back."""
        self._saved = False
        self.call(self._session.clear)

    def statement(self, sql: str, parameters: Sequence[str]) -> list[tuple[str]]:
        """Carry a statement out; return its rows."""
        server, session = self._server, self._session
        if sql.startswith("CREATE"):
            return []
        if sql.startswith(("SAVEPOINT", "RELEASE")):  # this server never ends a transaction alone
            if sql.startswith("RELEASE") and not self._saved:
                raise Error("no such savepoint")
            self._saved = sql.startswith("SAVEPOINT")
            return []
        if sql == "SELECT DATABASE()":
            raise Error("no such function: DATABASE")  # there is one schema, as in SQLite
        if sql == "SELECT 1":
            return [("1",)]
        if sql.startswith(f"INSERT INTO {_DECISIONS}"):
            return self.call(lambda: server.insert_decision(session, *parameters)) or []
        if sql.startswith("INSERT"):
            return self.call(lambda: session.rows.append(parameters[0])) or []
        if sql.startswith("DELETE"):
            return self.call(lambda: session.deleted.append(parameters[0])) or []
        prefix = parameters[0].removesuffix("%") if _LIKE.search(sql) else None
        return self.call(
            lambda: [
                (value,)
                for key, value in {**server.decisions, **session.decisions}.items()
                if (key.startswith(prefix) if prefix is not None else key == parameters[0])
            ]
        )

    # two-phase commit extensions of PEP 249

    def xid(self, format_id: int, gtrid: str, bqual: str) -> XidParts:
        """An Xid of the driver."""
        return (format_id, gtrid, bqual)

    def tpc_begin(self, xid: XidParts) -> None:
        """Begin a branch."""
        self._branch, self._prepared = xid, False
        self.call(lambda: None)

    def tpc_prepare(self) -> None:
        """Prepare the branch."""
        self.call(lambda: self._server.prepare(self._session, self._of(None)))
        self._prepared = True

    def tpc_commit(self, xid: XidParts | None = None) -> None:
        """Commit a branch, or the one of this connection, prepared or not."""
        if xid is None and not self._prepared:
            self.commit()
        else:
            self.call(lambda: self._server.commit_prepared(self._of(xid)))
        self._branch, self._prepared = None, False

    def tpc_rollback(self, xid: XidParts | None = None) -> None:
        """Roll a branch back, or the one of this connection, prepared or not."""
        if xid is None and not self._prepared:
            self.rollback()
        else:
            self.call(lambda: self._server.rollback_prepared(self._of(xid)))
        self._branch, self._prepared = None, False

    def tpc_recover(self) -> list[XidParts]:
        """The prepared branches."""
        return self.call(lambda: list(self._server.prepared))

    def _of(self, xid: XidParts | None) -> XidParts:
        if (found := xid or self._branch) is None:
            raise ServerError("42704")
        return found


class Cursor:
    """A cursor of the driver."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: list[tuple[str]] = []

    def execute(self, sql: str, parameters: Sequence[str] = ()) -> Self:
        """Carry a statement out."""
        self._rows = self._connection.statement(sql, parameters)
        return self

    def executemany(self, sql: str, rows: Sequence[Sequence[str]]) -> None:
        """Carry a statement out for each row of parameters."""
        for parameters in rows:
            self.execute(sql, parameters)

    def fetchone(self) -> Any:
        """The next row."""
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[tuple[str]]:
        """All rows."""
        return self._rows

    def close(self) -> None:
        """Nothing is left of it."""
