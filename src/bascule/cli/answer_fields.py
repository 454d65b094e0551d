"""The fields of the lists of a broker, for the header of a list without rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final

#: The types of the rows of each list: modules of ``bascule.server``, and classes there.
_TYPES: Final = {
    "queues": (("status", "QueueStatus"),),
    "brokers": (("answers", "BrokerAnswer"),),
    "topics": (("answers", "TopicSums"),),
    "subscriptions": (("status", "SubscriptionStatus"),),
    "connections": (("status", "ConnectionStatus"),),
    "branches": (("status", "BranchStatus"),),
    "links": (("answers", "LinkAnswer"),),
    "messages": (("answers", "ShownMessage"),),
    "dead letters": (("answers", "DeadLetterAnswer"),),
    "flow": (("answers", "FlowDivert"), ("answers", "FlowIngress")),
    "pipelines": (("pipeline_answers", "PipelineAnswer"),),
    "offsets": (("pipeline_answers", "OffsetAnswer"),),
    "letters": (("pipeline_answers", "LetterAnswer"),),
    "jobs": (("pipeline_answers", "JobAnswer"),),
}


def fields_of(listed: str) -> Sequence[str]:
    """Return the fields of what is listed, in the order of the broker's answer.

    Without the extra ``broker``, the types cannot be imported, and there are no fields.
    """
    found: list[str] = []
    with suppress(ImportError):
        for module, name in _TYPES[listed]:
            found += getattr(import_module(f"bascule.server.{module}"), name).__annotations__
    return found
