"""Settings of the admin server."""

from __future__ import annotations

from pydantic import Field

from bascule.config.fields import Port, Secret, Section
from bascule.config.tls import Tls


class Admin(Section):
    """Health checks, status, metrics and actions over HTTP."""

    host: str = Field(default="127.0.0.1", description="Address on which the admin server listens")
    port: Port = Field(default=8672, description="Port of the admin server; 0 = any free port")
    tls: Tls = Field(default=Tls(), description="TLS of this listener: `[admin.tls]`")
    hosts: tuple[str, ...] = Field(
        default=(),
        description="Further host names under which clients reach the admin server. IP addresses, `localhost`, `admin.host` and the name of"
        " the machine are always allowed",
    )
    token: Secret | None = Field(
        default=None,
        description='Token with the role `manage`, sent as `Authorization: Bearer`, or "file:PATH" to read it from a file',
    )
    edit_token: Secret | None = Field(default=None, description="Token with the role `edit`, in the same forms")
    view_token: Secret | None = Field(default=None, description="Token with the role `view`, in the same forms")
    manage: tuple[str, ...] = Field(
        default=(), description='Roles of `[broker.roles]` whose users have the role `manage`; "*" = all users, here and below'
    )
    edit: tuple[str, ...] = Field(default=(), description="Roles of `[broker.roles]` whose users have the role `edit`")
    view: tuple[str, ...] = Field(default=(), description="Roles of `[broker.roles]` whose users have the role `view`")
    public_metrics: bool = Field(default=False, description="Whether `/metrics` needs no role")

    @property
    def url_scheme(self) -> str:
        """Return the scheme of the URL of the admin server."""
        return "https" if self.tls.enabled else "http"

    @property
    def restricted(self) -> bool:
        """Return whether the settings name somebody who may use the admin server."""
        return bool(self.token or self.edit_token or self.view_token or self.manage or self.edit or self.view)
