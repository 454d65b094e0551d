"""Tokens for the logins of a client: one that stays, or a fresh one for each connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from bascule.core.errors import Unavailable
from bascule.threads.background import in_background

Token = str | Callable[[], str]


class NoToken(Unavailable):
    """The application's function returned no token."""


class TokenSupply:
    """Supplies the token of each connection."""

    def __init__(self, token: Token | None) -> None:
        self._token = token
        self._call: Future[str] | None = None  # of the function that has not returned yet

    async def fresh(self) -> str | None:
        """Return the token for the next connection; None without tokens. Raises NoToken.

        A function that has not returned before the caller's timeout is not called again: the next call waits for it.
        """
        if self._token is None or isinstance(self._token, str):
            return self._token
        self._call = self._call or in_background(self._token, "token")
        try:
            token = await asyncio.shield(asyncio.wrap_future(self._call))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._call = None
            raise NoToken(f"the function that returns the token of the connection failed: {error!r}") from error
        self._call = None
        if not isinstance(token, str) or not token:
            raise NoToken("the function that returns the token of the connection returned no text")
        return token
