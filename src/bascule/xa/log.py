"""The decision log: for each transaction, the first outcome that was stored counts.

The safety of a transaction depends only on this rule. A manager asks for COMMIT when every branch is prepared, a recoverer that finds a
branch without a decision asks for ROLLBACK, and both obey the answer. So any number of managers and recoverers may work on one transaction
at once. A manager that rolls back stores nothing (presumed abort), nor does one with only read-only branches or a single branch.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bascule.core.errors import BasculeError, InvalidInput, Scope
from bascule.xa.errors import Code
from bascule.xa.xid import LOG_ID, Xid, named

#: How long, in seconds, a decision is kept that the process of its transaction may still ask about: a ROLLBACK, in case a stalled manager
#: asks for COMMIT later, and the COMMIT of a database whose answer that process may have lost. The time counts from when the process that
#: deletes the decision first saw it, because the clocks of processes may differ.
DECISION_KEPT_S = 24 * 3600.0


#: The format of entries that this version writes. Entries without a format have format 0, which has no tokens; format 2 introduced the id
#: of the log.
FORMAT = 2


class LogDamaged(BasculeError):
    """Raised if the content of the decision log cannot be read. Bascule does not guess: decisions may be missing."""

    retriable = False
    scope = Scope.PROCESS


class Outcome(enum.StrEnum):
    """The outcome of a whole transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Decision:
    """An outcome. ``resources`` are the prepared ones, ``at_ms`` is the time (since the epoch), ``by`` who decided.

    ``tokens`` has for each resource the token that tells the outcome of its branch in any process, or "" (see ``TellsOutcome``). It is
    empty if no resource has given one, and in entries of format 0.
    """

    gtrid: bytes
    outcome: Outcome
    resources: tuple[str, ...]
    at_ms: int
    by: str
    tokens: tuple[str, ...] = ()

    def token(self, resource: str) -> str:
        """Return the token of a resource, or "" if there is none."""
        return dict(zip(self.resources, self.tokens, strict=False)).get(resource, "")


@dataclass(frozen=True, slots=True)
class Heuristic:
    """A branch that was finished from outside. It is kept until the operator forgets it. ``wanted`` is the decision."""

    xid: Xid
    code: Code
    wanted: Outcome
    text: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The id of a log, which is part of each global transaction id. Two logs never have the same id; the first entry of a log counts."""

    log_id: str
    at_ms: int


Entry = Decision | Heuristic | LogIdentity


@dataclass(slots=True)
class LogState:
    """The content of a decision log. ``log_id`` is "" for a log without an id."""

    decisions: dict[bytes, Decision] = field(default_factory=dict)
    heuristics: dict[Xid, Heuristic] = field(default_factory=dict)
    log_id: str = ""

    def add(self, entry: Entry) -> None:
        """Add an entry that comes after all entries added before."""
        if isinstance(entry, Decision):
            self.decisions.setdefault(entry.gtrid, entry)
        elif isinstance(entry, Heuristic):
            self.heuristics[entry.xid] = entry
        else:
            self.log_id = self.log_id or entry.log_id

    def copy(self) -> LogState:
        """Return a copy that later entries do not change."""
        return LogState(dict(self.decisions), dict(self.heuristics), self.log_id)


class DecisionLog(Protocol):
    """A durable log, shared by all processes that work under one manager's name. Thread-safe.

    Calls raise Unavailable if the log does not answer; the entry may then be stored or not. ``forget`` never raises.
    """

    def decide(self, decision: Decision) -> Decision:
        """Store a decision, and return the one that counts: the first that was stored for this transaction."""

    def read(self) -> LogState:
        """Return all entries that were stored when the call began. They are durable, because callers act on them.

        A log that has an id has it from the first read.
        """

    def record(self, heuristic: Heuristic) -> None:
        """Store a heuristic outcome."""

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """Forget decisions that nobody needs any more, at some time. The next recovery forgets those that reappear."""

    def forget_heuristic(self, xid: Xid) -> None:
        """Delete the heuristic outcome of a branch."""

    def close(self) -> None:
        """Close the log."""


def encode(entry: Entry) -> bytes:
    """Return an entry as JSON."""
    fields: dict[str, Any]
    if isinstance(entry, Decision):
        fields = {"gtrid": entry.gtrid.decode("latin-1"), "outcome": entry.outcome, "resources": entry.resources, "by": entry.by}
        if entry.tokens:
            fields["tokens"] = entry.tokens
    elif isinstance(entry, LogIdentity):
        fields = {"log_id": entry.log_id}
    else:
        fields = {"xid": str(entry.xid), "code": entry.code.name, "wanted": entry.wanted, "text": entry.text}
    return json.dumps(fields | {"at_ms": entry.at_ms, "format": FORMAT}, separators=(",", ":")).encode()


def decode(data: bytes) -> Entry:
    """Return the entry that ``encode`` was given. Raises LogDamaged."""
    try:
        return _entry(json.loads(data))
    except (ValueError, TypeError, KeyError, BasculeError) as error:
        raise LogDamaged(f"unreadable entry {data[:200]!r}: {error}") from error


def _entry(fields: Mapping[str, Any]) -> Entry:
    if (written := fields.get("format", 0)) > FORMAT:
        raise InvalidInput(f"the format of the entry is {written}; this version of Bascule reads formats up to {FORMAT}")
    if "log_id" in fields:
        return LogIdentity(named(LOG_ID, fields["log_id"], "decision log"), fields["at_ms"])
    if "gtrid" in fields:
        gtrid, resources, tokens = fields["gtrid"].encode("latin-1"), tuple(fields["resources"]), tuple(fields.get("tokens", ()))
        return Decision(gtrid, Outcome(fields["outcome"]), resources, fields["at_ms"], fields["by"], tokens)
    xid, code = Xid.parse(fields["xid"]), Code[fields["code"]]
    return Heuristic(xid, code, Outcome(fields["wanted"]), fields["text"], fields["at_ms"])
