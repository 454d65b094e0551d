"""PostgreSQL gives the number of a transaction to another one after a crash, which the status of a commit must not hide."""

from __future__ import annotations

import os
import signal
from typing import Any

import psycopg
import pytest

from bascule.testing.xa import ModelLog
from bascule.xa import TransactionInDoubt, TransactionManager, Vote, Xid
from bascule.xa.postgres import PostgresResource
from tests.support.postgres import temporary_postgres
from tests.support.system import wait_for


class CrashingResource(PostgresResource):
    """Its server crashes before a commit in one phase; another transaction commits after the restart."""

    number: object = None

    def __init__(self, conninfo: str) -> None:
        super().__init__("db", conninfo)
        self.conninfo = conninfo

    def vote_alone(self, raw: psycopg.Connection[Any], xid: Xid) -> Vote:
        vote = super().vote_alone(raw, xid)
        os.kill(raw.info.backend_pid, signal.SIGKILL)  # the server then ends all sessions, and restarts
        wait_for(self._later, "PostgreSQL to restart")
        return vote

    def _later(self) -> bool:
        try:
            with psycopg.connect(self.conninfo) as connection:
                connection.execute("INSERT INTO rows VALUES ('later')")
                self.number = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
        except psycopg.OperationalError:
            return False
        return True


@pytest.mark.slow
def test_one_phase_commit_is_in_doubt_after_a_crash_that_lost_its_transaction_number() -> None:
    """PostgreSQL gives the number of a transaction to another one if a crash comes before the number is on the disk."""
    with temporary_postgres() as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE rows (id text)")
            connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
            connection.execute("SELECT pg_reload_conf()")
        resource = CrashingResource(postgres.conninfo)
        with TransactionManager("shop", ModelLog(), [resource]) as manager:
            transaction = manager.begin()
            handle = transaction.enlist(resource)
            handle.execute("INSERT INTO rows VALUES ('mine')")
            number = handle.execute("SELECT pg_current_xact_id()::text").fetchone()
            with pytest.raises(TransactionInDoubt):
                transaction.commit()
        assert resource.number == number  # otherwise this test shows nothing
        with psycopg.connect(postgres.conninfo) as connection:
            assert connection.execute("SELECT id FROM rows").fetchall() == [("later",)]
