"""``bascule postgres`` runs a PostgreSQL in which a program can prepare transactions, and continues with its data."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.support.speed import SLOWNESS

COMMAND = (sys.executable, "-m", "bascule", "postgres")
END_TIMEOUT_S = 60.0 * SLOWNESS
pytestmark = [pytest.mark.services, pytest.mark.timeout(240)]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a directory that the user ``nobody`` can reach: PostgreSQL does not run as root."""
    path = Path(tempfile.mkdtemp(prefix="bascule-postgres-command-"))
    path.chmod(0o755)
    yield path / "data"
    shutil.rmtree(path)


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[str]:
    """Run the command, yield the connection string that it prints, and end it with SIGTERM."""
    argv = [*COMMAND, "--data-dir", str(directory), "--port", "0", *options]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"ready postgres=(.+)\n", process.stdout.readline())
        assert found is not None
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_program_prepares_a_transaction_in_the_database_and_commits_it_after_a_restart(directory: Path) -> None:
    with serving(directory, "--database", "shop") as conninfo, psycopg.connect(conninfo, autocommit=True) as shop:
        assert "user=shop dbname=shop" in conninfo
        shop.execute("CREATE TABLE payments (id int)")
        shop.execute("BEGIN; INSERT INTO payments VALUES (1); PREPARE TRANSACTION 'one'")
    with serving(directory, "--database", "shop") as conninfo, psycopg.connect(conninfo, autocommit=True) as shop:
        shop.execute("COMMIT PREPARED 'one'")
        assert shop.execute("SELECT id FROM payments").fetchall() == [(1,)]
    with serving(directory, "--prepared-max", "0") as conninfo, psycopg.connect(conninfo) as own:
        assert "dbname=postgres" in conninfo
        assert own.execute("SHOW max_prepared_transactions").fetchone() == ("0",)


def refusal(directory: Path, *options: str, status: int = 2) -> str:
    """Run the command, which must end with ``status`` and not serve, and return its error."""
    argv = [*COMMAND, "--data-dir", str(directory), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    return done.stderr


def test_name_that_needs_quotes_is_refused_before_anything_is_written(directory: Path) -> None:
    assert "is no name of a database" in refusal(directory, "--port", "0", "--database", "Shop; DROP")
    assert not directory.exists()


def test_directory_with_other_files_is_refused_and_keeps_its_owner(directory: Path) -> None:
    directory.mkdir()
    (directory / "letter.txt").write_text("mine")
    owner = directory.stat().st_uid
    assert "neither empty nor a data directory of PostgreSQL" in refusal(directory, "--port", "0")
    assert directory.stat().st_uid == owner


def test_port_of_another_server_is_refused_and_that_server_stays_as_it_was(directory: Path) -> None:
    with serving(directory) as conninfo, psycopg.connect(conninfo, autocommit=True) as other:
        other.execute("ALTER SYSTEM SET work_mem = '5MB'")
        port = str(other.info.port)
        assert "cannot be used" in refusal(directory.with_name("second"), "--port", port, "--database", "shop", status=3)
        assert other.execute("SELECT count(*) FROM pg_database WHERE datname = 'shop'").fetchone() == (0,)
    with serving(directory) as conninfo, psycopg.connect(conninfo) as other:
        assert other.execute("SHOW work_mem").fetchone() == ("5MB",)
