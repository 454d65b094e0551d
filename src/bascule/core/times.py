"""Times that a person writes: in options of commands, and in requests to the admin server."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

#: The forms, for help and errors.
TIME_FORMS: Final = "a period before now (90s, 30m, 2h, 7d) or a time in ISO 8601 (2026-01-31T08:00:00Z; UTC without a zone)"
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_PERIOD: Final = re.compile(r"([0-9]{1,9})([smhd])")


class WrittenTime(NamedTuple):
    """A time in whole ms since the epoch, rounded up and never negative. ``assumed_utc``: the text has a time without a zone."""

    ms: int
    assumed_utc: bool = False


def written_time(text: str, now: datetime | None = None) -> WrittenTime:
    """Return the time that a text means. Raises ValueError for a text in no form of ``TIME_FORMS``."""
    found = _PERIOD.fullmatch(text)
    try:
        if found:
            return _since_epoch((now or datetime.now(UTC)) - timedelta(**{_UNITS[found[2]]: int(found[1])}))
        said = datetime.fromisoformat(text)
        assumed_utc = said.tzinfo is None
        return _since_epoch(said.replace(tzinfo=UTC) if assumed_utc else said)._replace(assumed_utc=assumed_utc)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r:.60} must be {TIME_FORMS}") from None


def _since_epoch(moment: datetime) -> WrittenTime:
    # Timestamps of records are whole milliseconds: the first one that is not before the time.
    return WrittenTime(max(0, -((_EPOCH - moment) // timedelta(milliseconds=1))))
