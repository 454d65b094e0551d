"""The progress of a command on standard error: a line that changes on a terminal, and elsewhere a line from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bascule.cli.output import note, printable

#: Seconds between two texts: on a terminal, where a text replaces the one before, and elsewhere.
TERMINAL_S: Final = 0.5
ELSEWHERE_S: Final = 10.0
#: Receives a function that returns the text. The function is called only if the text is shown.
Show = Callable[[Callable[[], str]], None]


@contextmanager
def progress(begin: str, now_s: Callable[[], float] = time.monotonic) -> Iterator[Show]:
    """Yield a function that shows the progress. A terminal shows ``begin`` at once, and nothing after the end."""
    if not sys.stderr.isatty():
        yield _from_time_to_time(note, ELSEWHERE_S, now_s)
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(begin)) as status:
        yield _from_time_to_time(lambda text: status.update(Text(printable(text))), TERMINAL_S, now_s)


def _from_time_to_time(show: Callable[[str], None], interval_s: float, now_s: Callable[[], float]) -> Show:
    next_s = now_s() + interval_s

    def shown(text: Callable[[], str]) -> None:
        nonlocal next_s
        if now_s() >= next_s:
            next_s = now_s() + interval_s
            show(text())

    return shown
