"""The answers of the admin server about pipelines, from which the OpenAPI document is made. Times are in ms since 1970."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class SourceAnswer(TypedDict):
    """The position of a pipeline in a partition of its source."""

    topic: str
    partition: int
    offset: int
    end: int | None


class PipelineAnswer(TypedDict):
    """The state of a pipeline, and what its driver has reported last; null for what is unknown.

    ``origin`` is file or runtime; ``revision`` is that of a definition made at run time, and ``reported_revision`` the one that the driver
    has. Until the driver has deleted a pipeline, ``state`` is deleting and ``wanted`` is deleted. ``covered_from`` is the offset from which
    the journal has the messages for a divert that is defined at run time; null until a broker has said so for the current revision.
    ``latency_p50_s`` and ``latency_p99_s`` are what half and 99 of 100 records did not exceed, from their timestamp until their commit in
    Kafka, between the last two reports. The diverts of a group have the same. ``lag`` counts offsets, and ``lag_bytes`` is an estimate.
    """

    name: str
    kind: str
    origin: str
    revision: int | None
    state: str
    wanted: str
    wanted_by: str
    wanted_at_ms: int | None
    covered_from: int | None
    group: str
    lag: int | None
    lag_bytes: int | None
    records_per_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    restarts: int | None
    error: str
    error_at_ms: int | None
    partitions: int
    sources: list[SourceAnswer]
    driver: str
    reported_at_ms: int | None
    reported_revision: int | None


class DefinitionAnswer(TypedDict):
    """The definition of a pipeline; null if no driver has reported it.

    ``config`` has the settings that were given at run time, with their revision; null for a pipeline of the configuration file.
    """

    name: str
    kind: str
    origin: str
    definition: dict[str, Any] | None
    config: dict[str, Any] | None
    revision: int | None


class ExpandedPipeline(TypedDict):
    """What a list with the parameter ``expand`` has about a pipeline: its status, its definition, or both."""

    status: NotRequired[PipelineAnswer]
    info: NotRequired[DefinitionAnswer]


class HeldPipeline(TypedDict):
    """A definition made at run time, as a request to create the pipeline has it."""

    name: str
    config: dict[str, Any]


class PipelineDefinitionsAnswer(TypedDict):
    """The definitions of diverts and ingresses that were made at run time."""

    diverts: list[HeldPipeline]
    ingresses: list[HeldPipeline]


class PipelineDefinedAnswer(TypedDict):
    """The revision of the definition that Kafka has stored."""

    name: str
    kind: str
    revision: int


class PipelineDeletedAnswer(TypedDict):
    """The pipeline whose deletion Kafka has stored."""

    name: str
    kind: str


class WantedAnswer(TypedDict):
    """The wanted state that Kafka has stored."""

    name: str
    kind: str
    wanted: str


class RestartAnswer(TypedDict):
    """The id of the restart that Kafka has stored; null if only a failed task was to be restarted, and it has not failed."""

    name: str
    kind: str
    restart: str | None


class OffsetAnswer(TypedDict):
    """The position of a pipeline in a partition, and the bounds of the partition if they are known."""

    topic: str
    partition: int
    offset: int
    first: int | None
    end: int | None


class OffsetsRequest(TypedDict):
    """The last request to move the positions of a pipeline, and what became of it."""

    id: str
    by: str
    at_ms: int
    state: str
    error: str


class OffsetsAnswer(TypedDict):
    """The positions of a pipeline."""

    name: str
    kind: str
    offsets: list[OffsetAnswer]
    request: OffsetsRequest | None


class MoveAnswer(TypedDict):
    """A move of one position, and what it means. ``messages``, ``taken`` and ``counted`` are those of a divert."""

    topic: str
    partition: int
    offset: int
    to: int
    first: int
    end: int
    skipped: int
    repeated: int
    messages: NotRequired[int]
    taken: NotRequired[int]
    counted: NotRequired[bool]


class PlanAnswer(TypedDict):
    """A plan. ``token`` confirms it; null if nothing would move. ``discards``: messages would be lost."""

    name: str
    kind: str
    moves: list[MoveAnswer]
    discards: bool
    token: str | None


class ConfirmedAnswer(TypedDict):
    """The id of the confirmed request, which Kafka has stored."""

    name: str
    kind: str
    request: str


class LetterSourceAnswer(TypedDict):
    """The record that a pipeline could not carry."""

    topic: str
    partition: int
    offset: int


class LetterAnswer(TypedDict):
    """A dead letter of a pipeline. ``incomplete`` says what is missing, or is empty. ``address`` and ``message`` are those of a divert.

    ``tombstone``: the record has no value, which is null in Kafka.
    """

    place: str
    pipeline: str
    source: LetterSourceAnswer
    stage: str
    reason: str
    time_ms: int
    redrives: int
    bytes: int
    address: str
    message: str
    incomplete: str
    tombstone: bool


class LettersAnswer(TypedDict):
    """Dead letters that wait. ``upto`` are the ends of the dead-letter topic.

    ``next`` is the value of ``from`` for the next request, or empty if there are no more (``complete``).
    """

    letters: list[LetterAnswer]
    complete: bool
    next: str
    upto: str


class LetterContentAnswer(LetterAnswer):
    """A dead letter with the beginnings of its headers and its value."""

    state: str
    headers: list[list[str]]
    value: str


class JobAnswer(TypedDict):
    """A request to redrive or discard dead letters, and what has become of them.

    ``error`` is why the request has failed, why its last attempt has failed if it is still ``pending``, or why a dead letter was left.
    """

    job: str
    action: str
    state: str
    redriven: int
    failed: int
    discarded: int
    left: int
    error: str
    by: str
    at_ms: int
    pipeline: str
    reason: str


class JobStoredAnswer(TypedDict):
    """The id of the request, which Kafka has stored."""

    job: str
    action: str
