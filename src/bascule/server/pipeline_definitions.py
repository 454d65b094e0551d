"""Definitions of ingresses at run time over HTTP, with the verbs of Kafka Connect's REST interface: any broker of the journal answers.

POST   /ingresses               {"name": …, "config": {…}}: create an ingress
PUT    /ingresses/NAME/config   {…}: replace the settings of an ingress, or create it
DELETE /ingresses/NAME          stop an ingress and forget its positions

Each answers 202 once Kafka has stored the definition; the driver of the pipelines follows.
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
from bascule.config.defined import check_change, defined_ingress
from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput, Scope
from bascule.core.log import get_log
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.admin_app import AdminPage
from bascule.server.admin_arguments import arguments_of
from bascule.writer.control import KINDS, PipelineDefinition

if TYPE_CHECKING:
    from bascule.server.pipelines import KnownPipelines, PipelinePages

log = get_log(__name__)

#: Pipelines that can be defined at run time: each costs the driver a task and Kafka clients.
DEFINITIONS_MAX: Final = 200
#: Bytes of the settings of one of them: the driver reads all of them at its start.
DEFINITION_BYTES_MAX: Final = 16 << 10
#: The query parameter of a change: the revision that is replaced.
REVISION: Final = "revision"
_KIND: Final = "ingress"


class DefinitionConflict(InvalidInput):
    """A pipeline of the name exists already, is defined in the configuration file, or was changed by somebody else."""

    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    http_status = 409


class DefinitionPages:
    """The pages about definitions of one broker. A broker handles one request at a time."""

    def __init__(self, pages: PipelinePages, settings: Settings, collection: str) -> None:
        self._pages = pages
        self._settings = settings
        self._collection = collection
        self._turn = asyncio.Lock()

    def paths(self) -> list[AdminPage]:
        """Return all paths."""
        one = f"{self._collection}/{{name}}"
        return [
            AdminPage("POST", self._collection, AdminRole.MANAGE, self._create),
            AdminPage("PUT", f"{one}/config", AdminRole.MANAGE, self._change),
            AdminPage("DELETE", one, AdminRole.MANAGE, self._delete),
        ]

    async def _create(self, request: Request) -> Response:
        arguments = await arguments_of(request)
        name, given = arguments.pop("name", None), arguments.pop("config", None)
        if arguments or not isinstance(name, str) or not isinstance(given, dict):
            raise InvalidInput('the arguments must be {"name": NAME, "config": {SETTING: VALUE, …}}')
        return await self._audited(request, "create", name, partial(self._define, request, name, given, new=True))

    async def _change(self, request: Request) -> Response:
        name, given = request.path_params["name"], await arguments_of(request)
        return await self._audited(request, "change", name, partial(self._define, request, name, given, new=False))

    async def _delete(self, request: Request) -> Response:
        if await arguments_of(request):
            raise InvalidInput(f"DELETE {request.url.path} takes no arguments")
        name = request.path_params["name"]
        return await self._audited(request, "delete", name, partial(self._undefine, name))

    async def _audited(self, request: Request, verb: str, name: str, act: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
        """Act, and record what was done or refused."""
        principal: Principal = request.state.principal
        action = f"{_KIND} {verb}"
        with self._pages.audit.acting(action, name, who=principal.name, peer=principal.peer) as done:
            principal.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
            async with self._turn:
                done |= await act()
        log.info("administrator action", who=principal.name, action=action, arguments={"name": name}, answer=done)
        return JSONResponse({"name": name, "kind": _KIND, **done}, 202)

    async def _define(self, request: Request, name: str, given: Mapping[str, Any], *, new: bool) -> dict[str, Any]:
        """Store a definition, and return its revision."""
        principal: Principal = request.state.principal
        pipeline, known = f"{KINDS[_KIND]}{name}", await self._pages.known(decides=True)
        self._check_free(known, name)
        defined_ingress(name, given, self._settings)
        if (size := len(json.dumps(given).encode())) > DEFINITION_BYTES_MAX:
            raise InvalidInput(f"the settings have {size} bytes; at most {DEFINITION_BYTES_MAX} are allowed")
        before = known.wishes.definitions.get(pipeline)
        if before is None:
            self._check_new(known, name)
        elif new:
            raise DefinitionConflict(f"{_KIND} {name!r} exists already; change it (bascule {_KIND} change {name})")
        else:
            check_change(before.settings, given)
        replaced = request.query_params.get(REVISION)
        if replaced is not None and replaced != str(0 if before is None else before.revision):
            raise DefinitionConflict(f"{_KIND} {name!r} does not have the revision {replaced!r:.20} any more; somebody has changed it")
        after = PipelineDefinition(
            uuid.uuid4().hex if before is None else before.id, 1 if before is None else before.revision + 1, dict(given),
            principal.name, self._pages.now_ms(),
        )  # fmt: skip
        await self._pages.beside(partial(self._pages.topics.define, pipeline, after))
        # Another broker may have stored one at the same time: the later one counts.
        if (await self._pages.known(decides=True)).wishes.definitions.get(pipeline) != after:
            raise DefinitionConflict(f"somebody else has defined {_KIND} {name!r} at the same time; look at it, and try again")
        return {"revision": after.revision}

    async def _undefine(self, name: str) -> dict[str, Any]:
        """Delete a definition with all wishes about its pipeline. A repeated request completes what an earlier one began."""
        pipeline, known = f"{KINDS[_KIND]}{name}", await self._pages.known(decides=True)
        self._check_free(known, name)
        leftover = pipeline in {*known.wishes.states, *known.wishes.restarts, *known.wishes.offsets}
        if pipeline not in known.wishes.definitions and not leftover and not self._pages.is_leaving(known, pipeline):
            raise UnknownAddress(f"there is no {_KIND} {name!r:.60}")
        await self._pages.beside(partial(self._pages.topics.undefine, pipeline))
        # Another broker may have stored a change at the same time. A definition with another id is a new one.
        before, after = known.wishes.definitions.get(pipeline), (await self._pages.known(decides=True)).wishes.definitions.get(pipeline)
        if before is not None and after is not None and before.id == after.id:
            raise DefinitionConflict(f"somebody else has changed {_KIND} {name!r} at the same time, so it still exists; delete it again")
        return {}

    def _check_free(self, known: KnownPipelines, name: str) -> None:
        """Raise DefinitionConflict if the configuration of the broker or of the driver has a pipeline of this name."""
        for kind, prefix in KINDS.items():
            pipeline = f"{prefix}{name}"
            if self._pages.in_file(known, pipeline):
                raise DefinitionConflict(f"{kind} {name!r} is defined in the configuration file; change the file and restart the pipelines")

    def _check_new(self, known: KnownPipelines, name: str) -> None:
        for kind, prefix in KINDS.items():
            if f"{prefix}{name}" in known.wishes.definitions:
                raise DefinitionConflict(f"{kind} {name!r} exists already; names of diverts and ingresses are unique")
        if len(known.wishes.definitions) >= DEFINITIONS_MAX:
            raise ResourceLimit(f"{DEFINITIONS_MAX} pipelines are defined at run time; delete one, or define this one in the file")
