"""A primary with a prepared branch is lost, and a standby that lacks the branch is promoted."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from bascule.embedded.postgres import EmbeddedPostgres
from bascule.testing.xa import ModelLog
from bascule.xa import Vote
from bascule.xa.errors import Code, ResourceFailed
from bascule.xa.log import Decision, LogState, Outcome
from bascule.xa.postgres import PostgresResource
from bascule.xa.recovery import Recoverer
from bascule.xa.xid import branch, new_gtrid
from tests.support.system import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.services]
TABLE = "items"


def copied(primary: EmbeddedPostgres, directory: Path) -> EmbeddedPostgres:
    """Return a standby of a stopped primary that has what the primary had until now."""
    subdirectory = directory / "standby"
    shutil.copytree(primary.data_dir, subdirectory)
    owner = primary.data_dir.stat()
    for each in [subdirectory, *subdirectory.rglob("*")]:
        shutil.chown(each, owner.st_uid, owner.st_gid)
    signal_file = subdirectory / "standby.signal"
    signal_file.touch()
    shutil.chown(signal_file, owner.st_uid, owner.st_gid)
    return EmbeddedPostgres(subdirectory, fsync=False)


def test_branch_that_a_promoted_standby_lacks_is_a_heuristic_hazard() -> None:
    directory, log = Path(tempfile.mkdtemp(prefix="bascule-postgres-")), ModelLog(LogState())
    directory.chmod(0o755)  # PostgreSQL does not run as root
    try:
        primary = EmbeddedPostgres(directory / "primary", fsync=False)
        with primary, psycopg.connect(primary.conninfo) as rows:
            rows.execute(f"CREATE TABLE {TABLE} (item text)")
        with copied(primary, directory) as standby:
            primary.start()
            xid = branch(new_gtrid("shop", 0), "db")
            with closing(PostgresResource("db", primary.conninfo)) as resource:
                resource.start(xid, timeout_s=60).execute(f"INSERT INTO {TABLE} VALUES ('lost')")
                resource.end(xid, success=True)
                assert resource.prepare(xid) is Vote.YES
                token = resource.token(xid)
                primary.kill()
                with pytest.raises(ResourceFailed):
                    resource.commit(xid)
            number = int(token.partition("@")[0])
            with psycopg.connect(standby.conninfo, autocommit=True) as rows:
                rows.execute("SELECT pg_promote()")
                wait_for(lambda: rows.execute("SELECT pg_is_in_recovery()").fetchone() == (False,), "the promotion")
                while _next_number(rows) <= number:
                    rows.execute(f"INSERT INTO {TABLE} VALUES ('other')")
                assert rows.execute("SELECT pg_xact_status(%s::xid8)", (str(number),)).fetchone() == ("committed",)
            log.decide(Decision(xid.gtrid, Outcome.COMMIT, ("db",), 0, "shop", (token,)))
            with closing(PostgresResource("db", standby.conninfo)) as resource:
                done = Recoverer("shop", log, [resource], by="later", patient=False).run()
            assert [(each.xid, each.code) for each in done.heuristics] == [(xid, Code.XA_HEURHAZ)]
    finally:
        shutil.rmtree(directory)


def _next_number(rows: psycopg.Connection[tuple[object, ...]]) -> int:
    row = rows.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    assert row is not None
    return int(str(row[0]))
