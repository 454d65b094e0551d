"""The brokers of the journal over HTTP: any of them answers, also a standby.

GET /brokers    name and address of each broker, and which one is elected
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.kafka.members import BrokerMember
from bascule.server.admin_access import AdminRole
from bascule.server.admin_app import AdminPage
from bascule.server.answers import BrokerAnswer
from bascule.server.in_turns import beside
from bascule.server.listing import check_known


class BrokerPages:
    """The page about the brokers. One request at a time asks Kafka."""

    def __init__(self, members: Callable[[], list[BrokerMember]], own: str) -> None:
        """``members`` asks Kafka, blocking, and ``own`` is the name of this broker."""
        self._members = members
        self._own = own
        self._turn = asyncio.Lock()

    def paths(self) -> list[AdminPage]:
        """Return all paths."""
        return [AdminPage("GET", "/brokers", AdminRole.VIEW, self._list)]

    async def _list(self, request: Request) -> Response:
        check_known(request.query_params, ())
        async with self._turn:
            found = await beside(self._members)
        answers: list[BrokerAnswer] = [
            {"name": each.name, "host": each.host, "elected": each.elected, "this": each.name == self._own} for each in found
        ]
        return JSONResponse(answers)
