"""A message as a row of a Spark DataFrame."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bascule.core.destination import Routing
from bascule.journal.records import Send, SendFlag
from bascule.pipelines.arrow_rows import ARROW_SCHEMA
from bascule.pipelines.rows import malformed_row, message_row
from tests.support.journal import text_message

NEVER_MS = 2**63 - 1
TIMES = [(1_000, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)), (0, None), (NEVER_MS, None)]


@pytest.mark.parametrize(("expires_ms", "expiration"), TIMES, ids=["soon", "no expiry", "never"])
def test_row_times_are_utc_and_null_beyond_spark_range(expires_ms: int, expiration: datetime | None) -> None:
    body = text_message("x", expiration_ms=expires_ms)
    send = Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 2_000, expires_ms, 0, "q", (1,), (), (), None, body)
    for row in (message_row(send, 1, 0, 1, 0), malformed_row(send, 1, 0, 1, 0, ValueError("x"))):
        named = dict(zip(ARROW_SCHEMA.names, row, strict=True))
        assert (named["timestamp"], named["expiration"]) == (datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC), expiration)
