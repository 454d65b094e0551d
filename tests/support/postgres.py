"""A PostgreSQL for tests, in a directory of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
