"""What a topic would refuse when a branch commits, without IO. Such a record is refused when it is sent: a prepared branch must commit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from bascule.core.errors import InvalidInput, TooLarge
from bascule.core.kafka_records import Outgoing

#: Maximum overhead of a record in bytes.
RECORD_OVERHEAD_BYTES: Final = 200
#: Allowed difference, in milliseconds, between the clock of this process and the clock of the node that checks a timestamp.
CLOCKS_DIFFER_MS: Final = 1_000
#: Settings of Kafka before 3.6 have one limit for both directions.
_EITHER: Final = "message.timestamp.difference.max.ms"


class TargetRules(NamedTuple):
    """The rules of a topic. A timestamp may differ from the clock of Kafka by up to ``before_ms`` or ``after_ms`` milliseconds."""

    bytes_max: int
    partitions: int
    keyed: bool
    before_ms: float
    after_ms: float

    @classmethod
    def of(cls, settings: Mapping[str, str], partitions: int) -> Self:
        """Return the rules of a topic with these settings."""
        checked = settings.get("message.timestamp.type") != "LogAppendTime"

        def limit_ms(setting: str) -> float:
            found = [float(settings[name]) for name in (setting, _EITHER) if name in settings]
            return min(found) if found and checked else math.inf

        return cls(
            int(settings["max.message.bytes"]),
            partitions,
            "compact" in settings.get("cleanup.policy", ""),
            limit_ms("message.timestamp.before.max.ms"),
            limit_ms("message.timestamp.after.max.ms"),
        )

    def refusal(self, record: Outgoing, size_bytes: int, now_ms: int) -> InvalidInput | None:
        """Return why the topic would refuse a record, or None."""
        topic, ahead_ms = record.topic, record.timestamp_ms - now_ms
        if size_bytes > self.bytes_max:
            return TooLarge(
                f"a record of {size_bytes} bytes is too large for topic {topic!r}: max.message.bytes of the topic is {self.bytes_max}"
            )
        if not -1 <= record.partition < self.partitions:
            return InvalidInput(f"topic {topic!r} has no partition {record.partition}: it has {self.partitions} partitions")
        if self.keyed and record.key is None:
            return InvalidInput(f"a record for topic {topic!r} needs a key, because cleanup.policy of the topic is compact")
        if record.timestamp_ms < 0:
            return InvalidInput(f"invalid timestamp_ms={record.timestamp_ms}; Kafka has no time before 1970")
        if record.timestamp_ms and ahead_ms > self.after_ms - CLOCKS_DIFFER_MS:
            return _out_of_range(record, "after", self.after_ms)
        if record.timestamp_ms and -ahead_ms > self.before_ms - CLOCKS_DIFFER_MS:
            return _out_of_range(record, "before", self.before_ms)
        return None


def size_bytes_of(record: Outgoing) -> int:
    """Return the size of a record in its topic, in bytes, or slightly more."""
    headers = sum(len(name.encode()) + len(value or b"") + 4 for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers + RECORD_OVERHEAD_BYTES


def _out_of_range(record: Outgoing, direction: str, limit_ms: float) -> InvalidInput:
    setting = f"message.timestamp.{direction}.max.ms"
    return InvalidInput(f"topic {record.topic!r} does not accept timestamp_ms={record.timestamp_ms}: its {setting} is {limit_ms:.0f}")
