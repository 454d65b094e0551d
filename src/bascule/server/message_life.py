"""The life of a message for an administrator: a bounded search in Kafka, in a thread of its own beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.masking import PropertyMask
from bascule.server.in_turns import in_turns
from bascule.server.listing import check_known, number_of
from bascule.threads.background import in_background
from bascule.timeline.budget import SearchBudget

if TYPE_CHECKING:
    from bascule.broker.queue import BrokerQueue
    from bascule.config.settings import Settings
    from bascule.server.node import Node

#: Searches that run at once: each has a thread, and clients of Kafka that buffer 16 MiB.
SEARCHES_MAX: Final = 2
#: Longest time of a search, in seconds: requests to Kafka that it has sent may take as long again. `bascule why` has no such limit.
SEARCH_S: Final = 20.0
#: Records, and their bytes, that a search reads in the journal, the store, the target topics and the audit topic together.
SEARCHED_RECORDS_MAX: Final = 2_000_000
SEARCHED_BYTES_MAX: Final = 4 << 30
#: Records that a search reads in each partition of a target topic.
SEARCHED_TARGET_RECORDS_MAX: Final = 100_000
#: Longest pause of a search, in seconds. A search pauses as long as it works: it shares the interpreter with the event loop.
PAUSE_MAX_S: Final = 0.05
#: The longest time before now that a request can name, in seconds: ten years.
PERIOD_MAX_S: Final = 10 * 365 * 86_400

_slots = threading.BoundedSemaphore(SEARCHES_MAX)


async def message_life(node: Node, parameters: Mapping[str, str]) -> object:
    """Return what happened to the messages with an id. Raises InvalidInput, and Unavailable if enough others search.

    A cancellation ends the search after the records that it has in memory. It keeps its place until then.
    """
    check_known(parameters, ("id", "last_s"))
    message_id = parameters.get("id", "")
    last_s = number_of(parameters, "last_s", 0, 0, PERIOD_MAX_S)
    if not message_id:
        raise InvalidInput("id is missing: it is the JMSMessageID of the message")
    since_ms = time.time_ns() // 1_000_000 - 1000 * last_s if last_s else None
    if not _slots.acquire(blocking=False):
        raise Unavailable(f"{SEARCHES_MAX} searches for messages are running; try again when one of them has ended")
    try:
        engine = node.loaded_engine
        names = dict(await in_turns(_named, () if engine is None else engine.addresses.queues.values()))
        budget = SearchBudget(SEARCH_S, SEARCHED_RECORDS_MAX, SEARCHED_BYTES_MAX, pause_max_s=PAUSE_MAX_S)
        search = in_background(partial(_answer, node.settings, message_id, since_ms, names, budget), "message-life")
    except BaseException:
        _slots.release()
        raise
    search.add_done_callback(lambda _: _slots.release())
    try:
        return await asyncio.wrap_future(search)
    except asyncio.CancelledError:
        budget.cancel()
        raise


def _named(queue: BrokerQueue) -> tuple[int, tuple[str, str]]:
    return queue.id, (queue.name, queue.address)


def _answer(
    settings: Settings, message_id: str, since_ms: int | None, names: Mapping[int, tuple[str, str]], budget: SearchBudget
) -> dict[str, Any]:
    # The pipelines are an extra of the package that a broker needs for nothing else.
    from bascule.pipelines.defined_specs import with_defined
    from bascule.pipelines.spec import from_settings
    from bascule.timeline.facts import QueueName
    from bascule.timeline.question import MessageQuestion
    from bascule.timeline.scan import ScanLimits

    pipelines = with_defined(from_settings(settings, str(settings.kafka.bootstrap_servers)))
    question = MessageQuestion(
        pipelines, message_id, ScanLimits(since_ms, None), names={queue: QueueName(*name) for queue, name in names.items()},
        mask=PropertyMask(settings.admin.masked_properties), target_records_max=SEARCHED_TARGET_RECORDS_MAX, budget=budget,
    )  # fmt: skip
    with closing(question):
        for _ in question.steps():
            pass
        return question.story().as_dict()
