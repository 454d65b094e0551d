"""``bascule up`` as a user starts it: broker and embedded Kafka in a directory of their own, on free ports, without pipelines."""

from __future__ import annotations

from pathlib import Path

from tests.support.up import Up


class BasculeUp(Up):
    """The system under measurement."""

    name = "bascule"
    durability = "Bascule: Kafka acks=all on one node, page cache (no fsync before the answer), as Kafka's default is"

    def __init__(self, directory: Path, *options: str) -> None:
        """``options`` are added to the command line."""
        super().__init__(directory, "--no-pipelines", *options)

    @property
    def processes(self) -> dict[str, int]:
        """Return process ids by part."""
        return {part: pid for part, pid in self.pids.items() if pid is not None}
