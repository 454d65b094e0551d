"""Positions: the one record of the progress of a pipeline (docs/adr/0010-positions.md).

A position is a record of the compacted topic ``bascule.positions``, written in the same Kafka transaction as the output that it covers. The
position alone decides where a pipeline continues; Spark's checkpoints and consumer groups decide nothing.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields
from typing import Any, Final

from bascule.core.errors import BasculeError, Scope

#: The version of the stored format. Version 2 has the leader epoch. Version 1 has no field ``version``.
VERSION = 2
VERSIONS_READ = (1, VERSION)
#: An unknown leader epoch: in a position of version 1, and if Kafka does not report one.
UNKNOWN_EPOCH = -1
#: Pipeline name of the common position, which is the position of the default group. The position of another group has the name GROUP
#: followed by the name of the group, and a divert with its own position has the name DIVERT followed by its own name.
COMMON = "diverts"
GROUP = "group:"
DIVERT = "divert:"
#: The name of the group of diverts without a group.
DEFAULT_GROUP = ""
#: Prefix of the pipeline name of an ingress.
INGRESS = "ingress:"
#: Number of partitions for the keys: enough that a writer seldom waits for the open transaction of another writer.
POSITION_PARTITIONS = 16
#: The note that a driver publishes with the lag of its running pipelines when it is stopped.
ENDED = "the pipelines were stopped; start them again"
#: Prefix of the pipeline name for the position where a divert once began.
BEGUN = "begun:"


class PositionLost(BasculeError):
    """Raised when the position of a known pipeline is missing or belongs to another topic. Bascule does not guess: the pipeline stops."""

    retriable = False
    scope = Scope.PIPELINE


class PositionTaken(BasculeError):
    """Raised when another driver has taken over the pipeline. This driver must stop."""

    retriable = False
    scope = Scope.PROCESS


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a pipeline in one source partition.

    ``offset`` is the next offset to take. ``epoch``, ``sequence`` and ``exclusive`` are the state of the journal's fence. The writer of a
    Spark job counts batches instead and stores in ``sequence`` the number of messages of the last batch (-1: unknown). ``members`` are the
    diverts that share the position, and ``owner`` is the driver run that holds it. ``leader_epoch`` is a leader epoch of the source
    partition in which its log reached ``offset`` (``bascule.writer.lineage``).
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    epoch: int = -1
    sequence: int = -1
    exclusive: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    owner: str = ""
    leader_epoch: int = UNKNOWN_EPOCH

    @property
    def vacant(self) -> bool:
        """Return True if no pipeline continues from here: the position only says what is covered, and keeps no records of its source."""
        return not self.members and not self.owner

    def encode(self) -> bytes:
        """Return the value of the record."""
        return _JSON.encode({"version": VERSION, **{name: getattr(self, name) for name in _FIELDS}}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Position:
        """Return the position in the value of a record. Raises PositionLost if the value is damaged or has a newer format."""
        try:
            said: dict[str, Any] = json.loads(value)
            version = said.pop("version", 1)
            if version not in VERSIONS_READ or isinstance(version, bool):
                raise PositionLost(
                    f"position format {version!r}; this version of Bascule reads {VERSIONS_READ[0]} to {VERSION}. Upgrade Bascule"
                )
            said.update({name: tuple(said[name]) for name in _LISTS if name in said})
            position = cls(**said)
        except (ValueError, TypeError, AttributeError) as error:
            raise PositionLost(f"unreadable position {value[:200]!r}: {error}") from error
        return position


_FIELDS: Final = tuple(each.name for each in fields(Position))
#: Fields that are lists in JSON.
_LISTS: Final = ("exclusive", "members")
_JSON: Final = json.JSONEncoder(separators=(",", ":"))


def position_key(pipeline: str, topic: str, partition: int) -> str:
    """Return the key of a pipeline's position in a source partition."""
    return f"{pipeline}/{topic}/{partition}"


def group_pipeline(group: str) -> str:
    """Return the pipeline name of the position that the diverts of a group share."""
    return COMMON if group == DEFAULT_GROUP else f"{GROUP}{group}"


def lag_group(prefix: str, bridge: str, pipeline: str) -> str:
    """Return the consumer group that shows the lag of a pipeline and why the pipeline does not move."""
    return f"{prefix}.{bridge}.{pipeline}"


def position_partition(key: str) -> int:
    """Return the partition of ``bascule.positions`` that holds ``key``."""
    return zlib.crc32(key.encode()) % POSITION_PARTITIONS
