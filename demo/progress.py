"""The progress of the demo: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESH_PER_S = 4
#: Interval of the plain lines.
PLAIN_S = 5.0


@dataclass(frozen=True)
class PathCounts:
    """The counts of one path so far."""

    path: str
    sent: int
    in_kafka: int
    #: The messages that JMS consumers have received; None for a path that ends in Kafka.
    delivered: int | None = None
    kills: int = 0

    @property
    def lag(self) -> int:
        """Return the number of messages that are sent and have not arrived."""
        # The counts are read one after the other, so a message may have arrived that is not counted as sent yet.
        return max(0, self.sent - (self.in_kafka if self.delivered is None else self.delivered))

    def cells(self) -> list[str]:
        """Return the cells of the row in the live table."""
        delivered = "" if self.delivered is None else f"{self.delivered:,}"
        return [self.path, f"{self.sent:,}", f"{self.in_kafka:,}", delivered, f"{self.lag:,}", f"{self.kills:,}"]

    def text(self) -> str:
        """Return the counts for a plain line."""
        delivered = "" if self.delivered is None else f", {self.delivered:,} delivered"
        return f"{self.path} {self.sent:,} sent, {self.in_kafka:,} in Kafka{delivered}, lag {self.lag:,}"


class Progress:
    """Shows the counts of all paths until it is left."""

    def __init__(self, console: Console, read: Callable[[], list[PathCounts]], plain_s: float = PLAIN_S) -> None:
        """``read`` returns the present counts. ``plain_s`` is the interval of the plain lines."""
        self._console, self._read, self._plain_s = console, read, plain_s
        self._began = time.monotonic()
        self._over = threading.Event()
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._opened.enter_context(Live(get_renderable=self.table, console=self._console, refresh_per_second=REFRESH_PER_S))
        else:
            thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            thread.start()
            self._opened.callback(thread.join)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._opened.close()

    def table(self) -> Table:
        """Return the live table."""
        seconds = time.monotonic() - self._began
        table = Table(title=f"{seconds:.0f} s", title_justify="left", header_style="bold")
        table.add_column("path")
        for title in ("sent", "in Kafka", "delivered", "lag", "kills"):
            table.add_column(title, justify="right")
        for counts in self._read():
            table.add_row(*counts.cells())
        return table

    def _print_lines(self) -> None:
        while not self._over.wait(self._plain_s):
            counts = self._read()
            kills = max((each.kills for each in counts), default=0)
            line = "; ".join(each.text() for each in counts)
            self._console.print(f"{time.monotonic() - self._began:.0f} s: {line}; kills {kills}", soft_wrap=True, highlight=False)
