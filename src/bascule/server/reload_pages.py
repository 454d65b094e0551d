"""The path of the admin server that reloads the settings."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.core.errors import InvalidInput
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.admin_app import AdminPage
from bascule.server.admin_arguments import arguments_of
from bascule.server.audit import AuditTrail
from bascule.server.reload import ACTION, SettingsReload

RELOAD_PATH: Final = "/config/reload"


class ReloadPages:
    """Reloads the settings of one broker for an administrator."""

    def __init__(self, reload: SettingsReload, audit: AuditTrail) -> None:
        self._reload = reload
        self._audit = audit

    def paths(self) -> list[AdminPage]:
        """Return all paths."""
        return [AdminPage("POST", RELOAD_PATH, AdminRole.MANAGE, self._answer)]

    async def _answer(self, request: Request) -> Response:
        """Reload, audited."""
        principal: Principal = request.state.principal
        if await arguments_of(request):
            raise InvalidInput(f"POST {RELOAD_PATH} takes no arguments")
        with self._audit.acting(ACTION, "", who=principal.name, peer=principal.peer) as done:
            principal.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
            compared = await self._reload.reload(principal.name)
            names = {"applied": compared.applied, "needs_restart": compared.needs_restart}
            done |= {name: ", ".join(each.key for each in changes) for name, changes in names.items()}
        return JSONResponse(compared.as_object())
