"""Times in options of commands."""

from __future__ import annotations

from bascule.cli.output import note
from bascule.core.errors import InvalidInput
from bascule.core.times import written_time


def time_of_option(option: str, text: str) -> int:
    """Return the time in an option, in ms since the epoch, and say so if it is taken as UTC. Raises InvalidInput."""
    try:
        time_ms, assumed_utc = written_time(text)
    except ValueError as error:
        raise InvalidInput(f"{option} {error}") from None
    if assumed_utc:
        note(f"{option} {text} has no time zone; it is taken as UTC")
    return time_ms
