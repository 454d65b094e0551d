"""Definitions of pipelines at run time over HTTP, with the verbs of Kafka Connect's REST interface: any broker of the journal answers.

POST   /diverts, /ingresses     {"name": …, "config": {…}}: create a pipeline
PUT    /diverts/NAME/config     {…}: replace the settings of a divert, or create it; the same for ingresses
PATCH  /diverts/NAME/config     {…}: change some settings of a divert, and remove those that are null; the same for ingresses
DELETE /diverts/NAME            stop a divert and forget its position; the same for ingresses

Each answers 202 once Kafka has stored the definition; the driver of the pipelines follows. The definition of a divert is also covered by
the journal then: the active broker has said so (bascule.broker.coverage).
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.broker.errors import ResourceLimit, UnknownAddress
from bascule.config.defined import check_change, check_definition
from bascule.config.pipeline_checks import unlisted
from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput, Scope, Unavailable
from bascule.core.log import get_log
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.admin_app import AdminPage
from bascule.server.admin_arguments import arguments_of
from bascule.server.listing import check_known
from bascule.server.pipeline_answers import HeldPipeline, PipelineDefinitionsAnswer
from bascule.writer.control import KINDS, PipelineDefinition, PipelineDeletion, Wishes

if TYPE_CHECKING:
    from bascule.server.pipelines import KnownPipelines, PipelinePages

log = get_log(__name__)

#: Pipelines that can be defined at run time: each costs the driver a task and Kafka clients.
DEFINITIONS_MAX: Final = 200
#: Bytes of the settings of one of them: the driver reads all of them at its start.
DEFINITION_BYTES_MAX: Final = 16 << 10
#: The query parameter of a change: the revision that is replaced.
REVISION: Final = "revision"
#: How long a request waits until the active broker says that its journal covers a divert, in seconds, and between two looks.
COVERED_WITHIN_S: Final = 15.0
#: How long a request waits for the stored positions, in seconds.
BEGUN_S: Final = 10.0
LOOK_S: Final = 0.25
#: How often a request is tried while other brokers change definitions.
TRIES: Final = 10


def held_definitions(pages: PipelinePages, known: KnownPipelines) -> PipelineDefinitionsAnswer:
    """Return the definitions made at run time, without those that have no effect because the file has a pipeline of their name."""
    held: dict[str, list[HeldPipeline]] = {kind: [] for kind in KINDS}
    for pipeline in sorted(known.wishes.definitions):
        kind, _, name = pipeline.partition(":")
        if kind in held and (found := pages.definition(known, pipeline)) is not None:
            held[kind].append({"name": name, "config": dict(found.settings)})
    return {"diverts": held["divert"], "ingresses": held["ingress"]}


def known_id(known: KnownPipelines, pipeline: str) -> str:
    """Return the id of a definition that cannot be read, or is lost, as the driver or brokers have stored it; "" if none of them has.

    The positions of the pipeline belong to the id. Drivers of earlier versions report no id.
    """
    report, ids = known.reports.pipelines.get(pipeline), {mark.id for mark in known.wishes.covered.get(pipeline, ())}
    if report is not None and report.definition_id:
        return report.definition_id
    return ids.pop() if len(ids) == 1 else ""


def replaceable(known: KnownPipelines, pipeline: str, id: str) -> PipelineDefinition:
    """Return what is known about a definition with an id that cannot be read, or is lost: a revision that is not below its own."""
    report, marks = known.reports.pipelines.get(pipeline), known.wishes.covered.get(pipeline, ())
    revisions = [mark.revision for mark in marks if mark.id == id]
    return PipelineDefinition(id, max((1 if report is None else report.revision, 1, *revisions)), {})


class DefinitionConflict(InvalidInput):
    """A pipeline of the name exists already, is defined in the configuration file, or was changed by somebody else."""

    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    http_status = 409


class DivertNotCovered(Unavailable):
    """No active broker has confirmed in time that its journal covers a divert. The definition stays stored."""


class DefinitionPages:
    """The pages about definitions of one kind of pipelines. A broker handles one request at a time (``turn``)."""

    def __init__(self, pages: PipelinePages, settings: Settings, kind: str, collection: str, turn: asyncio.Lock) -> None:
        self._pages = pages
        self._settings = settings
        self._kind = kind
        self._collection = collection
        self._turn = turn

    def paths(self) -> list[AdminPage]:
        """Return all paths."""
        one = f"{self._collection}/{{name}}"
        return [
            AdminPage("POST", self._collection, AdminRole.MANAGE, self._create),
            AdminPage("PUT", f"{one}/config", AdminRole.MANAGE, self._change),
            AdminPage("PATCH", f"{one}/config", AdminRole.MANAGE, self._patch),
            AdminPage("DELETE", one, AdminRole.MANAGE, self._delete),
        ]

    async def _create(self, request: Request) -> Response:
        check_known(request.query_params, ())
        arguments = await arguments_of(request)
        name, given = arguments.pop("name", None), arguments.pop("config", None)
        if arguments or not isinstance(name, str) or not isinstance(given, dict):
            raise InvalidInput('the arguments must be {"name": NAME, "config": {SETTING: VALUE, …}}')
        act = partial(self._define, request, name, given, new=True)
        return await self._audited(request, "create", name, act, arguments=json.dumps(given))

    async def _change(self, request: Request) -> Response:
        check_known(request.query_params, (REVISION,))
        name, given = request.path_params["name"], await arguments_of(request)
        act = partial(self._define, request, name, given, new=False)
        return await self._audited(request, "change", name, act, arguments=json.dumps(given))

    async def _patch(self, request: Request) -> Response:
        check_known(request.query_params, (REVISION,))
        name, given = request.path_params["name"], await arguments_of(request)
        act = partial(self._define, request, name, given, new=False, merges=True)
        return await self._audited(request, "patch", name, act, arguments=json.dumps(given))

    async def _delete(self, request: Request) -> Response:
        check_known(request.query_params, ())
        if await arguments_of(request):
            raise InvalidInput(f"DELETE {request.url.path} takes no arguments")
        name, principal = request.path_params["name"], request.state.principal
        return await self._audited(request, "delete", name, partial(self._undefine, name, principal.name))

    async def _audited(
        self, request: Request, verb: str, name: str, act: Callable[[], Awaitable[dict[str, Any] | None]], **more: str
    ) -> Response:  # fmt: skip
        """Act, and record what was done or refused, with ``more``."""
        principal: Principal = request.state.principal
        action = f"{self._kind} {verb}"
        with self._pages.audit.acting(action, name, who=principal.name, peer=principal.peer, **more) as done:
            principal.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
            async with self._turn:
                done |= await self._decided(act)
            if self._kind == "divert" and "revision" in done:
                await self._covered(name, done["revision"])
        log.info("administrator action", who=principal.name, action=action, arguments={"name": name}, answer=done)
        return JSONResponse({"name": name, "kind": self._kind, **done}, 202)

    async def _decided(self, act: Callable[[], Awaitable[dict[str, Any] | None]]) -> dict[str, Any]:
        """Return the result of an act, which is repeated while it has none: another broker has changed a definition in the meantime."""
        for _ in range(TRIES):
            if (done := await act()) is not None:
                return done
        raise DefinitionConflict("other requests have changed definitions of pipelines all the time; try again")

    async def _define(
        self, request: Request, name: str, given: Mapping[str, Any], *, new: bool, merges: bool = False
    ) -> dict[str, Any] | None:  # fmt: skip
        """Store a definition, and return its revision; None if another definition was stored meanwhile.

        ``merges``: settings that are not given stay, and those that are null go.
        """
        principal: Principal = request.state.principal
        pipeline, known = f"{KINDS[self._kind]}{name}", await self._pages.known(decides=True)
        self._check_free(known, name)
        if merges:
            given = _merged(self._kind, name, known.wishes, given)
        if (size := len(json.dumps(given).encode())) > DEFINITION_BYTES_MAX:
            raise InvalidInput(f"the settings have {size} bytes; at most {DEFINITION_BYTES_MAX} are allowed")
        # Not on the event loop: Python compiles a long pattern of topics in seconds.
        await self._pages.beside(partial(check_definition, self._kind, name, given, self._settings))
        if (user := given.get("user")) is not None and not self._pages.lists_user(user):
            raise InvalidInput(f"'user': {unlisted(user)}")
        before = known.wishes.definitions.get(pipeline)
        unreadable = pipeline in known.wishes.undefined
        if before is None and not unreadable:
            self._check_new(known, name)
        elif new and pipeline not in known.wishes.lost:
            raise DefinitionConflict(f"{self._kind} {name!r} exists already; change it (bascule {self._kind} change {name})")
        elif before is None:
            before = replaceable(known, pipeline, known_id(known, pipeline) or await self._id_of_new(known, pipeline))
        else:
            check_change(self._kind, before.settings, given)
        replaced = request.query_params.get(REVISION)
        if replaced is not None and not unreadable and replaced != str(0 if before is None else before.revision):
            raise DefinitionConflict(f"{self._kind} {name!r} no longer has the revision {replaced!r:.20}; read the definition again")
        id = before.id if before is not None else await self._id_of_new(known, pipeline)
        after = PipelineDefinition(
            id, 1 if before is None else before.revision + 1, dict(given),
            principal.name, self._pages.now_ms(),
        )  # fmt: skip
        stored = await self._pages.beside(partial(self._pages.topics.define, pipeline, after, version=known.wishes.version))
        return {"revision": after.revision} if stored else None

    async def _id_of_new(self, known: KnownPipelines, pipeline: str) -> str:
        """Return the id for a pipeline whose id no topic of the control knows: that of its positions, or a new one if it was deleted."""
        begun = "" if pipeline in known.wishes.deleted else await self._pages.beside(partial(self._pages.topics.begun, pipeline, BEGUN_S))
        return begun or uuid.uuid4().hex

    async def _undefine(self, name: str, who: str) -> dict[str, Any] | None:
        """Delete a definition with all wishes about its pipeline; return None if another definition was stored meanwhile.

        A repeated request completes what an earlier one began.
        """
        pipeline, known = f"{KINDS[self._kind]}{name}", await self._pages.known(decides=True)
        self._check_free(known, name)
        leftover = pipeline in {*known.wishes.states, *known.wishes.restarts, *known.wishes.offsets}
        defined = pipeline in known.wishes.definitions or pipeline in known.wishes.unreadable
        if not defined and not leftover and not self._pages.is_leaving(known, pipeline):
            raise UnknownAddress(f"there is no {self._kind} {name!r:.60}")
        deletion = PipelineDeletion(who, self._pages.now_ms())
        stored = await self._pages.beside(partial(self._pages.topics.undefine, pipeline, deletion, version=known.wishes.version))
        return {} if stored else None

    async def _covered(self, name: str, revision: int) -> None:
        """Return when the active broker says that its journal covers a divert. Raises DivertNotCovered, DefinitionConflict."""
        pipeline, definition = f"{KINDS[self._kind]}{name}", None
        for _ in range(int(COVERED_WITHIN_S / LOOK_S)):
            wishes = (await self._pages.known()).wishes
            definition, covered = wishes.definitions.get(pipeline), wishes.coverage(pipeline)
            if definition is not None and definition.revision > revision:
                raise DefinitionConflict(f"another request has changed {self._kind} {name!r}; check the definition")
            if covered is not None and covered.revision >= revision:
                return
            await asyncio.sleep(LOOK_S)
        if definition is None:
            raise DefinitionConflict(f"another request has deleted divert {name!r}")
        raise DivertNotCovered(
            f"divert {name!r} is stored (revision {revision}), but no active broker has confirmed within {COVERED_WITHIN_S:g} s that its"
            " journal covers it: messages that are sent now may not reach the divert. The active broker will cover it when it serves."
            f" To wait again: bascule divert change {name}"
        )

    def _check_free(self, known: KnownPipelines, name: str) -> None:
        """Raise DefinitionConflict if the configuration of the broker or of the driver has a pipeline of this name."""
        for kind, prefix in KINDS.items():
            pipeline = f"{prefix}{name}"
            if self._pages.in_file(known, pipeline):
                raise DefinitionConflict(f"{kind} {name!r} is defined in the configuration file; change the file and restart the pipelines")

    def _check_new(self, known: KnownPipelines, name: str) -> None:
        for kind, prefix in KINDS.items():
            if f"{prefix}{name}" in known.wishes.definitions or f"{prefix}{name}" in known.wishes.undefined:
                raise DefinitionConflict(f"{kind} {name!r} exists already; names of diverts and ingresses are unique")
        if len(known.wishes.definitions) + len(known.wishes.undefined) >= DEFINITIONS_MAX:
            raise ResourceLimit(f"{DEFINITIONS_MAX} pipelines are defined at run time; delete one, or define this one in the file")


def _merged(kind: str, name: str, wishes: Wishes, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a definition with changes, of which null removes a setting. Raises UnknownAddress, DefinitionConflict."""
    pipeline = f"{KINDS[kind]}{name}"
    if pipeline in wishes.undefined:
        raise DefinitionConflict(f"the settings of {kind} {name!r} that would stay are unknown: {wishes.trouble(pipeline)}; replace it")
    before = wishes.definitions.get(pipeline)
    if before is None:
        raise UnknownAddress(f"there is no {kind} {name!r:.60}")
    return {key: value for key, value in {**before.settings, **given}.items() if key not in given or value is not None}
