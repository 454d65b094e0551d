"""What a pipeline makes of its dead letters when they are redriven, by its own engine. Pure: no Spark, no Kafka, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bascule.core.errors import BadRecord, BasculeError, Denied, Scope, TopicMissing
from bascule.core.kafka_records import KafkaRecord, Output
from bascule.jms.record_headers import REDRIVES_HEADER
from bascule.journal.records import Send
from bascule.pipelines.divert import DivertEngine, DivertFilter, WantedMessage
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec
from bascule.writer.dead_letters import PipelineDeadLetter
from bascule.writer.position import DIVERT, INGRESS


class LetterLeft(BasculeError):
    """A dead letter cannot be redriven now, so it stays as it is. The text says why."""

    retriable = False
    scope = Scope.OPERATION


class RedrivenLetter(NamedTuple):
    """What a dead letter becomes: a record of a target topic, or a dead letter again.

    ``fallback`` returns the dead letter that replaces the record if Kafka refuses it. It raises LetterLeft.
    """

    output: Output
    fallback: Callable[[Exception], Output]


class RedriveEngine:
    """Converts dead letters with the pipelines that are configured now."""

    def __init__(self, pipelines: PipelinesSpec) -> None:
        self._pipelines = pipelines
        self._dead_letters = None if pipelines.stop_on_error else pipelines.topics.dead_letters
        self._diverts = {f"{DIVERT}{divert.name}": divert for divert in pipelines.diverts}
        self._ingresses = {f"{INGRESS}{ingress.name}": ingress for ingress in pipelines.ingresses}

    def redriven(self, letter: PipelineDeadLetter) -> RedrivenLetter:
        """Return the output for a dead letter. Raises LetterLeft."""
        if letter.incomplete:
            raise LetterLeft(letter.incomplete)
        pipeline = self._diverts.get(letter.pipeline) or self._ingresses.get(letter.pipeline)
        if pipeline is None or not pipeline.enabled:
            raise LetterLeft(f"{letter.pipeline} is {'not configured' if pipeline is None else 'disabled, or its user may not consume'}")
        try:
            if isinstance(pipeline, DivertSpec):
                return self._diverted(letter, pipeline)
            return self._taken_in(letter, pipeline)
        except (BadRecord, Denied, TopicMissing) as error:
            raise LetterLeft(_said(error)) from error

    def _diverted(self, letter: PipelineDeadLetter, divert: DivertSpec) -> RedrivenLetter:
        if divert.transformed:
            raise LetterLeft(f"{letter.pipeline} has a transformation, which a redrive does not run")
        topics, source = self._pipelines.topics, letter.source
        engine = DivertEngine(self._pipelines.bridge_id, (source.topic, source.partition), self._dead_letters, topics.reserved)
        epoch, sequence, index = _identity(letter)
        send = Send(0, 0, 0, letter.timestamp_ms, 0, 0, letter.address, (), (), (), None, letter.value or b"")
        faults: dict[str, Exception] = {}
        # The broker has chosen the messages of an exclusive divert. Nobody else has them, whatever the selector is now.
        if not divert.exclusive and not DivertFilter(divert).wants(send, frozenset(), faults):
            raise LetterLeft(f"{letter.pipeline} does not take the message now: the address or the selector does not match")
        taken = WantedMessage(source.offset, epoch, sequence, index, send, [divert], faults)
        ((_, output),) = engine.outputs(taken)
        return RedrivenLetter(
            _counted(output, letter), lambda error: _dead_again(letter, lambda: engine.dead_letter(taken, divert, "KAFKA_PRODUCE", error))
        )

    def _taken_in(self, letter: PipelineDeadLetter, ingress: IngressSpec) -> RedrivenLetter:
        topics = self._pipelines.topics
        engine = IngressEngine(ingress, self._pipelines.bridge_id, topics.ingress, self._dead_letters, self._pipelines.message_bytes_max)
        record = KafkaRecord(*letter.source, letter.key, letter.value, letter.headers, letter.timestamp_ms)
        output = engine.output(record)
        if output is None:
            raise LetterLeft("the record was written by this bridge itself")
        # The broker reads the headers of its own topic.
        made = output if output.topic == topics.ingress else _counted(output, letter)
        return RedrivenLetter(made, lambda error: _dead_again(letter, lambda: engine.dead_letter(record, "KAFKA_PRODUCE", error)))


def _identity(letter: PipelineDeadLetter) -> tuple[int, int, int]:
    try:
        epoch, sequence, index = map(int, letter.message_id.split("-"))
    except ValueError:
        raise LetterLeft(f"the dead letter names no message of the journal: {letter.message_id!r:.60}") from None
    return epoch, sequence, index


def _dead_again(letter: PipelineDeadLetter, make: Callable[[], Output]) -> Output:
    try:
        return _counted(make(), letter)
    except (BadRecord, Denied, TopicMissing) as error:
        raise LetterLeft(_said(error)) from error


def _counted(output: Output, letter: PipelineDeadLetter) -> Output:
    """Return a record with the number of this attempt as its last header."""
    return output._replace(headers=[*output.headers, (REDRIVES_HEADER, str(letter.redrives + 1).encode())])


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
