"""The decisions of transactions in a table of a database that cannot prepare: a row is written by the same commit as the work.

The key of the table is the transaction. So the first decision that is committed counts: the writer of a second one waits for the end of the
first, and finds it.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bascule.xa.log import Decision, LogDamaged, Outcome, decode, encode

TABLE: Final = "bascule_decisions"
#: A savepoint in the transaction of a branch.
MARK: Final = "bascule_branch"
#: A setting of the transaction of a branch in PostgreSQL.
SETTING: Final = "bascule.branch"
#: SQL for PostgreSQL, SQLite, MySQL and MariaDB. A gtrid has at most 64 bytes.
CREATE: Final = "CREATE TABLE IF NOT EXISTS {} (gtrid VARCHAR(64) PRIMARY KEY, decision TEXT NOT NULL)"


class DecisionTable:
    """The statements, on a driver connection. The caller commits."""

    def __init__(self, placeholder: str = "%s", cursor: Callable[[Any], Any] = lambda raw: raw.cursor()) -> None:
        """Use ``placeholder`` as a parameter in the driver's SQL; ``cursor`` makes a cursor whose rows are tuples."""
        self._placeholder = placeholder
        self._cursor = cursor
        #: The name in SQL. It gets the schema or database: an application may select another one for its transaction (``SET search_path``,
        #: ``USE``), where recovery would not look.
        self.name = TABLE

    def locate(self, raw: Any, query: str, quote: str) -> None:
        """Find the schema of the table by ``query``, once, and put it into the name between characters ``quote``.

        The driver raises an error if the database does not know the query.
        """
        if self.name == TABLE:
            cursor = self._cursor(raw)
            cursor.execute(query)
            self.name = qualified(value_of(cursor.fetchone()), quote)

    def elsewhere(self, name: str) -> DecisionTable:
        """Return the table with another name."""
        other = copy.copy(self)
        other.name = name
        return other

    def mark(self, raw: Any) -> None:
        """Mark the transaction of a connection: the mark ends with it. Begin the transaction in SQLite, where the mark would commit it."""
        cursor = self._cursor(raw)
        if getattr(raw, "in_transaction", None) is False:
            cursor.execute("BEGIN")
        cursor.execute(f"SAVEPOINT {MARK}")

    def remove_mark(self, raw: Any) -> None:
        """Remove the mark. The driver raises an error if the transaction with the mark has ended."""
        self._cursor(raw).execute(f"RELEASE SAVEPOINT {MARK}")

    def create(self, raw: Any) -> None:
        """Create the table if there is none."""
        self._cursor(raw).execute(CREATE.format(self.name))

    def outlives_rollback(self, raw: Any) -> bool:
        """Return True if a row survives a rollback: the connection has autocommit, or the table's storage engine has no transactions."""
        trial = Decision(f"trial/{secrets.token_hex(8)}".encode(), Outcome.ROLLBACK, (), 0, "check")
        self.insert(raw, trial)
        raw.rollback()
        stays = self.find(raw, trial.gtrid) is not None
        self.delete(raw, [trial.gtrid])
        raw.commit()
        return stays

    def insert(self, raw: Any, decision: Decision) -> None:
        """Add a row. The driver raises its IntegrityError if there is one for the transaction."""
        mark = self._placeholder
        self._cursor(raw).execute(f"INSERT INTO {self.name} (gtrid, decision) VALUES ({mark}, {mark})", row_of(decision))

    def find(self, raw: Any, gtrid: bytes) -> Decision | None:
        """Return the decision of a transaction, or None. Raises LogDamaged."""
        return next(iter(self._read(raw, f"= {self._placeholder}", gtrid.decode())), None)

    def read(self, raw: Any, manager: str) -> Sequence[Decision]:
        """Return the decisions of a manager. Raises LogDamaged."""
        return [
            each for each in self._read(raw, f"LIKE {self._placeholder}", f"{manager}/%") if each.gtrid.startswith(f"{manager}/".encode())
        ]

    def delete(self, raw: Any, gtrids: Iterable[bytes]) -> None:
        """Delete rows that nobody needs any more."""
        rows = [(gtrid.decode(),) for gtrid in gtrids]
        if rows:
            self._cursor(raw).executemany(f"DELETE FROM {self.name} WHERE gtrid = {self._placeholder}", rows)

    def _read(self, raw: Any, condition: str, value: str) -> Sequence[Decision]:
        cursor = self._cursor(raw)
        cursor.execute(f"SELECT decision FROM {self.name} WHERE gtrid {condition}", (value,))
        return [_decision(value_of(row)) for row in cursor.fetchall()]


def qualified(schema: str, quote: str) -> str:
    """Return the name of the table in a schema, between characters ``quote``."""
    return f"{quote}{schema.replace(quote, 2 * quote)}{quote}.{TABLE}"


def row_of(decision: Decision) -> tuple[str, str]:
    """Return the values of the row of a decision, in the order of the columns."""
    return decision.gtrid.decode(), encode(decision).decode()


def value_of(row: Any) -> str:
    """Return the value of a row with one column. The application's connections may return rows as dictionaries."""
    value: str = next(iter(row.values())) if isinstance(row, Mapping) else row[0]
    return value


def _decision(text: str) -> Decision:
    entry = decode(text.encode())
    if not isinstance(entry, Decision):
        raise LogDamaged(f"table {TABLE} has a row that is not a decision: {text[:200]!r}")
    return entry
