"""How a batch with users' transformations is carried: in which parts, and which messages are at fault. A ``JournalBatch`` runs its rows."""

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

#: When so many messages are found on which a transformation fails, what comes before the next one is carried, and then looked further.
#: Each takes Spark a second or so, in which all diverts stand still.
BAD_AT_ONCE = 8
#: Those on which one fails are looked for among no more than so many, or in one journal record.
SEARCHED_AT_ONCE = 100_000


class BatchFailed(BasculeError):
    """A batch could not be written."""

    retriable = True
    scope = Scope.OPERATION


class JournalBatch(Protocol):
    """Journal rows as they are at hand. Each method but ``up_to``, ``after`` and ``part`` runs them, and raises one of FAILURES."""

    def bounds(self) -> tuple[int, int] | None:
        """Return the first and the last journal offset; None where there is no row."""
        ...

    def up_to(self, end: int) -> JournalBatch:
        """Return the rows up to this offset, which is included."""
        ...

    def after(self, end: int) -> JournalBatch:
        """Return the rows behind this offset."""
        ...

    def part(self, start: int, end: int) -> JournalBatch:
        """Return the journal's records from ``start`` up to ``end`` (not included), read anew from Kafka."""
        ...

    def carry(self, task: DivertTask) -> None:
        """Write what the diverts of a task make of the rows. Raises what the task raises."""
        ...

    def messages(self, divert: DivertSpec, most: int | None) -> list[Message]:
        """Return those, or the first ``most`` found of those, that a divert's transformation is given."""
        ...

    def fault(self, divert: DivertSpec, messages: Sequence[Message]) -> str | None:
        """Return what a divert's transformation fails with on these; None when it does not."""
        ...

    def control(self, divert: DivertSpec, message: Message) -> None:
        """Read a message, and run the transformation without any. What fails with that is not the message's fault, and is raised."""
        ...


def carry_all(batch: JournalBatch, task: DivertTask) -> None:
    """Carry a batch. Raises what ``task`` raises, and what Spark does where a transformation fails for another reason than a message."""
    rest: JournalBatch | None = batch
    while rest is not None:
        rest = _advance(rest, task)


def _advance(batch: JournalBatch, task: DivertTask) -> JournalBatch | None:
    """Carry all rows, or, where transformations fail on many messages, the first; return the rest."""
    try:
        return _carry_some(batch, task)
    except (*FAILURES, BatchTooLarge) as error:
        if not isinstance(error_from_spark(error), BatchTooLarge):
            raise
    _carry_in_parts(batch, task)
    return None


def _carry_in_parts(batch: JournalBatch, task: DivertTask) -> None:
    """Carry one half after the other; a single journal record as it is."""
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
        # Read anew from Kafka: of a batch as Spark gives it, each part would be read from the batch's beginning.
        carry_all(batch.part(start, end), task)


def _carry_some(batch: JournalBatch, task: DivertTask) -> JournalBatch | None:
    try:
        batch.carry(task)
        return None
    except FAILURES as error:
        if error_from_spark(error) is not None:  # a task's, which no transformation has caused
            raise
        failed, end = _failures(batch, task)
        if not failed:
            raise
    for (divert, offset, index), reason in failed.items():
        log.warning("transformation failed", divert=divert, offset=offset, index=index, reason=reason)
    batch.up_to(end).carry(replace(task, failed=failed))
    return batch.after(end) if end < OFFSET_MAX else None


def _failures(batch: JournalBatch, task: DivertTask) -> tuple[dict[tuple[str, int, int], str], int]:
    """On what transformations fail, and why, by divert and message; and the last journal offset up to which that is all."""
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
    """Those that a divert's transformation is given, in order. Raises TooMuchAtOnce."""
    if task.made_bytes_max is None:
        return sorted(batch.messages(divert, None))
    found = batch.messages(divert, SEARCHED_AT_ONCE + 1)
    if len(found) > SEARCHED_AT_ONCE:
        raise BatchTooLarge(f"a transformation failed in a batch of more than {SEARCHED_AT_ONCE} messages")
    return sorted(found)


#: Tries a transformation on messages, and says what it fails with.
Fault = Callable[[Sequence[Message]], str | None]
#: Raises what is wrong where no message's transformation is.
Control = Callable[[Message], None]


def first_bad(messages: Sequence[Message], fault: Fault, control: Control) -> tuple[dict[Message, str], int]:
    """The first messages on which a transformation fails, and why; and the last journal offset up to which these are all.

    All of a journal record are looked at, since it is carried as one.
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
    """By halving, in order. ``failing`` says that they are known to hold one."""
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
    """Twice: a fault that passes (a worker that was killed) is not the message's."""
    for message in messages:
        if fault([message]) is not None:
            control(message)
            if (reason := fault([message])) is not None:
                yield message, reason
