"""Times that a person writes."""

from __future__ import annotations

from datetime import datetime

import pytest

from bascule.core.times import WrittenTime, written_time
from bascule.kafka.planned_moves import OffsetTarget
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

NOW = datetime.fromisoformat("2026-03-01T08:00:00Z")
NOW_MS = 1_772_352_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", WrittenTime(NOW_MS - 7_200_000)),
        ("90s", WrittenTime(NOW_MS - 90_000)),
        ("99999999d", None),
        ("2026-03-01T06:00:00Z", WrittenTime(NOW_MS - 7_200_000)),
        ("2026-03-01T09:00:00+03:00", WrittenTime(NOW_MS - 7_200_000)),
        ("2026-03-01T06:00:00", WrittenTime(NOW_MS - 7_200_000, assumed_utc=True)),
        ("2026-03-01T06:00:00.0001Z", WrittenTime(NOW_MS - 7_200_000 + 1)),
        ("2026-03-01", WrittenTime(NOW_MS - 28_800_000, assumed_utc=True)),
        ("0001-01-01T00:00:00+14:00", WrittenTime(0)),
        *((text, None) for text in ("yesterday", "2h ago", "-1h", "99999999999999d", "\u0663h", "")),
    ],
)
def test_time_is_a_period_before_now_or_a_time_with_or_without_a_zone(text: str, expected: WrittenTime | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="must be a period before now"):
            written_time(text, NOW)
    else:
        assert written_time(text, NOW) == expected


def test_positions_move_to_the_same_times() -> None:
    assert OffsetTarget.parsed("2026-03-01T06:00:00") == OffsetTarget("time", NOW_MS - 7_200_000)
    assert OffsetTarget.parsed("1h").at == "time"


@pytest.mark.parametrize(
    "command",
    [("why", "ID:1", "--since"), ("redrive", "list", "--since"), ("redrive", "list", "--until"), ("divert", "offsets", "x", "--to")],
)
def test_commands_take_the_same_forms(command: tuple[str, ...], bascule: Bascule) -> None:  # noqa: F811 - a fixture
    option = command[-1]
    assert f"{option} 'x' must be a period before now (90s, 30m, 2h, 7d)" in bascule(*command, "x").stderr
    assert f"{option} 2026-01-31 has no time zone; it is taken as UTC" in bascule(*command, "2026-01-31", *_NO_BROKER).stderr


_NO_BROKER = ("--config", "/no/where")
