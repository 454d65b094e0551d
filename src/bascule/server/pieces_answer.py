"""Answers of the admin server that are made in pieces while the peer reads: metrics and JSON of thousands of queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bascule.server.admin_http import ABORT
from bascule.server.answer_places import AnswerPlace
from bascule.server.in_turns import beside

#: Longest time, in seconds, for an answer in pieces to be read. A peer that reads slowly keeps the figures in memory.
ANSWER_TIMEOUT_S: Final = 60.0


class PiecesAnswer(Response):
    """An answer that is made one piece after the other while the peer reads. The connection of a slow peer ends."""

    def __init__(
        self, first: bytes, pieces: AsyncGenerator[bytes, None], media_type: str, *, place: AnswerPlace,
        failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """``first`` is the piece before ``pieces``.

        Give ``place`` back when the answer is sent or the peer is gone, and call ``failed`` with an error while a piece is made.
        """
        super().__init__(headers={"content-type": media_type})
        del self.headers["content-length"]
        self._first = first
        self._pieces = pieces
        self._place = place
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            async with self._place.reading(ANSWER_TIMEOUT_S):
                await self._send(scope, send)
        except Exception as error:
            if not isinstance(error, TimeoutError):
                self._failed(error)
            scope["state"][ABORT]()  # otherwise the answer would look complete to some clients
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            await self._pieces.aclose()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            piece, self._first = self._first, b""
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def made_beside(pieces: Iterator[bytes], turn: asyncio.Semaphore) -> AsyncGenerator[bytes, None]:
    """Yield pieces that another thread makes, each in a ``turn``: several threads at once would hold up the event loop."""
    while True:
        async with turn:
            piece = await beside(partial(next, pieces, b""))
        if not piece:
            return
        yield piece
