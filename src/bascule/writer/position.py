"""Positions: the one record of what a pipeline has done (docs/adr/0010-positions.md).

A position is a record of the compacted topic ``bascule.positions``, written in the same Kafka transaction as the output it stands for.
It alone decides where a pipeline goes on; Spark's checkpoints and consumer groups decide nothing.
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
#: The leader epoch where none is known: of a position of version 1, and where Kafka says none.
UNKNOWN_EPOCH = -1
#: The pipeline of all diverts that stand at one place; one that stands elsewhere has a position under this and its name.
COMMON = "diverts"
DIVERT = "divert:"
#: The pipeline of an ingress is this and its name.
INGRESS = "ingress:"
#: Keys are spread over this many partitions, so that a writer seldom waits for another one's open transaction.
POSITION_PARTITIONS = 16
#: What a driver that is stopped notes of pipelines that ran until then, beside their lag.
ENDED = "the pipelines were stopped: start them again"
#: Before the name of a divert, the key of where it once began.
BEGUN = "begun:"


class PositionLost(BasculeError):
    """The position of a known pipeline is missing or belongs to another topic. Nothing is guessed: the pipeline stops."""

    retriable = False
    scope = Scope.PIPELINE


class PositionTaken(BasculeError):
    """Another driver has taken the pipeline over; this one must stop."""

    retriable = False
    scope = Scope.PROCESS


@dataclass(frozen=True, slots=True)
class Position:
    """How far a pipeline has come in one source partition.

    ``offset`` is the next one to take. ``epoch``, ``sequence`` and ``exclusive`` are where the journal's fence stands; a Spark
    job's writer, which counts batches, keeps with ``sequence`` how many messages the last one had (-1: not known).
    ``members`` are the diverts that share the position, ``owner`` is the driver run that holds it. ``leader_epoch`` is a leader epoch of
    the source partition as of which its log reached ``offset`` (``bascule.writer.lineage``).
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
        """Nobody goes on from here: it says how far everything is answered for, and keeps nothing of its source."""
        return not self.members and not self.owner

    def encode(self) -> bytes:
        """The record's value."""
        return _JSON.encode({"version": VERSION, **{name: getattr(self, name) for name in _FIELDS}}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Position:
        """The position that a record's value holds. Raises PositionLost for damage and for a format of a newer version."""
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
    """The key of a pipeline's position in a source partition."""
    return f"{pipeline}/{topic}/{partition}"


def lag_group(prefix: str, bridge: str, pipeline: str) -> str:
    """The consumer group that shows how far a pipeline is, and why it stands still."""
    return f"{prefix}.{bridge}.{pipeline}"


def position_partition(key: str) -> int:
    """The partition of ``bascule.positions`` that holds ``key``."""
    return zlib.crc32(key.encode()) % POSITION_PARTITIONS
