"""The inbound log of a group, and the resource that makes the receipt of a record part of a transaction."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from bascule.adapter.inbound.log_protocol import LogProtocol
from bascule.adapter.inbound.log_topic import LogTopic
from bascule.adapter.inbound.state import Flights, Place, Ref
from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.xid import Xid
from bascule.xa.branches import BranchStates
from bascule.xa.errors import BranchRolledBack, ResourceFailed, UnknownXid
from bascule.xa.resource import BranchState, Call, CommitPriority, Vote

_R = TypeVar("_R")


@dataclass(slots=True)
class InboundBranch:
    """The handle of a branch: names the record that the transaction consumes."""

    ref: Ref | None = None

    def take(self, ref: Ref) -> None:
        """Consume this record: it is done when the transaction commits, and stays in flight if the transaction rolls back."""
        self.ref = ref


class InboundLog:
    """The inbound log of a group, and a resource of transactions. Thread-safe; the first use creates the topic."""

    def __init__(
        self,
        name: str,
        kafka: Mapping[str, Any],
        *,
        group: str,
        topic: str | None = None,
        at: LogTopic | None = None,
        violations: Collection[StrEnum] = (),
    ) -> None:
        """Use ``topic`` (default: ``GROUP.inbound``), which nobody else may write. ``at`` replaces the clients of the topic."""
        self.name = name
        self.priority = CommitPriority.RECEIPT
        self.group = group
        self.topic = topic or f"{group}.inbound"
        self._at = at or LogTopic(kafka, self.topic)
        self.protocol = LogProtocol(self._at, f"{socket.gethostname()}/{uuid.uuid4().hex[:8]}", violations=violations)
        self._branches = BranchStates()
        self._taken: dict[Xid, InboundBranch] = {}

    # -- for the adapter

    def owner(self, place: Place) -> str | None:
        """Return the token of the current owner of a source partition. Raises Unavailable."""
        return run_blocking(self.protocol.owner(place))

    def take(self, place: Place, after: str | None) -> str:
        """Take over a source partition and return its new token. See ``LogProtocol.take`` for ``after`` and errors."""
        token = uuid.uuid4().hex[:12]
        run_blocking(self.protocol.take(place, token, after))
        return token

    def flights(self, place: Place) -> Flights:
        """Return the records in flight now, read to the end of the log. Raises Unavailable."""
        return run_blocking(self.protocol.flights(place))

    def all_flights(self) -> dict[Place, Flights]:
        """Return the records in flight of every source partition that has any, for display: a replaced node may answer."""
        return run_blocking(
            self._at.look(lambda fold: {place: state.seen() for place, state in fold.places.items() if state.flights or state.claims})
        )

    def schedule(self, refs: Sequence[Ref]) -> None:
        """Store that these records are in flight. Can be repeated. Raises Unavailable: some or all entries may be stored."""
        run_blocking(self.protocol.schedule(refs))

    def advance(self, ends: Sequence[Ref]) -> None:
        """Store that the log has all records before these. Raises Unavailable, as ``schedule``."""
        run_blocking(self.protocol.advance(ends))

    def failed(self, ref: Ref, failures: int) -> bytes:
        """Store how often a record has failed, and return the key of the entry. Raises Unavailable; then repeat the call."""
        return run_blocking(self.protocol.failed(ref, failures))

    def done(self, place: Place, keys: Iterable[bytes], *, wait: bool = False) -> None:
        """Store that a record is no longer in flight.

        Raises Unavailable if ``wait`` is set; otherwise ``housekeep`` repeats deletions that Kafka has not stored.
        """
        run_blocking(self.protocol.done(place, keys, wait=wait))

    def append(self, outgoing: Outgoing) -> Future[int]:
        """Append a record to another topic, outside of transactions."""
        return self._at.append_record(outgoing)

    def housekeep(self) -> None:
        """Repeat deletions that failed, and delete obsolete entries. Raises Unavailable."""
        self._at.housekeep()
        self.protocol.tidy()

    def close(self) -> None:
        """See LogTopic."""
        self._at.close()

    # -- for the transaction manager

    def start(self, xid: Xid, *, timeout_s: float) -> InboundBranch:  # noqa: ARG002 - nothing is held before prepare
        """See Resource. The handle takes the record."""
        after = self._branches.check(xid, Call.START)
        self._taken[xid] = InboundBranch()
        self._branches.move(xid, after)
        return self._taken[xid]

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        self._branches.move(xid, self._branches.check(xid, Call.END if success else Call.END_FAILED))

    def prepare(self, xid: Xid) -> Vote:
        """See Resource. Raises Superseded."""
        after = self._branches.check(xid, Call.PREPARE)
        branch = self._taken[xid]
        if branch.ref is None:
            self._gone(xid)
            return Vote.READ_ONLY
        self._branches.move(xid, after)  # after an error the branch can be rolled back from this state
        try:
            self._answer(self.protocol.claim(xid, branch.ref))
        except BranchRolledBack:
            self._gone(xid)
            raise
        return Vote.YES

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        if one_phase:
            self._branches.check(xid, Call.COMMIT_ONE_PHASE)
            if self.prepare(xid) is Vote.YES:
                self._finish(xid, commit=True)
            return
        if self._branches.state(xid) is not BranchState.NONE:
            self._branches.check(xid, Call.COMMIT)
        self._finish(xid, commit=True)

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        state, branch = self._branches.state(xid), self._taken.get(xid)
        try:
            if state is BranchState.PREPARED and branch is not None and branch.ref is not None:
                self._answer(self.protocol.withdraw(xid, branch.ref))
            elif state in (BranchState.NONE, BranchState.PREPARED):
                self._finish(xid, commit=False)
        finally:  # recovery finds the claim in the log if it was ever stored
            self._gone(xid)

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        return self._answer(self.protocol.claims())

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        raise UnknownXid(f"{self.name} has no heuristic outcome of branch {xid}")

    def _finish(self, xid: Xid, *, commit: bool) -> None:
        known = self._answer(self.protocol.finish(xid, commit=commit))
        self._gone(xid)
        if not known:
            raise UnknownXid(f"{self.name} has no prepared branch {xid}")

    def _gone(self, xid: Xid) -> None:
        self._branches.move(xid, BranchState.NONE)
        self._taken.pop(xid, None)

    def _answer(self, protocol: Coroutine[Any, Any, _R]) -> _R:
        try:
            return run_blocking(protocol)
        except Unavailable as error:
            raise ResourceFailed(f"{self.name}: {error}") from error
