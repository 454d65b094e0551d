"""Control of pipelines over HTTP, with the verbs of Kafka Connect's REST interface: any broker of the journal answers, also a standby.

GET  /diverts, /ingresses            the pipelines with their states, JSON; by name with ?expand=status, ?expand=info or both
GET  /diverts/NAME                   the definition
GET  /diverts/NAME/config            the settings alone
GET  /definitions/pipelines          all definitions made at run time, for an export
POST /diverts, /ingresses            define a pipeline at run time (bascule.server.pipeline_definitions)
GET  /diverts/NAME/status            state, positions, lag, last error
PUT  /diverts/NAME/pause|resume|stop store the wanted state; 202 once Kafka has stored it
POST /diverts/NAME/restart           restart the task
     /diverts/NAME/offsets           positions (bascule.server.pipeline_offsets)
GET  /flow                           all of them with the queues at their ends (bascule.server.flow)
     /redrive/…                      dead letters (bascule.server.redrive)

The broker and the driver of the pipelines talk through Kafka only (``bascule.writer.control``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.broker.errors import UnknownAddress
from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput, Scope, Unavailable
from bascule.core.log import get_log
from bascule.core.masking import PropertyMask
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.core.topics import JournalTopics
from bascule.kafka.control import Reports
from bascule.kafka.redriving import RedriveTopics
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.admin_app import AdminPage
from bascule.server.admin_arguments import arguments_of
from bascule.server.audit import AuditTrail
from bascule.server.flow import FlowEnds, FlowPage
from bascule.server.listing import check_known
from bascule.server.pipeline_definitions import DefinitionPages, held_definitions
from bascule.server.pipeline_offsets import OffsetPages, OffsetPlanning
from bascule.server.redrive import RedrivePages
from bascule.threads.background import in_background
from bascule.writer.control import (
    KINDS,
    WANTED_KEY,
    OffsetsWish,
    PipelineDefinition,
    PipelineDeletion,
    PipelineReport,
    PipelineState,
    RestartWish,
    WantedState,
    Wish,
    Wishes,
)
from bascule.writer.redrive import RedriveJob

log = get_log(__name__)

#: How long a request waits for Kafka to answer a read, in seconds.
READ_TIMEOUT_S: Final = 10.0
#: A driver reports every five seconds, and later while it joins a divert on a busy machine. One that has not for this time counts as gone.
SILENT_MS: Final = 90_000
#: Requests about pipelines that are answered at once: each waits for Kafka in a thread of its own.
REQUESTS_AT_ONCE: Final = 2
#: The state of pipelines without a driver, and of those that the driver does not know.
UNASSIGNED: Final = "unassigned"
#: The state of a divert that is defined at run time, and that no driver can begin before the active broker has said that it covers it.
UNCOVERED: Final = "waiting for coverage"
#: The state of a pipeline whose definition is deleted and that the driver has not deleted yet, and what is wanted of it.
DELETING: Final = "deleting"
DELETED: Final = "deleted"
#: What is wanted of a pipeline whose record about this is damaged.
UNREADABLE: Final = "unreadable"
#: Where a pipeline is defined.
IN_FILE: Final = "file"
AT_RUN_TIME: Final = "runtime"
#: Paths of the collections, by kind of pipeline.
COLLECTIONS: Final[Mapping[str, str]] = {"divert": "/diverts", "ingress": "/ingresses"}
WANTED_BY_VERB: Final[Mapping[str, WantedState]] = {
    "pause": WantedState.PAUSED,
    "resume": WantedState.RUNNING,
    "stop": WantedState.STOPPED,
}

#: Parameters of a restart, as Kafka Connect has them. A pipeline has one task, so the first one changes nothing.
INCLUDE_TASKS: Final = "includeTasks"
ONLY_FAILED: Final = "onlyFailed"
#: The parameter of a list, which Kafka Connect has too, and what it can add.
EXPAND: Final = "expand"
#: States of pipelines whose task has failed.
TASK_FAILED: Final = (PipelineState.FAILED.value, PipelineState.RESTARTING.value)

T = TypeVar("T")


class PipelineDisabled(InvalidInput):
    """The configuration disables the pipeline, so it cannot be controlled at run time."""

    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    http_status = 409


class PipelineLeaving(InvalidInput):
    """The definition of the pipeline is deleted, so it cannot be controlled any more."""

    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    http_status = 409


class PipelineTopics(Protocol):
    """The topics by which pipelines are controlled; see bascule.kafka.control.ControlTopics. Blocking."""

    def wishes(self, timeout_s: float, *, decides: bool = False) -> Wishes:
        """Return all wishes. ``decides``: a former leader must not answer. Raises Unavailable."""

    def reports(self, timeout_s: float) -> Reports:
        """Return the newest reports. Raises Unavailable."""

    def begun(self, pipeline: str, timeout_s: float) -> str:
        """Return the id of the definition to which stored positions of a pipeline belong, "" if there are none. Raises Unavailable."""

    def want(self, pipeline: str, wish: Wish | RestartWish | OffsetsWish) -> None:
        """Store a wish. Raises Unavailable."""

    def define(self, pipeline: str, definition: PipelineDefinition, *, version: int | None = None) -> bool:
        """Store a definition if ``Wishes.version`` is ``version``, and return whether it is. Raises Unavailable."""

    def undefine(self, pipeline: str, deletion: PipelineDeletion, *, version: int | None = None) -> bool:
        """Delete a definition and the wishes about its pipeline, likewise. Raises Unavailable."""

    def ask(self, job: RedriveJob) -> None:
        """Store a job for dead letters. Raises Unavailable."""

    def forget(self, jobs: Iterable[str]) -> None:
        """Delete jobs that are finished. Raises Unavailable."""


class KnownPipelines(NamedTuple):
    """What is known about all pipelines."""

    reports: Reports
    wishes: Wishes


class PipelinePages:
    """The pages about pipelines of one broker."""

    def __init__(
        self,
        topics: PipelineTopics,
        settings: Settings,
        audit: AuditTrail,
        now_ms: Callable[[], int],
        planning: Callable[[], OffsetPlanning],
        redriving: Callable[[], RedriveTopics],
        mask: Callable[[], PropertyMask],
        ends: FlowEnds,
        lists_user: Callable[[str], bool] = lambda _user: True,
    ) -> None:
        """``mask`` returns which properties are hidden now: the setting may be reloaded. ``ends`` knows the queues at the ends.

        ``lists_user`` returns whether a user has a password or a role now, or everybody may do everything.
        """
        self._offsets = OffsetPages(self, planning, settings)
        turn = asyncio.Lock()
        self._definitions = tuple(DefinitionPages(self, settings, kind, collection, turn) for kind, collection in COLLECTIONS.items())
        self._flow = FlowPage(self, settings, ends)
        self._redrive = RedrivePages(self, redriving, settings.bridge.id, mask)
        self.topics = topics
        self.lists_user = lists_user
        self.audit = audit
        self.now_ms = now_ms
        #: The pipelines of this broker's own configuration, which its drivers usually share.
        self._configured = {f"{KINDS['divert']}{each.name}": each.enabled for each in settings.divert}
        self._configured |= {f"{KINDS['ingress']}{each.name}": each.enabled for each in settings.ingress}
        self._control_topic = JournalTopics(settings.journal.prefix).control
        self._turn = asyncio.Semaphore(REQUESTS_AT_ONCE)

    def paths(self) -> list[AdminPage]:
        """Return all paths."""
        found = [
            *self._redrive.paths(), AdminPage("GET", "/flow", AdminRole.VIEW, self._flow.show),
            AdminPage("GET", "/definitions/pipelines", AdminRole.VIEW, self._all_definitions),
        ]  # fmt: skip
        for kind, collection in COLLECTIONS.items():
            one = f"{collection}/{{name}}"
            found += [
                AdminPage("GET", collection, AdminRole.VIEW, partial(self._list, kind)),
                AdminPage("GET", one, AdminRole.VIEW, partial(self._show, kind)),
                AdminPage("GET", f"{one}/status", AdminRole.VIEW, partial(self._status, kind)),
                AdminPage("GET", f"{one}/config", AdminRole.VIEW, partial(self._config, kind)),
                *(
                    AdminPage("PUT", f"{one}/{verb}", AdminRole.MANAGE, partial(self._want, kind, verb, wanted))
                    for verb, wanted in WANTED_BY_VERB.items()
                ),
                AdminPage("POST", f"{one}/restart", AdminRole.MANAGE, partial(self._restart, kind)),
                AdminPage("GET", f"{one}/offsets", AdminRole.VIEW, partial(self._offsets.show, kind)),
                AdminPage("PATCH", f"{one}/offsets", AdminRole.MANAGE, partial(self._offsets.change, kind)),
                AdminPage("DELETE", f"{one}/offsets", AdminRole.MANAGE, partial(self._offsets.reset, kind)),
            ]
        return found + [page for pages in self._definitions for page in pages.paths()]

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def _list(self, kind: str, request: Request) -> Response:
        check_known(request.query_params, (EXPAND,))
        made = {"status": self.described, "info": self._defined}
        parts = dict.fromkeys(request.query_params.getlist(EXPAND))
        if unknown := [part for part in parts if part not in made]:
            raise InvalidInput(f"{EXPAND} {unknown[0]!r:.20} must be {' or '.join(made)}")
        known = await self.known()
        names = sorted(name for name in self.names(known) if name.startswith(KINDS[kind]))
        if parts:
            return JSONResponse({name.removeprefix(KINDS[kind]): {part: made[part](known, name) for part in parts} for name in names})
        return JSONResponse([self.described(known, name) for name in names])

    async def _show(self, kind: str, request: Request) -> Response:
        check_known(request.query_params, ())
        known = await self.known()
        return JSONResponse(self._defined(known, self.named(known, kind, request)))

    async def _status(self, kind: str, request: Request) -> Response:
        check_known(request.query_params, ())
        known = await self.known()
        return JSONResponse(self.described(known, self.named(known, kind, request)))

    async def _config(self, kind: str, request: Request) -> Response:
        check_known(request.query_params, ())
        known = await self.known()
        pipeline = self.named(known, kind, request)
        own, report = self.definition(known, pipeline), known.reports.pipelines.get(pipeline)
        if own is not None:
            return JSONResponse(dict(own.settings))
        if pipeline in known.wishes.undefined:
            raise UnknownAddress(known.wishes.trouble(pipeline))
        if report is None or not report.definition:
            raise UnknownAddress(
                f"no driver has reported the settings of {kind} {request.path_params['name']!r:.60} yet; start the pipelines"
            )
        return JSONResponse(dict(report.definition))

    async def _all_definitions(self, request: Request) -> Response:
        check_known(request.query_params, ())
        return JSONResponse(held_definitions(self, await self.known()))

    async def _want(self, kind: str, verb: str, wanted: WantedState, request: Request) -> Response:
        principal: Principal = request.state.principal
        check_known(request.query_params, ())
        return await self._act(kind, verb, request, Wish(wanted, principal.name, self.now_ms()), {"wanted": wanted.value})

    async def _restart(self, kind: str, request: Request) -> Response:
        principal: Principal = request.state.principal
        check_known(request.query_params, (INCLUDE_TASKS, ONLY_FAILED))
        flags = {name: request.query_params.get(name, "false") for name in (INCLUDE_TASKS, ONLY_FAILED)}
        if wrong := [name for name, value in flags.items() if value not in ("true", "false")]:
            raise InvalidInput(f"{wrong[0]} {flags[wrong[0]]!r:.20} must be true or false")
        wish = RestartWish(uuid.uuid4().hex, principal.name, self.now_ms())
        return await self._act(kind, "restart", request, wish, {"restart": wish.id}, only_failed=flags[ONLY_FAILED] == "true")

    async def _act(
        self, kind: str, verb: str, request: Request, wish: Wish | RestartWish, result: dict[str, str | None], *, only_failed: bool = False
    ) -> Response:
        """Store a wish, audited. ``only_failed``: do nothing if the task of the pipeline has not failed."""
        principal: Principal = request.state.principal
        name, action = request.path_params["name"], f"{kind} {verb}"
        if await arguments_of(request):
            raise InvalidInput(f"{request.method} {request.url.path} takes no arguments")
        with self.audit.acting(action, name, who=principal.name, peer=principal.peer):
            principal.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
            known = await self.known()
            pipeline = self.named(known, kind, request)
            self.check_enabled(known, pipeline)
            if only_failed and self.state_of(known, pipeline) not in TASK_FAILED:
                result = dict.fromkeys(result)
            else:
                await self.beside(partial(self.topics.want, pipeline, wish))
        log.info("administrator action", who=principal.name, action=action, arguments={"name": name}, answer=result)
        return JSONResponse({"name": name, "kind": kind, **result}, 202)

    # -- what is known -------------------------------------------------------------------------------------------------

    async def known(self, *, decides: bool = False) -> KnownPipelines:
        """Return the reports and the wishes. Set ``decides`` if what is stored next depends on the wishes. Raises Unavailable."""

        in_file = {name.partition(":")[2] for name in self._configured}

        def read() -> KnownPipelines:
            reports = self.topics.reports(READ_TIMEOUT_S)
            begun = [pipeline for pipeline, report in reports.pipelines.items() if report.revision]
            wishes = self.topics.wishes(READ_TIMEOUT_S, decides=decides).losing(begun, self._control_topic)
            return KnownPipelines(reports, wishes.beside_file(in_file))

        return await self.beside(read)

    async def known_or_nothing(self) -> tuple[KnownPipelines, str]:
        """Return the reports and the wishes, otherwise nothing and the reason why they could not be read."""
        try:
            return await self.known(), ""
        except Unavailable as error:
            return KnownPipelines(Reports(None, {}), Wishes()), str(error)

    async def beside(self, work: Callable[[], T]) -> T:
        """Return the result of work that waits for Kafka, done in a thread."""
        async with self._turn:
            return await asyncio.wrap_future(in_background(work, "pipelines"))

    def names(self, known: KnownPipelines) -> set[str]:
        """Return the names of all pipelines that anybody knows."""
        held = {name for name in known.wishes.states if known.wishes.of(name) is not WantedState.RUNNING}
        return {*self._configured, *known.reports.pipelines, *held, *known.wishes.definitions, *known.wishes.unreadable}

    def named(self, known: KnownPipelines, kind: str, request: Request) -> str:
        """Return the pipeline that a request names. Raises UnknownAddress."""
        name: str = request.path_params["name"]
        pipeline = f"{KINDS[kind]}{name}"
        if pipeline not in self.names(known):
            raise UnknownAddress(f"there is no {kind} {name!r:.60}")
        return pipeline

    def in_file(self, known: KnownPipelines, pipeline: str) -> bool:
        """Return whether the configuration of this broker or of the driver has a pipeline."""
        report = known.reports.pipelines.get(pipeline)
        reported = report is not None and not report.revision and not _is_defined(known, pipeline)
        return pipeline in self._configured or reported

    def is_leaving(self, known: KnownPipelines, pipeline: str) -> bool:
        """Return whether the definition of a pipeline is deleted, and the driver has not deleted the pipeline yet."""
        return self._origin(known, pipeline) == AT_RUN_TIME and not _is_defined(known, pipeline)

    def definition(self, known: KnownPipelines, pipeline: str) -> PipelineDefinition | None:
        """Return the definition that was made at run time, None for a pipeline of the file."""
        return None if self.in_file(known, pipeline) else known.wishes.definitions.get(pipeline)

    def _origin(self, known: KnownPipelines, pipeline: str) -> str:
        report = known.reports.pipelines.get(pipeline)
        defined = _is_defined(known, pipeline) or (report is not None and report.revision > 0)
        return AT_RUN_TIME if defined and not self.in_file(known, pipeline) else IN_FILE

    def check_enabled(self, known: KnownPipelines, pipeline: str) -> None:
        """Raise PipelineDisabled or PipelineLeaving if a pipeline cannot be controlled at run time."""
        if self.is_leaving(known, pipeline):
            raise PipelineLeaving(f"{pipeline.replace(':', ' ', 1)} is being deleted")
        report = known.reports.pipelines.get(pipeline)
        enabled = self._configured.get(pipeline, True) if report is None else report.state is not PipelineState.DISABLED
        if not enabled:
            kind, _, name = pipeline.partition(":")
            raise PipelineDisabled(
                f"{kind} {name!r} has enabled = false in the configuration; set enabled = true and restart the pipelines"
            )

    def state_of(self, known: KnownPipelines, pipeline: str) -> str | None:
        """Return the state that a driver reports which runs now; None if none runs, or if it does not know the pipeline."""
        report, driver = known.reports.pipelines.get(pipeline), known.reports.driver
        alive = driver is not None and driver.running and self.now_ms() - driver.at_ms < SILENT_MS
        return report.state.value if alive and report is not None else None

    def _defined(self, known: KnownPipelines, pipeline: str) -> dict[str, Any]:
        """Return the definition of a pipeline, see ``pipeline_answers.DefinitionAnswer``."""
        kind, _, name = pipeline.partition(":")
        report, own = known.reports.pipelines.get(pipeline), self.definition(known, pipeline)
        return {
            "name": name, "kind": kind, "origin": self._origin(known, pipeline),
            "definition": None if report is None else dict(report.definition),
            "config": None if own is None else dict(own.settings), "revision": None if own is None else own.revision,
        }  # fmt: skip

    def described(self, known: KnownPipelines, pipeline: str) -> dict[str, Any]:
        """Return the status of a pipeline, see ``pipeline_answers.PipelineAnswer``."""
        kind, _, name = pipeline.partition(":")
        wish, report = known.wishes.states.get(pipeline), known.reports.pipelines.get(pipeline)
        own, leaving = self.definition(known, pipeline), self.is_leaving(known, pipeline)
        covered = known.wishes.coverage(pipeline)
        if own is None or (covered is not None and covered.revision < own.revision):
            covered = None
        unassigned = UNCOVERED if own is not None and kind == "divert" and covered is None else UNASSIGNED
        wanted = UNREADABLE if WANTED_KEY in known.wishes.unreadable.get(pipeline, ()) else known.wishes.of(pipeline).value
        figures = _figures(report, current=report is not None and report.is_of(own))
        return {
            "name": name, "kind": kind, "origin": self._origin(known, pipeline), "revision": None if own is None else own.revision,
            "state": DELETING if leaving else self.state_of(known, pipeline) or unassigned,
            "wanted": DELETED if leaving else wanted,
            "wanted_by": "" if wish is None else wish.by,
            "wanted_at_ms": None if wish is None else wish.at_ms,
            "covered_from": None if covered is None else covered.offset,
            **figures, "error": known.wishes.trouble(pipeline) or figures["error"],
        }  # fmt: skip


def _is_defined(known: KnownPipelines, pipeline: str) -> bool:
    """Return whether there is a definition made at run time, also one that cannot be read or is lost."""
    return pipeline in known.wishes.definitions or pipeline in known.wishes.undefined


def _figures(report: PipelineReport | None, *, current: bool) -> dict[str, Any]:
    """Return the rest of a status: what the driver has reported, or nothing. ``current``: it ran the pipeline by the definition of now."""
    if report is None:
        return {
            "group": "", "lag": None, "lag_bytes": None, "records_per_s": None, "latency_p50_s": None, "latency_p99_s": None,
            "restarts": None, "error": "", "error_at_ms": None, "partitions": 0,
            "sources": [], "driver": "", "reported_at_ms": None, "reported_revision": None,
        }  # fmt: skip
    return {
        "group": report.group,
        "lag": report.lag,
        "lag_bytes": report.lag_bytes,
        "records_per_s": report.records_per_s,
        "latency_p50_s": report.latency_p50_s,
        "latency_p99_s": report.latency_p99_s,
        "restarts": report.restarts,
        "error": report.error,
        "error_at_ms": report.error_at_ms or None,
        "partitions": report.partitions,
        "sources": [dict(zip(("topic", "partition", "offset", "end"), each, strict=True)) for each in report.sources],
        "driver": report.driver,
        "reported_at_ms": report.at_ms,
        "reported_revision": report.revision or None if current else None,
    }


def wall_ms() -> int:
    """Return the time of this machine's clock."""
    return int(time.time() * 1000)
