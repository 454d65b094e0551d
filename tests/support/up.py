"""A ``bascule up`` as a user starts it, on free ports, in its own directory: for the demo and the benchmark."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

from bascule.embedded.process import Child
from tests.support.speed import SLOWNESS

#: Longest start, with pipelines, on a loaded machine.
START_TIMEOUT_S = 180.0 * SLOWNESS
STOP_TIMEOUT_S = 60.0 * SLOWNESS
ANSWER_S = 10.0
READY = re.compile(r"^ready (amqp://\S+) kafka=(\S+) admin=(\S+)\n", re.MULTILINE)


class Up:
    """A running ``bascule up``. Enter it in a thread that stays."""

    def __init__(self, directory: Path, *options: str | Path) -> None:
        """Prepare the command. ``options`` are added to the command line."""
        self.data_dir = directory / "data"
        self._log = directory / "up.log"
        command = Path(sys.executable).with_name("bascule")
        ports = ("--amqp-port", "0", "--kafka-port", "0", "--admin-port", "0")
        self._child = Child([command, "up", "--data-dir", self.data_dir, *ports, *options], log_file=self._log, name="bascule up")

    def __enter__(self) -> Self:
        """Start the command; return when it is ready. Raises NotStarted."""
        self._child.start()
        self._child.wait_ready(lambda: READY.search(self._log.read_text()) is not None, START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the command."""
        self._child.stop(STOP_TIMEOUT_S)

    @property
    def url(self) -> str:
        """Return the URL for AMQP clients."""
        return self._ready[0]

    @property
    def kafka(self) -> str:
        """Return the address of the embedded Kafka."""
        return self._ready[1]

    @property
    def admin(self) -> str:
        """Return the URL of the admin server."""
        return self._ready[2]

    @property
    def _ready(self) -> tuple[str, str, str]:
        return READY.findall(self._log.read_text())[-1]  # type: ignore[no-any-return]

    @property
    def pids(self) -> dict[str, int | None]:
        """Return process ids by part; None for a part that does not run."""
        found: dict[str, int | None] = json.loads((self.data_dir / "pids.json").read_text())
        return found

    def ask(self, path: str) -> Any:
        """Return what the admin server shows under a path. Raises OSError."""
        with urllib.request.urlopen(f"{self.admin}/{path}", timeout=ANSWER_S) as answer:
            return json.load(answer)
