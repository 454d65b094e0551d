"""Rows that a Spark job writes to JMS, as records of the ingress topic."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from bascule.core.destination import ADDRESS_MAX
from bascule.core.errors import BadRecord
from bascule.core.topics import MESSAGE_BYTES_MAX
from bascule.pipelines.sink import DestinationWriter

WRITER = DestinationWriter({"id": "w", "address": "q"}, {}, StructType([StructField("value", StringType())]))


@pytest.mark.parametrize("size", [ADDRESS_MAX + 1, 70_000])
def test_row_with_too_long_address_is_refused(size: int) -> None:
    assert WRITER._encoded({"value": "a", "address": "x" * ADDRESS_MAX})
    with pytest.raises(BadRecord, match="an address has 1 to 1000 characters"):
        WRITER._encoded({"value": "a", "address": "x" * size})


def test_row_with_too_large_message_is_refused() -> None:
    with pytest.raises(BadRecord, match=f"the limit is {MESSAGE_BYTES_MAX}"):
        WRITER._encoded({"value": "x" * MESSAGE_BYTES_MAX})
