"""``bascule up`` as a user starts it: broker and embedded Kafka in a directory of their own, on free ports, no pipelines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Self

from bascule.embedded.process import Child

START_TIMEOUT_S = 120.0
READY = re.compile(r"^ready (amqp://\S+) kafka=(\S+) admin=(\S+)", re.MULTILINE)


class BasculeUp:
    """A running ``bascule up``."""

    name = "bascule"
    durability = "Bascule: Kafka acks=all on one node, page cache (no fsync before the answer), as Kafka's default is"

    def __init__(self, directory: Path, *options: str) -> None:
        """``options`` are added to the command line."""
        self.directory = directory
        self._log = directory / "up.log"
        ports = ("--amqp-port", "0", "--kafka-port", "0", "--admin-port", "0")
        command: list[str | Path] = [
            Path(sys.executable).with_name("bascule"),
            "up",
            "--data-dir",
            directory / "data",
            *ports,
            "--no-pipelines",
            *options,
        ]
        self._child = Child(command, log_file=self._log, name="bascule up")

    @property
    def url(self) -> str:
        """Where AMQP clients connect."""
        return self._ready[0]

    @property
    def kafka(self) -> str:
        """The embedded Kafka's address."""
        return self._ready[1]

    @property
    def admin(self) -> str:
        """Where the admin server answers."""
        return self._ready[2]

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by part."""
        pids = json.loads((self.directory / "data" / "pids.json").read_text())
        return {"broker": pids["broker"], "kafka": pids["kafka"]}

    @property
    def _ready(self) -> tuple[str, str, str]:
        return READY.findall(self._log.read_text())[-1]  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        """Start it; returns when it serves. Raises NotStarted."""
        self._child.start()
        self._child.wait_ready(lambda: READY.search(self._log.read_text()) is not None, START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self._child.stop()
