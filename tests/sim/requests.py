"""Requests about transaction branches over a connection of the simulation; the broker's own rules carry them out.

A manager makes them by the protocol of ``bascule.xa.broker_protocol``; this module is the way to the broker and back.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from bascule.broker import branches
from bascule.broker.branch_requests import FORGOTTEN, NO_XID, Answer, BranchRequest, carry_out, failure, plan
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


#: Branches with two sessions, and those whose second session receives or closes early, by digits of the global id.
JOINED, RECEIVING, CLOSED = b"012345", b"01234567", b"0"


class Handed(NamedTuple):
    """The transactions of a connection that a request is about. ``closes``: the session of the last one closes before the request."""

    name: bytes | None = None
    joined: tuple[bytes, ...] = ()
    closes: bool = False


NOTHING: Final = Handed()


def sessions_of(gtrid: bytes) -> tuple[bytes, ...]:
    """Return the local transactions of a branch, one of each session. Random digits of the global id say how many there are."""
    return (gtrid, gtrid + b"/2") if gtrid[-2:-1] in JOINED else (gtrid,)


def handed(gtrid: bytes) -> Handed:
    """Return what a prepare or a one-phase commit of a branch hands over."""
    sessions = sessions_of(gtrid)
    return Handed(gtrid, sessions[1:], closes=len(sessions) > 1 and gtrid[-4:-3] in CLOSED)


async def ask(connection: Connection, operation: str, xid: Xid | None, handed: Handed = NOTHING, since: int | None = None) -> Reply:
    """Make a request. Raises ConnectionLost."""
    answer, position = await connection.ask(_carry_out, connection, operation, xid or NO_XID, handed, since)
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
    connection: Connection, operation: str, xid: Xid, handed: Handed, since: int | None, answered: Promise[tuple[Answer, int]]
) -> None:
    engine, violations = connection.broker.engine, connection.world.violations
    request = BranchRequest(operation, xid, connection.name, connection.transactions, handed.name, since, joined=handed.joined)
    if handed.closes and handed.joined[-1] in connection.transactions:
        connection.world.note("close session", connection.name)
        engine.rollback(connection.transactions.pop(handed.joined[-1]))
    if handed.joined and not plan(engine, request, violations=violations):
        raise AssertionError("a branch of a few messages is planned at once")

    def say(answer: Answer) -> None:
        connection.down(answered.keep, (answer, engine.journaling.confirmed_sequence))

    carry_out(engine, request, say, violations=violations)


def _force(connection: Connection, xid: Xid, ending: Ending, answer: Promise[Answer]) -> None:
    say = partial(connection.down, answer.keep)
    engine = connection.broker.engine
    try:
        branches.end(engine, xid, ending, partial(say, Answer(200, "OK", XA_OK)))
    except BasculeError as error:
        engine.journaling.after_barrier(say, failure(error))
