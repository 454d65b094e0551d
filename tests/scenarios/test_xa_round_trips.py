"""What a transaction of the manager costs others: round trips, writes to the broker's socket, and wake-ups of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from bascule.embedded.postgres import EmbeddedPostgres
from bench.xa_counts import KINDS, Kind, counted, create_table

#: By the kind of the transaction: round trips to PostgreSQL (BEGIN, SET LOCAL, the application's statement, then the end of the branch),
#: and requests to the broker.
ROUND_TRIPS: Final = {
    "insert; one phase": (5, 0),  # vote, COMMIT
    "receive, send; one phase": (0, 2),  # receive, commit
    "insert, send; two phases": (6, 2),  # vote, PREPARE TRANSACTION, COMMIT PREPARED; prepare, commit
    "receive, insert, send; two phases": (6, 3),
    "receive, insert, send; decision in the database": (4, 3),  # the row of the decision with COMMIT
}
#: psycopg prepares a statement that it has seen often, which takes a round trip of its own.
PREPARATIONS_MAX: Final = 0.3
#: Python functions called for one transaction, in the threads of the application and of the connection: the count of today and some slack.
#: If a count is higher, compare the functions that the test prints with those before the change.
CALLS_MAX: Final = dict(zip(ROUND_TRIPS, (430, 1320, 1950, 2200, 2080), strict=True))
#: Wake-ups of the connection's thread: now and then for new credit, or for a write that was not possible at once.
WAKES_MAX: Final = 0.5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_costs_of_a_transaction_are_bounded(kind: Kind, postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    create_table(postgres)
    found = counted(kind, postgres, tmp_path)
    round_trips, requests = ROUND_TRIPS[kind.name]
    assert round_trips <= found.postgres <= round_trips + PREPARATIONS_MAX
    assert found.broker == requests
    assert found.wakes <= WAKES_MAX, found.listed()
    assert found.calls <= CALLS_MAX[kind.name], f"{found.calls:g} calls:\n{found.listed()}"
