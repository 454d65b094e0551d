"""The listener for AMQP over WebSocket."""

from __future__ import annotations

import urllib.parse

from pydantic import Field, field_validator

from bascule.config.fields import Port, Section
from bascule.config.reload_effect import AtRestart, ForNew

#: Stands for each origin.
ANY_ORIGIN = "*"


class WebSocketListener(Section):
    """AMQP over WebSocket, at the host and with the TLS of ``[broker]``. Without ``port``, the broker does not offer it."""

    port: AtRestart[Port | None] = Field(
        default=None, description="Port for AMQP over WebSocket (`amqpws://`; with TLS `amqpwss://`); 0 = any free port; unset = none"
    )
    origins: ForNew[tuple[str, ...]] = Field(
        default=(),
        description='Origins of web pages whose scripts may connect, such as `"https://shop.example"`; `"*"` = each page. A client that'
        " is no web browser needs no entry",
    )

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urllib.parse.urlsplit(origin)
            whole = bool(parts.scheme and parts.netloc) and origin.lower() == f"{parts.scheme}://{parts.netloc}".lower()
            if origin != ANY_ORIGIN and not whole:
                raise ValueError(f'{origin!r} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT, such as "https://shop.example"')
        return tuple(origin.lower() for origin in origins)
