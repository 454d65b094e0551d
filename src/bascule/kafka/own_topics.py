"""Topics of Bascule as the broker and the pipelines create them: the purpose of each, and the settings that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bascule.core import topics as names
from bascule.core.log import get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import TABLE_CONFIG
from bascule.kafka.guards import Finding, TopicRole, guard
from bascule.kafka.replication import CLUSTER_DEFAULT, replication_of
from bascule.writer.position import POSITION_PARTITIONS

_log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class OwnTopic:
    """The purpose of a topic, and the settings for its creation. ``partitions`` None: one is created, any number is accepted."""

    role: TopicRole
    settings: Mapping[str, str]
    partitions: int | None = 1


_SAFE = {"unclean.leader.election.enable": "false"}
_LARGE = {"max.message.bytes": str(RECORD_BYTES_MAX), **_SAFE}
#: A trimmed part leaves the disk with its segment, which must have room for the largest record.
_SEGMENTS = {"segment.bytes": str(2 * RECORD_BYTES_MAX)}
_LOG = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", **_SEGMENTS, **_LARGE}

JOURNAL: Final = OwnTopic(TopicRole.JOURNAL, _LOG)
INGRESS: Final = OwnTopic(TopicRole.LOG, _LOG)
#: A start reads the whole topic, and Kafka compacts only closed segments: with its default of 1 GiB, old snapshots would be read for weeks.
SNAPSHOTS: Final = OwnTopic(TopicRole.TABLE, {"cleanup.policy": "compact", "segment.bytes": str(16 << 20), **_LARGE})
STORE: Final = OwnTopic(TopicRole.STORE, {"cleanup.policy": "compact", **_SEGMENTS, **_LARGE})
#: A reader begins with the whole partition, so it is kept small. 1 MiB is the smallest segment.
POSITIONS: Final = OwnTopic(
    TopicRole.TABLE,
    {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.01", **_SAFE},
    POSITION_PARTITIONS,
)
#: A reader begins with the whole topic. 1 MiB is the smallest segment.
CONTROL: Final = OwnTopic(
    TopicRole.TABLE, {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.01", **_SAFE}
)
#: A mark for each transaction of a redrive, until the dead letters are deleted.
REDRIVE: Final = CONTROL
#: Nobody reads a message again. 1 MiB is the smallest segment.
BROKERS: Final = OwnTopic(
    TopicRole.MESSAGES, {"cleanup.policy": "delete", "retention.ms": "3600000", "segment.bytes": str(1 << 20), **_SAFE}
)
#: The cluster decides how long they are kept, because people read them.
DEAD_LETTERS: Final = OwnTopic(TopicRole.OUTPUT, _LARGE, None)
DECISIONS: Final = OwnTopic(TopicRole.TABLE, TABLE_CONFIG)
#: In the next two topics, each process mostly writes to one partition, so few of them wait for an open transaction of another.
BRANCH_PARTITIONS: Final = 16
#: Accepts all records that the branches' own topics may accept.
SIDE: Final = OwnTopic(
    TopicRole.LOG, {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", **_LARGE}, BRANCH_PARTITIONS
)
BRANCHES: Final = OwnTopic(TopicRole.TABLE, TABLE_CONFIG, BRANCH_PARTITIONS)
COMMITTED_PARTITIONS: Final = 8
COMMITTED: Final = OwnTopic(TopicRole.TABLE, TABLE_CONFIG, COMMITTED_PARTITIONS)
#: Topics that programs create, by their default names.
SHARED: Final[Mapping[str, OwnTopic]] = {
    names.DECISIONS: DECISIONS,
    f"{names.XA_PREFIX}.side": SIDE,
    f"{names.XA_PREFIX}.log": BRANCHES,
    names.OUTBOUND: COMMITTED,
}


def ensure(
    kafka: Mapping[str, Any],
    wanted: Mapping[str, OwnTopic],
    others: Mapping[str, TopicRole] | None = None,
    *,
    replication_factor: int = CLUSTER_DEFAULT,
    min_insync_replicas: int | None = None,
    record_bytes: int = RECORD_BYTES_MAX,
    topics: Topics | None = None,
) -> list[Finding]:
    """Create topics (by name) that do not exist, and check all of them, and ``others`` of one partition if they exist.

    Returns the weak settings. ``min_insync_replicas`` None is the default of the cluster. ``topics`` is a client to
    use in place of an own one. Raises UnsafeTopic for an unsafe setting, Unavailable, InvalidInput.
    """
    topics = topics or Topics(kafka)
    there = topics.partitions()
    replicas = {} if min_insync_replicas is None else {"min.insync.replicas": str(min_insync_replicas)}
    for name, topic in wanted.items():
        if name not in there:
            topics.create(name, topic.partitions or 1, {**topic.settings, **replicas}, replication_factor=replication_factor)
    topics.await_visible(wanted)
    looked_at = {name: (role, 1) for name, role in (others or {}).items()} | expected(wanted)
    return guard(topics, looked_at, record_bytes)


def prepare(kafka: Mapping[str, Any], wanted: Mapping[str, OwnTopic]) -> None:
    """Call ``ensure`` for a user's program, whose settings may say how many replicas new topics get, and log weak settings."""
    replication = replication_of(kafka)
    for finding in ensure(kafka, wanted, replication_factor=replication.factor, min_insync_replicas=replication.min_insync):
        _log.warning("weak topic setting", finding=finding)


def expected(topics: Mapping[str, OwnTopic]) -> dict[str, tuple[TopicRole, int | None]]:
    """Return the topics as ``guard`` expects them."""
    return {name: (topic.role, topic.partitions) for name, topic in topics.items()}
