"""Requests about transaction branches over a connection of the simulation; the broker's own rules carry them out.

A manager makes them by the protocol of ``bascule.xa.broker_protocol``; this module is the way to the broker and back.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from bascule.broker import branches
from bascule.broker.branch_requests import FORGOTTEN, NO_XID, Answer, BranchRequest, carry_out, failure
from bascule.core.errors import BasculeError
from bascule.core.xa_codes import XA_OK, XA_RDONLY, Code
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.xa.broker_protocol import Reply
from tests.sim.connections import Connection
from tests.sim.world import Promise
from tests.support.history_branches import Said

_SAID: Final[dict[int, Said]] = {
    XA_OK: "done",
    XA_RDONLY: "read-only",
    Code.XAER_NOTA: "unknown",
    Code.XA_HEURCOM: "forced-commit",
    Code.XA_HEURRB: "forced-rollback",
    Code.XA_RETRY: "busy",
}
_ENDED: Final[dict[str, Said]] = {"committed": "committed", "rolled-back": "rolled-back", FORGOTTEN: "unknown"}


async def ask(connection: Connection, operation: str, xid: Xid | None, name: bytes | None = None, since: int | None = None) -> Reply:
    """Make a request; ``name`` is the connection's transaction that the request is about. Raises ConnectionLost."""
    answer, position = await connection.ask(_carry_out, connection, operation, xid or NO_XID, name, since)
    return Reply(answer.code, answer.status, answer.description, answer.outcome or "", answer.text or "", position)


async def force(connection: Connection, xid: Xid, ending: Ending) -> Said:
    """End a branch as an administrator, by the admin server. Raises ConnectionLost."""
    answer: Answer = await connection.ask(_force, connection, xid, ending)
    return said(Reply(answer.code, answer.status, answer.description, answer.outcome or "", ""))


def said(reply: Reply) -> Said:
    """Return the answer of a broker in the terms of the judgement."""
    if reply.outcome:
        return _ENDED[reply.outcome]
    return _SAID.get(reply.code, "gone") if reply.code is not None else "gone"


# -- at the broker -----------------------------------------------------------------------------------------------------


def _carry_out(
    connection: Connection, operation: str, xid: Xid, name: bytes | None, since: int | None, answered: Promise[tuple[Answer, int]]
) -> None:
    request = BranchRequest(operation, xid, connection.name, connection.transactions, name, since)
    engine = connection.broker.engine

    def say(answer: Answer) -> None:
        connection.down(answered.keep, (answer, engine.journaling.confirmed_sequence))

    carry_out(engine, request, say, violations=connection.world.violations)


def _force(connection: Connection, xid: Xid, ending: Ending, answer: Promise[Answer]) -> None:
    say = partial(connection.down, answer.keep)
    engine = connection.broker.engine
    try:
        branches.end(engine, xid, ending, partial(say, Answer(200, "OK", XA_OK)))
    except BasculeError as error:
        engine.journaling.after_barrier(say, failure(error))
