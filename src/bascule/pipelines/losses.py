"""Why a pipeline cannot go on from its position: what it has not read is gone."""

from __future__ import annotations

from bascule.kafka.lineage import PartitionLineage
from bascule.writer.position import Position, PositionLost

#: What an operator may do who knows what is lost.
LEAVE_OUT = "To begin anew with what the topic has, start the pipelines once with an ingress that does not name it, or without the ingress"


def loss_of(pipeline: str, at: Position, topic_id: str, first: int, lineage: PartitionLineage) -> PositionLost | None:
    """Return why a pipeline cannot go on from where it stands; None when it can, and where nobody wants to.

    ``first`` is the first offset that the source partition has. Raises Unavailable.
    """
    if at.vacant:
        return None
    if at.topic_id != topic_id:
        return PositionLost(f"topic {at.topic!r} was deleted and created again since pipeline {pipeline!r} last ran")
    if at.offset < first:
        return PositionLost(
            f"pipeline {pipeline!r} stands at offset {at.offset} of {at.topic}-{at.partition}, whose records begin at {first}:"
            " those between were deleted before they were taken"
        )
    try:
        lineage.check_tail(at)
    except PositionLost as error:
        return PositionLost(f"pipeline {pipeline!r} cannot go on: {error}")
    return None
