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
    """The page about the brokers. Requests that come while Kafka is asked share the answer."""

    def __init__(self, members: Callable[[], list[BrokerMember]], own: str) -> None:
        """``members`` asks Kafka, blocking, and ``own`` is the name of this broker."""
        self._members = members
        self._own = own
        self._asking: asyncio.Task[list[BrokerMember]] | None = None

    def paths(self) -> list[AdminPage]:
        """Return all paths."""
        return [AdminPage("GET", "/brokers", AdminRole.VIEW, self._list)]

    async def _list(self, request: Request) -> Response:
        check_known(request.query_params, ())
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(beside(self._members), name="brokers")
        found = await asyncio.shield(self._asking)
        answers: list[BrokerAnswer] = [
            {"name": each.name, "host": each.host, "elected": each.elected, "this": each.name == self._own} for each in found
        ]
        return JSONResponse(answers)
