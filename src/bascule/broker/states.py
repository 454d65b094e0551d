"""The states of an epoch and of a broker process, and the events that change them.

A transition that is not in its table is a fault of the broker. The documentation draws the tables.
"""

from __future__ import annotations

import enum
from typing import Final

from bascule.core.states import Transitions


class EpochState(enum.StrEnum):
    """The state of an epoch."""

    FOLLOWING = "following"  # another broker may serve
    STARTING = "starting"  # the start record is in flight to Kafka
    LOADING = "loading"  # the start record is stored; the state before it is being read
    SERVING = "serving"
    STALLED = "stalled"  # Kafka has not answered appends in time
    FENCED = "fenced"  # another broker has replaced this one
    ENDED = "ended"


class EpochEvent(enum.StrEnum):
    """The events that change the state of an epoch."""

    ELECTED = "elected"
    START_STORED = "start record stored"
    LOADED = "state loaded"
    APPENDS_LATE = "appends unanswered"
    ANSWERED = "append answered"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    CLOSED = "closed"


#: States in which an epoch may still act.
LIVE: Final = (EpochState.FOLLOWING, EpochState.STARTING, EpochState.LOADING, EpochState.SERVING, EpochState.STALLED)
EPOCH_TRANSITIONS: Final = Transitions(
    "epoch",
    {
        (EpochState.FOLLOWING, EpochEvent.ELECTED): EpochState.STARTING,
        (EpochState.STARTING, EpochEvent.START_STORED): EpochState.LOADING,
        (EpochState.LOADING, EpochEvent.LOADED): EpochState.SERVING,
        (EpochState.SERVING, EpochEvent.APPENDS_LATE): EpochState.STALLED,
        (EpochState.SERVING, EpochEvent.ANSWERED): EpochState.SERVING,
        (EpochState.STALLED, EpochEvent.ANSWERED): EpochState.SERVING,
        **{(state, EpochEvent.SUPERSEDED): EpochState.FENCED for state in LIVE},
        **{(state, EpochEvent.FAILED): EpochState.ENDED for state in LIVE},
        **{(state, EpochEvent.CLOSED): EpochState.ENDED for state in LIVE},
    },
)


class NodeState(enum.StrEnum):
    """The state of a broker process."""

    STANDING_BY = "standing by"  # it follows the journal until it is elected
    CONFIRMING = "confirming"  # it asks Kafka whether the election is still valid
    LOADING = "loading"
    SERVING = "serving"
    LEAVING = "leaving"  # its clients are being disconnected
    WAITING = "waiting"  # pause before the next try
    STOPPED = "stopped"


class NodeEvent(enum.StrEnum):
    """The events that change the state of a broker process."""

    ELECTED = "elected"
    CONFIRMED = "confirmed"
    DENIED = "denied"
    LOADED = "loaded"
    FAILED = "failed"
    EPOCH_ENDED = "epoch ended"
    STOP = "told to stop"
    LEFT = "left"
    RETRY = "retry"


NODE_TRANSITIONS: Final = Transitions(
    "node",
    {
        (NodeState.STANDING_BY, NodeEvent.ELECTED): NodeState.CONFIRMING,
        (NodeState.STANDING_BY, NodeEvent.FAILED): NodeState.WAITING,
        (NodeState.STANDING_BY, NodeEvent.STOP): NodeState.STOPPED,
        (NodeState.CONFIRMING, NodeEvent.CONFIRMED): NodeState.LOADING,
        (NodeState.CONFIRMING, NodeEvent.DENIED): NodeState.WAITING,
        (NodeState.LOADING, NodeEvent.LOADED): NodeState.SERVING,
        (NodeState.LOADING, NodeEvent.FAILED): NodeState.WAITING,
        (NodeState.SERVING, NodeEvent.EPOCH_ENDED): NodeState.LEAVING,
        (NodeState.SERVING, NodeEvent.STOP): NodeState.LEAVING,
        (NodeState.LEAVING, NodeEvent.LEFT): NodeState.STANDING_BY,
        (NodeState.WAITING, NodeEvent.RETRY): NodeState.STANDING_BY,
    },
)
