"""Control of pipelines, without IO: the wanted state of each pipeline, and how a driver follows it (docs/adr/0022-control.md).

Brokers write the wanted states to the compacted topic ``PREFIX.control``. The driver reads them there and reports to ``PREFIX.pipelines``.
Each wish has a key of its own, so two administrators who write different wishes at the same time do not overwrite each other.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from bascule.broker.coverage import CoverageMark, joint_mark
from bascule.broker.divert_access import DivertAccess, DivertUser, refusal_of
from bascule.core.errors import BasculeError, Scope
from bascule.core.states import Transitions
from bascule.writer.position import DIVERT, INGRESS
from bascule.writer.redrive import RedriveJob

#: The version of the records of both topics.
VERSION: Final = 1
#: Prefixes of keys in ``PREFIX.control``, each followed by the name of the pipeline (``divert:orders``).
WANTED_KEY: Final = "wanted/"
RESTART_KEY: Final = "restart/"
OFFSETS_KEY: Final = "offsets/"
DEFINITION_KEY: Final = "definition/"
#: A definition that is missing was deleted by an administrator if there is a record with this prefix; otherwise the topic has lost it.
DELETED_KEY: Final = "deleted/"
#: Prefix of the keys of coverage marks: ``covered/PIPELINE/EPOCH``.
COVERED_KEY: Final = "covered/"
#: Prefix of the keys of decisions about diverts with a user: ``access/PIPELINE``.
ACCESS_KEY: Final = "access/"
#: Key of the driver's own report in ``PREFIX.pipelines``. The other keys are names of pipelines.
DRIVER_KEY: Final = "driver"
#: The first number behind those of 64 bits.
INT64_END: Final = 1 << 63
#: Kinds of pipelines, and the prefixes of their names.
KINDS: Final[Mapping[str, str]] = {"divert": DIVERT, "ingress": INGRESS}


class UnreadableControl(BasculeError):
    """A record of ``PREFIX.control`` or ``PREFIX.pipelines`` is damaged or has a newer format."""

    retriable = False
    scope = Scope.PIPELINE


class WantedState(enum.StrEnum):
    """What an administrator wants a pipeline to do."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"


class PipelineState(enum.StrEnum):
    """The state of a pipeline, as its driver reports it."""

    RUNNING = "running"
    #: The divert has a position of its own, and joins its group when it has come near.
    CATCHING_UP = "catching up"
    #: The task has failed or was stopped, and starts again soon.
    RESTARTING = "restarting"
    #: No topic of the ingress exists yet.
    WAITING = "waiting"
    #: A restart by the driver cannot help.
    FAILED = "failed"
    PAUSED = "paused"
    STOPPED = "stopped"
    #: The configuration has ``enabled = false``.
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Wish:
    """The wanted state of a pipeline, and who wrote it when."""

    state: WantedState
    by: str = ""
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class RestartWish:
    """A request to restart a pipeline once. Each request has another id."""

    id: str
    by: str = ""
    at_ms: int = 0


class OffsetMove(NamedTuple):
    """A position that moves: its source partition, where it must be (``offset``), and where it shall be (``to``)."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    to: int


@dataclass(frozen=True, slots=True)
class OffsetsWish:
    """A request to move positions of a pipeline once. Each request has another id.

    ``after`` is how many requests the drivers had handled when the administrator saw the offsets; None if a broker of an earlier version
    has stored the request. A driver refuses a request if another one was handled since.
    """

    id: str
    moves: tuple[OffsetMove, ...]
    by: str = ""
    at_ms: int = 0
    after: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    """A pipeline that an administrator has defined at run time. ``settings`` are those of its table in the configuration, without the name.

    Each creation has another ``id``, and each change another ``revision``, which counts from 1.
    """

    id: str
    revision: int
    settings: Mapping[str, Any]
    by: str = ""
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class PipelineDeletion:
    """An administrator has deleted the definition of a pipeline that was made at run time. A later definition of the name is a new one."""

    by: str = ""
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """What a driver knows about a pipeline. ``sources`` are lists of topic, partition, next offset and end (None: not known).

    ``offsets_request`` is the last request to move positions that this driver has handled, and ``offsets_error`` why it was refused.
    ``revision`` is that of the definition made at run time, 0 if the pipeline is defined in the driver's configuration file.
    ``definition_id`` is the id of this definition, "" also if a driver of an earlier version has reported.
    """

    state: PipelineState
    driver: str
    at_ms: int
    definition: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    sources: tuple[tuple[str, int, int, int | None], ...] = ()
    partitions: int = 0
    lag: int | None = None
    records_per_s: float | None = None
    restarts: int = 0
    error: str = ""
    error_at_ms: int = 0
    offsets_request: str = ""
    offsets_error: str = ""
    revision: int = 0
    definition_id: str = ""
    #: Time from a message or source record until its commit in Kafka since the last report; None if nothing was carried.
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    #: Estimated size of the records that wait; None if it is not known.
    lag_bytes: int | None = None

    def is_of(self, definition: PipelineDefinition | None) -> bool:
        """Return whether the driver ran the pipeline by a definition, and not by an earlier one of the same name."""
        return definition is None or self.definition_id in ("", definition.id)


@dataclass(frozen=True, slots=True)
class DriverReport:
    """The driver that runs the pipelines, or ran them last."""

    driver: str
    at_ms: int
    running: bool = True
    #: Why the last attempts of redrive jobs have failed that the driver tries again, by the id of the job.
    redrives: Mapping[str, str] = field(default_factory=dict)


R = TypeVar(
    "R", Wish, RestartWish, OffsetsWish, PipelineDefinition, PipelineDeletion, CoverageMark, DivertAccess, PipelineReport, DriverReport
)  # fmt: skip
#: Types of fields that are no enumerations. ``sources`` and ``moves`` have checks of their own.
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("id", "by", "driver", "group", "error", "offsets_request", "offsets_error", "definition_id"), (str,)),
    **dict.fromkeys(("user", "address", "reason"), (str,)),
    **dict.fromkeys(("at_ms", "partitions", "restarts", "error_at_ms", "revision", "offset"), (int,)),
    "running": (bool,),
    **dict.fromkeys(("definition", "settings", "redrives"), (dict,)),
    **dict.fromkeys(("lag", "lag_bytes", "after"), (int, type(None))),
    **dict.fromkeys(("records_per_s", "latency_p50_s", "latency_p99_s"), (int, float, type(None))),
}
#: Fields that are enumerations.
_ENUMS: Final[Mapping[tuple[type, str], type[enum.StrEnum]]] = {(Wish, "state"): WantedState, (PipelineReport, "state"): PipelineState}


def encoded(
    record: Wish | RestartWish | OffsetsWish | PipelineDefinition | PipelineDeletion | CoverageMark | DivertAccess | PipelineReport
    | DriverReport,
) -> bytes:  # fmt: skip
    """Return the value of a record: a JSON object with a version."""
    return json.dumps({"version": VERSION, **asdict(record)}, separators=(",", ":")).encode()


def decoded(kind: type[R], value: bytes, place: str) -> R:
    """Return the record in a value. Fields that this version does not know are ignored. Raises UnreadableControl."""
    try:
        said: dict[str, Any] = json.loads(value)
        json.dumps(said, ensure_ascii=False, allow_nan=False).encode()  # surrogates, NaN: what was read is stored and shown elsewhere
        version = said.pop("version")
        if version != VERSION or isinstance(version, bool):
            raise UnreadableControl(f"{place}: format {version!r:.20}; this version of Bascule reads {VERSION}. Upgrade Bascule")
        known = {each.name: said[each.name] for each in fields(kind) if each.name in said}
        for name, value_of in known.items():
            if (choice := _ENUMS.get((kind, name))) is not None:
                known[name] = choice(value_of)
            elif name in _TYPES and (not isinstance(value_of, _TYPES[name]) or _is_too_large(value_of)):
                raise TypeError(f"{name} is {value_of!r:.60}")
        if "sources" in known:
            known["sources"] = tuple(map(_source, known["sources"]))
        if "moves" in known:
            known["moves"] = tuple(map(_move, known["moves"]))
        return kind(**known)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise UnreadableControl(f"{place}: unreadable record {value[:200]!r}: {error!r}") from error


def _source(said: Sequence[Any]) -> tuple[str, int, int, int | None]:
    topic, partition, offset, end = said
    return str(topic), int(partition), int(offset), None if end is None else int(end)


def _move(said: Sequence[Any]) -> OffsetMove:
    topic, topic_id, partition, offset, to = said
    move = OffsetMove(str(topic), str(topic_id), int(partition), int(offset), int(to))
    if not (0 <= move.partition < 1 << 31 and 0 <= move.offset < INT64_END and 0 <= move.to < INT64_END):
        raise ValueError(f"{move} is out of range")
    return move


def _is_too_large(value: object) -> bool:
    """Return whether a value is a number that Kafka and clocks cannot have, which would raise errors where it is used."""
    return isinstance(value, int) and not -INT64_END <= value < INT64_END


@dataclass(frozen=True, slots=True)
class Wishes:
    """All wishes and the definitions made at run time, by name of the pipeline."""

    states: Mapping[str, Wish] = field(default_factory=dict)
    restarts: Mapping[str, RestartWish] = field(default_factory=dict)
    offsets: Mapping[str, OffsetsWish] = field(default_factory=dict)
    definitions: Mapping[str, PipelineDefinition] = field(default_factory=dict)
    #: Jobs for dead letters, by id.
    redrives: Mapping[str, RedriveJob] = field(default_factory=dict)
    #: What brokers say about diverts that are defined at run time.
    covered: Mapping[str, tuple[CoverageMark, ...]] = field(default_factory=dict)
    #: Why a record of a pipeline cannot be read, or is lost, by pipeline and prefix of the key. Such a pipeline must not run.
    unreadable: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: What the active broker has decided about diverts with a user.
    access: Mapping[str, DivertAccess] = field(default_factory=dict)
    #: Why pipelines may not run, as ``refusing`` has found out.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Pipelines that an administrator has deleted. Those that are defined again are here, too.
    deleted: frozenset[str] = frozenset()
    #: Pipelines that have begun, and whose definitions nobody has deleted, as ``losing`` has found out.
    lost: frozenset[str] = frozenset()
    #: Changes with each definition and each deletion: the end of the last of their records.
    version: int = field(default=0, compare=False)

    def refusing(self, users: Iterable[tuple[str, DivertUser]]) -> Wishes:
        """Return these wishes for a driver whose diverts have these users, by pipeline: those that may not run are to be stopped.

        A divert may have two, and runs only if both may consume. The reason of the last one counts.
        """
        found = ((pipeline, refusal_of(user, self.access.get(pipeline))) for pipeline, user in users)
        return replace(self, refused={pipeline: reason for pipeline, reason in found if reason})

    def losing(self, begun: Iterable[str], topic: str) -> Wishes:
        """Return these wishes for an installation in which these pipelines have begun by a definition of ``topic``.

        A pipeline whose definition is missing and that nobody has deleted keeps its positions and must not run: somebody has recreated the
        topic, and the wish to pause the pipeline may be lost with the definition.
        """
        lost = frozenset(begun) - self.definitions.keys() - self.undefined - self.deleted
        reason = (
            f"{topic} has lost the definition, and nobody has deleted it. Create the pipeline again to continue at its position, or delete"
            " the pipeline"
        )
        reasons = {pipeline: {**self.unreadable.get(pipeline, {}), DEFINITION_KEY: reason} for pipeline in lost}
        return replace(self, unreadable={**self.unreadable, **reasons}, lost=lost)

    def trouble(self, pipeline: str) -> str:
        """Return why a pipeline must not run whatever is wanted, "" if it may."""
        return "; ".join(self.unreadable.get(pipeline, {}).values())

    def beside_file(self, names: Collection[str]) -> Wishes:
        """Return these wishes for an installation whose configuration file has pipelines with these names: definitions have no effect."""
        found = {
            pipeline: {key: reason for key, reason in reasons.items() if key != DEFINITION_KEY or pipeline.partition(":")[2] not in names}
            for pipeline, reasons in self.unreadable.items()
        }
        return replace(self, unreadable={pipeline: reasons for pipeline, reasons in found.items() if reasons})

    @property
    def undefined(self) -> frozenset[str]:
        """The pipelines whose definitions cannot be read, or are lost."""
        return frozenset(pipeline for pipeline, reasons in self.unreadable.items() if DEFINITION_KEY in reasons)

    def coverage(self, pipeline: str) -> CoverageMark | None:
        """Return what all brokers say together about the current definition of a divert; None if no broker has said anything."""
        definition = self.definitions.get(pipeline)
        return None if definition is None else joint_mark(self.covered.get(pipeline, ()), definition.id)

    def of(self, pipeline: str) -> WantedState:
        """Return the wanted state of a pipeline, which is running if nobody wanted anything else, and the pipeline may run."""
        if pipeline in self.refused:
            return WantedState.STOPPED
        wish = self.states.get(pipeline)
        return WantedState.RUNNING if wish is None else wish.state


class SteeringState(enum.StrEnum):
    """How far a driver has followed the wanted state of a pipeline."""

    RUNNING = "running"
    HOLDING = "holding"
    HELD = "held"
    RELEASING = "releasing"


class SteeringEvent(enum.StrEnum):
    """An event of a pipeline that a driver steers."""

    HOLD = "paused or stopped is wanted"
    RELEASE = "running is wanted"
    DONE = "the step is complete"


_S, _E = SteeringState, SteeringEvent
#: A wish may change before the step for the last one is complete. Steps look at the stored positions, so each can follow a half of another.
STEERING: Final = Transitions(
    "steering",
    {
        (_S.RUNNING, _E.HOLD): _S.HOLDING,
        (_S.HOLDING, _E.DONE): _S.HELD,
        (_S.HOLDING, _E.RELEASE): _S.RELEASING,
        (_S.HELD, _E.RELEASE): _S.RELEASING,
        (_S.RELEASING, _E.DONE): _S.RUNNING,
        (_S.RELEASING, _E.HOLD): _S.HOLDING,
    },
)


class SteeringEffects(Protocol):
    """The steps of a driver. Each may be repeated, and returns False, or raises a BasculeError that it contains, if it is not complete."""

    def hold(self, pipeline: str) -> bool:
        """Take a pipeline out of its task, with a position of its own. The task carries nothing more for it."""
        ...

    def release(self, pipeline: str) -> bool:
        """Let a pipeline that is held continue at its position."""
        ...

    def move(self, pipeline: str, wish: OffsetsWish) -> bool:
        """Move the positions of a pipeline that is held, or refuse to. A request that was handled before has no effect."""
        ...

    def restart(self, pipeline: str) -> None:
        """Start the task of a pipeline again, also after an error that the driver does not retry."""
        ...


class Steering:
    """Follows the wanted states of a driver's pipelines, one step at a time."""

    def __init__(self, pipelines: Collection[str]) -> None:
        self._states = dict.fromkeys(pipelines, SteeringState.RUNNING)
        self._wishes = Wishes()
        self._restarts: list[str] = []
        self._moved: dict[str, str] = {}

    def begin(self, wishes: Wishes, moved: Mapping[str, str] = MappingProxyType({})) -> set[str]:
        """Return the pipelines that a driver must not start. A start satisfies all earlier requests to restart.

        ``moved`` has the last request to move positions that a driver has handled, by pipeline.
        """
        self._wishes, self._moved = wishes, dict(moved)
        held = {pipeline for pipeline in self._states if self._wanted(pipeline) is SteeringEvent.HOLD}
        self._states |= dict.fromkeys(held, SteeringState.HELD)
        return held

    def add(self, pipeline: str) -> bool:
        """Steer one more pipeline, and return whether the driver must not start it. Earlier requests to restart it are satisfied."""
        held = self._wanted(pipeline) is SteeringEvent.HOLD
        self._states[pipeline] = SteeringState.HELD if held else SteeringState.RUNNING
        return held

    def remove(self, pipeline: str) -> None:
        """Steer a pipeline no more: it is deleted. A later one of the same name has handled no request."""
        self._states.pop(pipeline, None)
        self._moved.pop(pipeline, None)
        self._restarts = [each for each in self._restarts if each != pipeline]

    def follow(self, wishes: Wishes) -> None:
        """Take note of the current wishes."""
        before, self._wishes = self._wishes, wishes
        for pipeline in self._states:
            self._follow(pipeline)
            restart = wishes.restarts.get(pipeline)
            if restart is not None and restart != before.restarts.get(pipeline) and pipeline not in self._restarts:
                self._restarts.append(pipeline)

    def step(self, effects: SteeringEffects) -> None:
        """Carry out what is due. Steps that are not complete are repeated by the next call."""
        for pipeline in self._states:
            if self._states[pipeline] is SteeringState.HOLDING and effects.hold(pipeline):
                self._advance(pipeline, SteeringEvent.DONE)
            wish = self._unmoved(pipeline)
            if wish is not None and self._states[pipeline] is SteeringState.HELD and effects.move(pipeline, wish):
                self._moved[pipeline] = wish.id
                self._follow(pipeline)
            if self._states[pipeline] is SteeringState.RELEASING and effects.release(pipeline):
                self._advance(pipeline, SteeringEvent.DONE)
        restarts, self._restarts = self._restarts, []
        for pipeline in restarts:
            if self._states[pipeline] is SteeringState.RUNNING:
                effects.restart(pipeline)

    def held(self, pipeline: str) -> PipelineState | None:
        """Return the state of a pipeline that is held, None if it is not. It has failed if only a damaged record holds it."""
        if self._states.get(pipeline) is not SteeringState.HELD:
            return None
        if self._wishes.trouble(pipeline) and self._wishes.of(pipeline) is WantedState.RUNNING:
            return PipelineState.FAILED
        return PipelineState.STOPPED if self._wishes.of(pipeline) is WantedState.STOPPED else PipelineState.PAUSED

    def must_hold(self, pipeline: str) -> bool:
        """Return whether the driver must not run a pipeline now."""
        return self._wanted(pipeline) is SteeringEvent.HOLD

    def trouble(self, pipeline: str) -> str:
        """Return which damaged record holds a pipeline, "" if there is none."""
        return self._wishes.trouble(pipeline)

    def moved(self, pipeline: str) -> str:
        """Return the id of the last request to move positions that was handled, "" if there was none."""
        return self._moved.get(pipeline, "")

    @property
    def due(self) -> Iterator[str]:
        """The pipelines whose steps are not complete."""
        stepping = (SteeringState.HOLDING, SteeringState.RELEASING)
        return (pipeline for pipeline, state in self._states.items() if state in stepping or self._unmoved(pipeline) is not None)

    def _unmoved(self, pipeline: str) -> OffsetsWish | None:
        """Return the request to move positions that is to be handled."""
        wish = self._wishes.offsets.get(pipeline)
        return None if wish is None or wish.id == self._moved.get(pipeline) else wish

    def _wanted(self, pipeline: str) -> SteeringEvent:
        """Return what is due for a pipeline: it is also held while its positions move, and while a record about it is damaged."""
        running = self._wishes.of(pipeline) is WantedState.RUNNING and self._unmoved(pipeline) is None and not self.trouble(pipeline)
        return SteeringEvent.RELEASE if running else SteeringEvent.HOLD

    def _follow(self, pipeline: str) -> None:
        if (self._states[pipeline], wanted := self._wanted(pipeline)) in STEERING:
            self._advance(pipeline, wanted)

    def _advance(self, pipeline: str, event: SteeringEvent) -> None:
        self._states[pipeline] = STEERING[self._states[pipeline], event]
