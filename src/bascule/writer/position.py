"""Positions: the one record of the progress of a pipeline (docs/adr/0010-positions.md).

A position is a record of the compacted topic ``bascule.positions``, written in the same Kafka transaction as the output that it covers. The
position alone decides where a pipeline continues; Spark's checkpoints and consumer groups decide nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from bascule.core.errors import BasculeError, Scope
from bascule.writer.carried import NOTHING_CARRIED, CarriedCounts

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
#: Where a pipeline without a position begins, and where an administrator moves one.
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
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
#: Prefix of the key that says which request of an administrator has last moved a pipeline's positions, followed by the pipeline.
MOVED = "moved:"
#: Prefix of the key that says to which definition made at run time a pipeline's positions belong, followed by the pipeline.
DEFINED = "defined:"


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
    partition in which its log reached ``offset`` (``bascule.writer.lineage``). ``carried`` is stored in a header, and is not compared.
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
    carried: CarriedCounts = field(default=NOTHING_CARRIED, compare=False)

    @property
    def vacant(self) -> bool:
        """Return True if no pipeline continues from here: the position only says what is covered, and keeps no records of its source."""
        return not self.members and not self.owner

    def encode(self) -> bytes:
        """Return the value of the record."""
        return _JSON.encode({"version": VERSION, **{name: getattr(self, name) for name in _FIELDS}}).encode()

    @classmethod
    def decode(cls, value: bytes, carried: bytes | None = None) -> Position:
        """Return the position in the value of a record, with the counts in its header.

        Raises PositionLost if the value is damaged or has a newer format.
        """
        try:
            said: dict[str, Any] = json.loads(value)
            version = said.pop("version", 1)
            if version not in VERSIONS_READ or isinstance(version, bool):
                raise PositionLost(
                    f"position format {version!r}; this version of Bascule reads {VERSIONS_READ[0]} to {VERSION}. Upgrade Bascule"
                )
            said.update({name: tuple(said[name]) for name in _LISTS if name in said})
            position = cls(**said, carried=CarriedCounts.decode(carried))
        except (ValueError, TypeError, AttributeError) as error:
            raise PositionLost(f"unreadable position {value[:200]!r}: {error}") from error
        return position


_FIELDS: Final = tuple(each.name for each in fields(Position) if each.compare)
#: Fields that are lists in JSON.
_LISTS: Final = ("exclusive", "members")
_JSON: Final = json.JSONEncoder(separators=(",", ":"))


def position_key(pipeline: str, topic: str, partition: int) -> str:
    """Return the key of a pipeline's position in a source partition."""
    return f"{pipeline}/{topic}/{partition}"


class MovedMark(NamedTuple):
    """What a key with MOVED says: the last request to move positions of a pipeline that a driver has handled.

    ``moved`` is how many positions moved; 0 if the request was refused, with the ``reason``. ``number`` is how many requests were handled,
    this one included. It is stored in the fields of a position, so that earlier versions can read it.
    """

    request: str = ""
    moved: int = 0
    number: int = 0
    reason: str = ""

    @classmethod
    def of(cls, stored: Position | None) -> MovedMark:
        """Return the mark in the position of its key. Earlier versions have stored no number and no reason."""
        return NEVER_MOVED if stored is None else cls(stored.owner, stored.offset, max(1, stored.sequence), stored.topic)

    def position(self) -> Position:
        """Return the position to store."""
        return Position(self.reason, "", 0, self.moved, sequence=self.number, owner=self.request)


NEVER_MOVED: Final = MovedMark()


def defined_mark(definition: str) -> Position:
    """Return the value of a key with DEFINED: the ``owner`` is the id of the definition."""
    return Position("", "", 0, 0, owner=definition)


def group_pipeline(group: str) -> str:
    """Return the pipeline name of the position that the diverts of a group share."""
    return COMMON if group == DEFAULT_GROUP else f"{GROUP}{group}"


def lag_group(prefix: str, bridge: str, pipeline: str) -> str:
    """Return the consumer group that shows the lag of a pipeline and why the pipeline does not move."""
    return f"{prefix}.{bridge}.{pipeline}"


def position_partition(key: str) -> int:
    """Return the partition of ``bascule.positions`` that holds ``key``."""
    return zlib.crc32(key.encode()) % POSITION_PARTITIONS


def with_counts_kept(
    before: Mapping[str, Position | None], after: Mapping[str, Position | None], heir: str, names: Collection[str]
) -> dict[str, Position | None]:
    """Return positions that a driver writes, by key, with the counts of what was carried under the stored ones.

    A key keeps its counts, whatever position it gets. ``heir`` is a key of ``after`` that gets the counts of the keys that end. Only the
    counts of the pipelines ``names`` are kept.
    """
    kept = {key: found.carried if (found := before.get(key)) is not None else NOTHING_CARRIED for key in after}
    for key, position in after.items():
        if position is None:
            kept[heir] = kept[heir].with_pipelines_of(kept[key])
    return {key: None if position is None else replace(position, carried=kept[key].only(names)) for key, position in after.items()}
