"""How to write a batch that has user transformations: in which parts, and without which faulty messages. ``JournalBatch`` runs the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log
from bascule.pipelines.failures import FAILURES, error_from_spark
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import OFFSET_MAX, BatchTooLarge, DivertTask, Message

log = get_log(__name__)

#: After this many messages with a failed transformation, the rows up to the last of them are written before the search continues. Each
#: search step takes Spark about a second, and all diverts wait meanwhile.
BAD_AT_ONCE = 8
#: The search for faulty messages covers at most this many messages, or one journal record.
SEARCHED_AT_ONCE = 100_000


class BatchFailed(BasculeError):
    """A batch could not be written."""

    retriable = True
    scope = Scope.OPERATION


class JournalBatch(Protocol):
    """Journal rows in the form at hand.

    Each method except ``up_to``, ``after`` and ``part`` runs the rows and may raise one of FAILURES.
    """

    def bounds(self) -> tuple[int, int] | None:
        """Return the first and the last journal offset, or None if there are no rows."""
        ...

    def up_to(self, end: int) -> JournalBatch:
        """Return the rows up to and including this offset."""
        ...

    def after(self, end: int) -> JournalBatch:
        """Return the rows after this offset."""
        ...

    def part(self, start: int, end: int) -> JournalBatch:
        """Return the journal's records from ``start`` up to ``end`` (not included), read again from Kafka."""
        ...

    def carry(self, task: DivertTask) -> None:
        """Write the records of the task's diverts for these rows. Raises the errors of the task."""
        ...

    def messages(self, divert: DivertSpec, most: int | None) -> list[Message]:
        """Return the messages that the divert's transformation gets, or the first ``most`` of them that are found."""
        ...

    def fault(self, divert: DivertSpec, messages: Sequence[Message]) -> str | None:
        """Return the error of the divert's transformation on these messages, or None if it succeeds."""
        ...

    def control(self, divert: DivertSpec, message: Message) -> None:
        """Read a message, and run the transformation on no message. An error here is not the message's fault and is raised."""
        ...


def carry_all(batch: JournalBatch, task: DivertTask) -> None:
    """Write a batch.

    Raises the errors of ``task``, and Spark's error if a transformation fails for another reason than a message.
    """
    rest: JournalBatch | None = batch
    while rest is not None:
        rest = _advance(rest, task)


def _advance(batch: JournalBatch, task: DivertTask) -> JournalBatch | None:
    """Write all rows, or only the first if a transformation fails on many messages. Return the rows that are left."""
    try:
        return _carry_some(batch, task)
    except (*FAILURES, BatchTooLarge) as error:
        if not isinstance(error_from_spark(error), BatchTooLarge):
            raise
    _carry_in_parts(batch, task)
    return None


def _carry_in_parts(batch: JournalBatch, task: DivertTask) -> None:
    """Write the batch in two halves, one after the other; write a single journal record as a whole."""
    bounds = batch.bounds()
    if bounds is None:
        raise BatchFailed("Spark finds no rows in a batch that was too large for memory")
    first, last = bounds
    log.info("carrying batch in parts", first=first, last=last)
    if first == last:
        carry_all(batch, replace(task, made_bytes_max=None))
        return
    middle = (first + last + 1) // 2
    for start, end in ((first, middle), (middle, last + 1)):
        # Read again from Kafka: Spark would read each part of its own batch from the beginning of the batch.
        carry_all(batch.part(start, end), task)


def _carry_some(batch: JournalBatch, task: DivertTask) -> JournalBatch | None:
    try:
        batch.carry(task)
        return None
    except FAILURES as error:
        if error_from_spark(error) is not None:  # an error of the task, not of a transformation
            raise
        failed, end = _failures(batch, task)
        if not failed:
            raise
    for (divert, offset, index), reason in failed.items():
        log.warning("transformation failed", divert=divert, offset=offset, index=index, reason=reason)
    batch.up_to(end).carry(replace(task, failed=failed))
    return batch.after(end) if end < OFFSET_MAX else None


def _failures(batch: JournalBatch, task: DivertTask) -> tuple[dict[tuple[str, int, int], str], int]:
    """Return the failed messages by divert with the reason, and the last journal offset up to which the result is complete."""
    failed: dict[tuple[str, int, int], str] = {}
    end = OFFSET_MAX
    for divert in task.diverts:
        if divert.transformed:
            part = batch.up_to(end)
            bad, reached = first_bad(_searched(part, divert, task), partial(part.fault, divert), partial(part.control, divert))
            failed |= {(divert.name, *message): reason for message, reason in bad.items()}
            end = min(end, reached)
    return {key: reason for key, reason in failed.items() if key[1] <= end}, end


def _searched(batch: JournalBatch, divert: DivertSpec, task: DivertTask) -> list[Message]:
    """Return the messages that the divert's transformation gets, in order. Raises BatchTooLarge."""
    if task.made_bytes_max is None:
        return sorted(batch.messages(divert, None))
    found = batch.messages(divert, SEARCHED_AT_ONCE + 1)
    if len(found) > SEARCHED_AT_ONCE:
        raise BatchTooLarge(f"a transformation failed in a batch of more than {SEARCHED_AT_ONCE} messages")
    return sorted(found)


#: Runs a transformation on messages and returns the error, or None.
Fault = Callable[[Sequence[Message]], str | None]
#: Raises an error that no message has caused.
Control = Callable[[Message], None]


def first_bad(messages: Sequence[Message], fault: Fault, control: Control) -> tuple[dict[Message, str], int]:
    """Return the first messages on which a transformation fails, with the reason, and the last journal offset up to which these are all.

    All messages of a journal record are checked, because a record is written as a whole.
    """
    bad: dict[Message, str] = {}
    offset = -1
    for message, reason in _bad(messages, fault, control):
        if len(bad) >= BAD_AT_ONCE and message[0] > offset:
            return bad, message[0] - 1
        bad[message] = reason
        offset = message[0]
    return bad, OFFSET_MAX


def _bad(messages: Sequence[Message], fault: Fault, control: Control, *, failing: bool = False) -> Iterator[tuple[Message, str]]:
    """Find the faulty messages by bisection, in order. ``failing`` says that ``messages`` are known to contain one."""
    if len(messages) < 2:
        yield from _bad_itself(messages, fault, control)
    elif failing or fault(messages) is not None:
        middle = len(messages) // 2
        found = False
        for each in _bad(messages[:middle], fault, control):
            found = True
            yield each
        yield from _bad(messages[middle:], fault, control, failing=not found)


def _bad_itself(messages: Sequence[Message], fault: Fault, control: Control) -> Iterator[tuple[Message, str]]:
    """Run the transformation on each message twice: a transient fault, such as a killed worker, is not the message's fault."""
    for message in messages:
        if fault([message]) is not None:
            control(message)
            if (reason := fault([message])) is not None:
                yield message, reason
