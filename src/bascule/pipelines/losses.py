"""Reasons why a pipeline cannot continue from its position: records that it has not read are gone."""

from __future__ import annotations

from bascule.kafka.lineage import PartitionLineage
from bascule.writer.position import Position, PositionLost

#: Advice for an operator who accepts the loss.
LEAVE_OUT = "To restart from the start offset, start the pipelines once without the ingress or with an ingress without the topic"


def loss_of(pipeline: str, at: Position, topic_id: str, first: int, lineage: PartitionLineage) -> PositionLost | None:
    """Return why a pipeline cannot continue from its position, or None if it can or if the position is vacant.

    ``first`` is the first offset that the source partition has. Raises Unavailable.
    """
    if at.vacant:
        return None
    if at.topic_id != topic_id:
        return PositionLost(f"topic {at.topic!r} was recreated since pipeline {pipeline!r} last ran; its old offsets are invalid")
    if at.offset < first:
        return PositionLost(
            f"pipeline {pipeline!r} is at offset {at.offset} of {at.topic}-{at.partition}, and the first record is at offset {first}:"
            " the records in between were deleted before the pipeline read them"
        )
    try:
        lineage.check_tail(at)
    except PositionLost as error:
        return PositionLost(f"pipeline {pipeline!r} cannot continue: {error}")
    return None
