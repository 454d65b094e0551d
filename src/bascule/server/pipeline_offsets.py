"""Offsets of pipelines over HTTP: an administrator sees what a move of positions skips or repeats, and confirms exactly this.

GET   /diverts/NAME/offsets    positions, and the last request to move them
PATCH /diverts/NAME/offsets    {"to": …} or {"shift_by": N}: the plan with a token; nothing changes
PATCH /diverts/NAME/offsets    {"token": …}: store the plan for the driver; 202 once Kafka has stored it

DELETE /diverts/NAME/offsets               the plan of a reset: a move to where the setting ``start`` says
DELETE /diverts/NAME/offsets?token=TOKEN   store the plan for the driver
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.config.defined import default_of
from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput, Scope
from bascule.core.log import get_log
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.core.times import written_time
from bascule.kafka.planned_moves import OFFSET_MAX, NoOffsets, OffsetPlan, OffsetTarget, PipelineOffsets, PlannedMove
from bascule.server.admin_access import Principal
from bascule.server.admin_arguments import arguments_of, number_in
from bascule.server.listing import check_known
from bascule.writer.control import KINDS, OffsetsWish, PipelineState, WantedState
from bascule.writer.position import EARLIEST, LATEST

if TYPE_CHECKING:
    from bascule.server.pipelines import KnownPipelines, PipelinePages

log = get_log(__name__)

#: Plans that wait for a confirmation at one broker; a further one replaces the oldest. Each has an entry for each source partition.
PLANS_MAX: Final = 16
#: How long a plan can be confirmed, in ms: what a plan skips or repeats was true when it was made.
PLAN_MS: Final = 10 * 60 * 1000
#: Parameters of the plan of a reset, and the largest partition of Kafka.
RESET_PARAMETERS: Final = ("topic", "partition")
PARTITION_MAX: Final = 2**31 - 1
#: Arguments of a plan.
_TARGETS: Final = ("to", "shift_by")


class NotStopped(InvalidInput):
    """The positions of a pipeline move only while the pipeline is stopped."""

    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    http_status = 409


class UnknownPlan(InvalidInput):
    """The broker does not have the plan that is confirmed: it is too old, or another broker has made it."""

    scope = Scope.OPERATION
    http_status = 409


class WouldDiscard(InvalidInput):
    """The plan skips messages that no queue and no other divert has, and the request does not say that they may be lost."""

    scope = Scope.OPERATION
    http_status = 409


class OffsetPlanning(Protocol):
    """Reads offsets, and makes plans; see bascule.pipelines.offset_plans.OffsetPlans. Blocking."""

    def offsets(self, pipeline: str) -> PipelineOffsets:
        """Return the positions of a pipeline. Raises Unavailable, PositionLost."""

    def plan(
        self, pipeline: str, target: OffsetTarget, definition: Mapping[str, Any], topic: str | None = None, partition: int | None = None
    ) -> OffsetPlan:
        """Return what a move means. Raises NoOffsets, Unavailable."""


class _Plan(NamedTuple):
    pipeline: str
    offsets: OffsetPlan
    made_ms: int
    stored: bool = False


class OffsetPages:
    """The pages about offsets of one broker."""

    def __init__(self, pages: PipelinePages, planning: Callable[[], OffsetPlanning], settings: Settings) -> None:
        """``planning`` is called in a thread for each request; it raises MissingExtra in a broker without the pipelines."""
        self._pages = pages
        self._planning = planning
        self._starts = {f"{KINDS['divert']}{each.name}": each.start for each in settings.divert}
        self._starts |= {f"{KINDS['ingress']}{each.name}": each.start for each in settings.ingress}
        self._plans: OrderedDict[str, _Plan] = OrderedDict()

    async def show(self, kind: str, request: Request) -> Response:
        """Answer with the positions of a pipeline, and the last request to move them."""
        known = await self._pages.known()
        pipeline = self._pages.named(known, kind, request)
        found = await self._pages.beside(lambda: self._planning().offsets(pipeline))
        offsets = [
            {
                "topic": at.topic,
                "partition": at.partition,
                "offset": at.offset,
                "first": bounds and bounds.first,
                "end": bounds and bounds.end,
            }
            for at in found.positions
            for bounds in [found.bounds.get((at.topic, at.partition))]
        ]
        return JSONResponse({
            "name": request.path_params["name"], "kind": kind, "offsets": offsets, "request": _request_of(known, pipeline, found),
        })  # fmt: skip

    async def change(self, kind: str, request: Request) -> Response:
        """Answer with a plan, or store a plan that is confirmed for the driver."""
        arguments = await arguments_of(request)
        if "token" in arguments:
            return await self._confirm(kind, request, arguments)
        target = _target_of(arguments)
        return await self._planned(kind, request, lambda *_: target, *_restriction_of(arguments))

    async def reset(self, kind: str, request: Request) -> Response:
        """Answer with the plan of a reset, or store a plan that is confirmed for the driver.

        The parameters are in the query, because servers in between may drop the body of a DELETE.
        """
        if await arguments_of(request):
            raise InvalidInput(f"DELETE {request.url.path} takes parameters in its query, and no arguments")
        given = request.query_params
        if "token" in given:
            check_known(given, ("token", "discard"))
            if (discard := given.get("discard", "false")) not in ("true", "false"):
                raise InvalidInput(f"discard {discard!r:.20} must be true or false")
            return await self._confirm(kind, request, {"token": given["token"], "discard": discard == "true"})
        check_known(given, RESET_PARAMETERS)
        topic, partition = given.get("topic"), given.get("partition")
        if partition is not None and topic is None:
            raise InvalidInput("partition needs topic")
        number = None if partition is None else number_in("partition", partition, 0, PARTITION_MAX)
        return await self._planned(kind, request, self._start_of, topic, number)

    async def _planned(
        self, kind: str, request: Request, target: Callable[[KnownPipelines, str], OffsetTarget], topic: str | None, partition: int | None,
    ) -> Response:  # fmt: skip
        """Answer with a plan. ``target`` returns where positions shall move, for what is known and the pipeline."""
        known = await self._pages.known()
        pipeline = self._pages.named(known, kind, request)
        self._pages.check_enabled(known, pipeline)
        self._check_stopped(known, pipeline)
        wanted = target(known, pipeline)
        definition = known.reports.pipelines[pipeline].definition if pipeline in known.reports.pipelines else {}
        plan = await self._pages.beside(lambda: self._planning().plan(pipeline, wanted, definition, topic, partition))
        token = self._kept(_Plan(pipeline, plan, self._pages.now_ms())) if plan.moves else None
        return JSONResponse({
            "name": request.path_params["name"], "kind": kind, "moves": list(map(_shown, plan.moves)),
            "discards": any(each.discards for each in plan.moves), "token": token,
        })  # fmt: skip

    async def _confirm(self, kind: str, request: Request, arguments: dict[str, Any]) -> Response:
        """Store a plan for the driver, audited.

        A repeated request stores the plan only if Kafka has not confirmed it before: the plan could overwrite a later one.
        """
        principal: Principal = request.state.principal
        name, action = request.path_params["name"], f"{kind} offsets"
        _check_names(arguments, ("token", "discard"))
        with self._pages.audit.acting(action, name, who=principal.name, peer=principal.peer) as done:
            principal.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
            known = await self._pages.known()
            pipeline = self._pages.named(known, kind, request)
            self._pages.check_enabled(known, pipeline)
            token = str(arguments["token"])
            if not ((made := self._plans.get(token)) is not None and made.stored):  # nothing is stored again
                self._check_stopped(known, pipeline)
            plan = self._plan_of(token, pipeline)
            moves = plan.offsets.moves
            if arguments.get("discard") is not True and any(each.discards for each in moves):
                exclusive = any(each.counted is not None and each.counted.taken for each in moves)
                why = "is or was exclusive" if exclusive else "may be or have been exclusive, and not all messages were counted"
                raise WouldDiscard(
                    f"{kind} {name!r} {why}: messages that only it has would be lost. If they may be lost, repeat the request with"
                    ' "discard": true (command line: --discard)'
                )
            if not plan.stored:
                wish = OffsetsWish(token, tuple(each.move for each in moves), principal.name, self._pages.now_ms(), plan.offsets.after)
                await self._pages.beside(partial(self._pages.topics.want, pipeline, wish))
                if token in self._plans:  # not replaced meanwhile
                    self._plans[token] = plan._replace(stored=True)
            skipped, repeated = sum(each.skipped for each in moves), sum(each.repeated for each in moves)
            done |= {"partitions": len(moves), "skipped": skipped, "repeated": repeated}
        log.info("administrator action", who=principal.name, action=action, arguments={"name": name}, answer={"request": token})
        return JSONResponse({"name": name, "kind": kind, "request": token}, 202)

    def _start_of(self, known: KnownPipelines, pipeline: str) -> OffsetTarget:
        """Return where a new pipeline with the settings of this one would begin. Raises NoOffsets."""
        own, report = self._pages.definition(known, pipeline), known.reports.pipelines.get(pipeline)
        if own is not None:
            start = own.settings.get("start", default_of(pipeline.partition(":")[0], "start"))
        elif report is not None and "start" in report.definition:
            start = report.definition["start"]
        else:
            start = self._starts.get(pipeline)
        if start in (EARLIEST, LATEST):
            return OffsetTarget(start)
        try:
            return OffsetTarget("time", start if isinstance(start, int) else written_time(str(start)).ms)
        except ValueError:
            raise NoOffsets(f"the start of {pipeline} is unknown: no driver has reported its settings") from None

    def _check_stopped(self, known: KnownPipelines, pipeline: str) -> None:
        """Raise NotStopped unless the pipeline is stopped, or will be before a driver starts it."""
        kind, _, name = pipeline.partition(":")
        wanted, state = known.wishes.of(pipeline), self._pages.state_of(known, pipeline)
        if wanted is not WantedState.STOPPED:
            raise NotStopped(f"{kind} {name!r} is not stopped; stop it first (bascule {kind} stop {name})")
        if state not in (PipelineState.STOPPED.value, None):
            raise NotStopped(f"{kind} {name!r} is still {state}; try again when it is stopped (bascule {kind} status {name})")

    def _kept(self, plan: _Plan) -> str:
        token = uuid.uuid4().hex
        self._plans[token] = plan
        if len(self._plans) > PLANS_MAX:
            self._plans.popitem(last=False)
        return token

    def _plan_of(self, token: str, pipeline: str) -> _Plan:
        plan = self._plans.get(token)
        if plan is None or plan.pipeline != pipeline or self._pages.now_ms() - plan.made_ms > PLAN_MS:
            raise UnknownPlan(
                f"this broker has no plan {token!r:.60} for {pipeline}: a plan can be confirmed for {PLAN_MS // 60_000} minutes,"
                " at the broker that made it. Ask for a plan again"
            )
        return plan


def _shown(planned: PlannedMove) -> dict[str, Any]:
    move, counted = planned.move, planned.counted
    shown = {
        "topic": move.topic, "partition": move.partition, "offset": move.offset, "to": move.to, "first": planned.bounds.first,
        "end": planned.bounds.end, "skipped": planned.skipped, "repeated": planned.repeated,
    }  # fmt: skip
    return shown if counted is None else {**shown, "messages": counted.messages, "taken": counted.taken, "counted": counted.complete}


def _request_of(known: KnownPipelines, pipeline: str, found: PipelineOffsets) -> dict[str, Any] | None:
    """Return the last request to move the positions of a pipeline, and what became of it."""
    wish = known.wishes.offsets.get(pipeline)
    if wish is None:
        return None
    mark = found.mark
    state = "pending" if mark.request != wish.id else "done" if mark.moved else "refused"
    report = known.reports.pipelines.get(pipeline)
    said = report.offsets_error if report is not None and report.offsets_request == wish.id else ""
    error = (mark.reason or said or "see the log of the pipelines") if state == "refused" else ""
    return {"id": wish.id, "by": wish.by, "at_ms": wish.at_ms, "state": state, "error": error}


def _target_of(arguments: Mapping[str, Any]) -> OffsetTarget:
    """Return where positions shall move. Raises InvalidInput."""
    _check_names(arguments, (*_TARGETS, "topic", "partition"))
    if sum(name in arguments for name in _TARGETS) != 1:
        raise InvalidInput('exactly one of "to" and "shift_by" is needed')
    if "to" in arguments:
        to = arguments["to"]
        if isinstance(to, bool) or not isinstance(to, str | int):
            raise InvalidInput("\"to\" must be 'earliest', 'latest', an offset or a timestamp")
        return OffsetTarget.parsed(str(to))
    shift = arguments["shift_by"]
    if isinstance(shift, bool) or not isinstance(shift, int) or abs(shift) > OFFSET_MAX:
        raise InvalidInput('"shift_by" must be a number of records')
    return OffsetTarget("shift", shift)


def _restriction_of(arguments: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the topic and the partition whose positions move; None for all. Raises InvalidInput."""
    topic, partition = arguments.get("topic"), arguments.get("partition")
    if topic is not None and not isinstance(topic, str):
        raise InvalidInput('"topic" must be the name of a topic')
    if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int) or topic is None):
        raise InvalidInput('"partition" must be a number, and needs "topic"')
    return topic, partition


def _check_names(arguments: Mapping[str, Any], names: Sequence[str]) -> None:
    if unknown := sorted(set(arguments).difference(names)):
        raise InvalidInput(f"unknown argument {unknown[0]!r:.60}; known here: {', '.join(names)}")
