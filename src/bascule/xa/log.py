"""The decision log: for each transaction the first outcome that was stored is the one that stands.

That rule is all that the safety of a transaction rests on. A manager asks for COMMIT when every branch is prepared, a recoverer that finds
a branch without a decision asks for ROLLBACK, and both obey the answer. So any number of managers and recoverers may work on one
transaction at once. A manager that rolls back stores nothing (presumed abort), nor does one whose branches were read-only or one alone.
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

#: A decision that the process of its transaction may still ask about is remembered for so long: a rollback, in case a manager that stood
#: still in between asks for COMMIT after all, and a commit of a database whose answer that process may have lost. The time counts from when
#: the process that forgets it has first seen it, for the clocks of processes need not agree.
DECISION_KEPT_S = 24 * 3600.0


#: The format of entries that this version writes. Entries without a format have format 0, which has no tokens; format 2 has brought the
#: id of the log.
FORMAT = 2


class LogDamaged(BasculeError):
    """What the decision log holds cannot be read. Nothing is guessed: decisions may be missing."""

    retriable = False
    scope = Scope.PROCESS


class Outcome(enum.StrEnum):
    """Of a whole transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Decision:
    """An outcome. ``resources`` are those that are prepared, ``at_ms`` is when (since the epoch), ``by`` who decided.

    ``tokens`` has for each resource what tells the outcome of its branch in any process, or "" (see ``TellsOutcome``); it is empty if no
    resource has given one, and in entries of format 0.
    """

    gtrid: bytes
    outcome: Outcome
    resources: tuple[str, ...]
    at_ms: int
    by: str
    tokens: tuple[str, ...] = ()

    def token(self, resource: str) -> str:
        """Return the token of a resource, "" if there is none."""
        return dict(zip(self.resources, self.tokens, strict=False)).get(resource, "")


@dataclass(frozen=True, slots=True)
class Heuristic:
    """A branch that was finished from outside; kept until the operator forgets it. ``wanted`` is what had been decided."""

    xid: Xid
    code: Code
    wanted: Outcome
    text: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The id of a log, which is part of each global transaction id. Two logs never have the same; the first entry of a log stands."""

    log_id: str
    at_ms: int


Entry = Decision | Heuristic | LogIdentity


@dataclass(slots=True)
class LogState:
    """What a decision log says. ``log_id`` is "" for a log without an id."""

    decisions: dict[bytes, Decision] = field(default_factory=dict)
    heuristics: dict[Xid, Heuristic] = field(default_factory=dict)
    log_id: str = ""

    def add(self, entry: Entry) -> None:
        """An entry that comes after those that were added before it."""
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
    """Durable, and shared by all that work under one manager's name. Safe for threads.

    Calls raise Unavailable when the log does not answer; then the entry may be stored or not. ``forget`` never raises.
    """

    def decide(self, decision: Decision) -> Decision:
        """Stores it, and returns the decision that stands: the first that was stored for this transaction."""

    def read(self) -> LogState:
        """All that had been stored when the call began; it is durable, for it is acted on.

        A log that has an id has it from the first read.
        """

    def record(self, heuristic: Heuristic) -> None:
        """Stores it."""

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """Decisions that nobody needs any more. Lazy: one that comes back is forgotten again by the next recovery."""

    def forget_heuristic(self, xid: Xid) -> None:
        """Drops what was recorded of a branch."""

    def close(self) -> None:
        """Frees what is held."""


def encode(entry: Entry) -> bytes:
    """An entry as JSON."""
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
    """The entry that ``encode`` gave. Raises LogDamaged."""
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
