"""The mark of topics that `bascule restore` has created and not completed: a value of ``retention.ms`` that nobody would choose.

The value is so long that Kafka deletes nothing. A compacted topic does not use the setting, and keeps it. No part of Bascule starts on a
topic with a mark (``bascule.kafka.guards``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SETTING: Final = "retention.ms"
#: Records are being written. (Users set the largest number, 2**63 - 1, for topics that are kept for ever.)
WRITING: Final = str((1 << 63) - 2)
#: Marks of ``bascule.ingress`` after all records were written: from this number on, with 60 bits of the digest of the restore.
_WRITTEN_MIN: Final = 1 << 62
_DIGEST_BITS: Final = 60


def written(digest: str) -> str:
    """Return the mark of a restore that has written all its records. ``digest`` (hexadecimal digits) identifies backup and options."""
    return str(_WRITTEN_MIN + int(digest[: _DIGEST_BITS // 4], 16))


def is_marked(settings: Mapping[str, str]) -> bool:
    """Return whether a topic with these settings belongs to a restore that is not complete."""
    value = settings.get(SETTING, "")
    return value == WRITING or (value.isdigit() and _WRITTEN_MIN <= int(value) < _WRITTEN_MIN + (1 << _DIGEST_BITS))
