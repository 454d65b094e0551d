"""A PostgreSQL for tests, in a temporary directory, and tables in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from bascule.embedded.postgres import PREPARED_MAX, EmbeddedPostgres


@contextmanager
def temporary_postgres(prepared_max: int = PREPARED_MAX) -> Iterator[EmbeddedPostgres]:
    """Start a PostgreSQL that a test may kill, and delete its data at the end. ``prepared_max`` is its ``max_prepared_transactions``."""
    # Started by root, PostgreSQL runs as nobody, who has no access to the directories of pytest.
    directory = Path(tempfile.mkdtemp(prefix="bascule-postgres-"))
    directory.chmod(0o755)
    try:
        with EmbeddedPostgres(directory / "data", fsync=False, prepared_max=prepared_max) as running:
            yield running
    finally:
        shutil.rmtree(directory)


@contextmanager
def item_table(server: EmbeddedPostgres, name: str) -> Iterator[str]:
    """Create a table with the column ``item``, whose values are unique, yield its name, and drop it at the end."""
    table = name.replace(".", "_")
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (item text UNIQUE)")
        yield table
        connection.execute(f"DROP TABLE {table}")


def items(server: EmbeddedPostgres, table: str) -> list[str]:
    """Return the committed items of such a table, in alphabetical order."""
    with psycopg.connect(server.conninfo) as connection:
        return [row[0] for row in connection.execute(f"SELECT item FROM {table} ORDER BY item")]
