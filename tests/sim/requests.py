"""Requests about transaction branches to a broker of the simulation, by the rules of a real broker's management node.

A request that names a transaction takes it from its connection. What is said from memory alone is said when a record made after it is
stored: a broker that another one has replaced never comes to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

from bascule.broker import branches
from bascule.broker.errors import BranchForced, UnknownBranch
from bascule.broker.transactions import Transaction
from bascule.core.errors import BasculeError, TransactionRolledBack
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from tests.sim.broker import Connection
from tests.sim.world import Promise
from tests.support.history_branches import Said

_SAID: Final[dict[Ending | None, Said]] = {
    None: "unknown",
    Ending.COMMITTED: "committed",
    Ending.ROLLED_BACK: "rolled-back",
    Ending.FORCED_COMMIT: "forced-commit",
    Ending.FORCED_ROLLBACK: "forced-rollback",
}


class Listed(NamedTuple):
    """The answer to ``recover``."""

    xids: tuple[Xid, ...]


async def prepare(connection: Connection, xid: Xid, name: bytes) -> Said:
    """The vote of a transaction. Raises ConnectionLost."""
    return await _ask(connection, _prepare, xid, name)


async def commit_one_phase(connection: Connection, xid: Xid, name: bytes) -> Said:
    """What became of a transaction. Raises ConnectionLost."""
    return await _ask(connection, _commit_one_phase, xid, name)


async def end(connection: Connection, xid: Xid, ending: Ending) -> Said:
    """What became of a prepared branch. Raises ConnectionLost."""
    return await _ask(connection, _end, xid, ending)


async def forget(connection: Connection, xid: Xid) -> Said:
    """Of a branch that an administrator has ended. Raises ConnectionLost."""
    return await _ask(connection, _forget, xid)


async def recover(connection: Connection) -> tuple[Xid, ...]:
    """The branches that somebody has to see to. Raises ConnectionLost."""
    listed: Listed = await connection.ask(_recover, connection)
    return listed.xids


async def _ask(connection: Connection, action: Any, *arguments: Any) -> Said:
    said: Said = await connection.ask(_carry_out, connection, action, *arguments)
    return said


# -- at the broker -----------------------------------------------------------------------------------------------------


def _carry_out(connection: Connection, action: Any, *arguments: Any) -> None:
    answer: Promise[Said] = arguments[-1]
    say = partial(connection.down, answer.keep)
    try:
        action(connection, *arguments[:-1], say)
    except BasculeError as error:
        connection.broker.engine.journaling.then_anew(say, _said(error))


def _said(error: BasculeError) -> Said:
    if isinstance(error, UnknownBranch | BranchForced):
        return _SAID[error.ending]
    return "gone" if isinstance(error, TransactionRolledBack) else "busy"


def handed_over(connection: Connection, name: bytes) -> Transaction | None:
    """The transaction of a connection, which is that no more."""
    return connection.transactions.pop(name, None)


def _prepare(connection: Connection, xid: Xid, name: bytes, say: Any) -> None:
    engine, transaction = connection.broker.engine, handed_over(connection, name)
    branches.prepare(engine, transaction, xid, connection.name, lambda prepared: say("done" if prepared else "read-only"))


def _commit_one_phase(connection: Connection, xid: Xid, name: bytes, say: Any) -> None:
    engine, transaction = connection.broker.engine, handed_over(connection, name)

    def done(error: BasculeError | None) -> None:
        say("done" if error is None else _said(error))

    branches.commit_one_phase(engine, transaction, xid, done)


def _end(connection: Connection, xid: Xid, ending: Ending, say: Any) -> None:
    branches.end(connection.broker.engine, xid, ending, partial(say, "done"))


def _forget(connection: Connection, xid: Xid, say: Any) -> None:
    branches.forget(connection.broker.engine, xid, partial(say, "done"))


def _recover(connection: Connection, answer: Promise[Listed]) -> None:
    engine = connection.broker.engine

    def say() -> None:
        connection.down(answer.keep, Listed(tuple(each.xid for each in branches.listed(engine))))

    engine.journaling.then_anew(say)
