"""Settings of the admin server."""

from __future__ import annotations

from pydantic import Field

from bascule.config.fields import Port, Secret, Section
from bascule.config.reload_effect import AtOnce, AtRestart
from bascule.config.tls import Tls


class Admin(Section):
    """Health checks, status, metrics and actions over HTTP."""

    host: AtRestart[str] = Field(default="127.0.0.1", description="Address on which the admin server listens")
    port: AtRestart[Port] = Field(default=8672, description="Port of the admin server; 0 = any free port")
    tls: Tls = Field(default=Tls(), description="TLS of this listener: `[admin.tls]`")
    hosts: AtOnce[tuple[str, ...]] = Field(
        default=(),
        description="Further host names under which clients reach the admin server. IP addresses, `localhost`, `admin.host` and the name of"
        " the machine are always allowed",
    )
    token: AtOnce[Secret | None] = Field(
        default=None,
        description='Token with the role `manage`, sent as `Authorization: Bearer`, or "file:PATH" to read it from a file',
    )
    edit_token: AtOnce[Secret | None] = Field(default=None, description="Token with the role `edit`, in the same forms")
    view_token: AtOnce[Secret | None] = Field(default=None, description="Token with the role `view`, in the same forms")
    manage: AtOnce[tuple[str, ...]] = Field(
        default=(), description='Roles of users or tokens that have the role `manage`; "*" = all users, here and below'
    )
    edit: AtOnce[tuple[str, ...]] = Field(default=(), description="Roles of users or tokens that have the role `edit`")
    view: AtOnce[tuple[str, ...]] = Field(default=(), description="Roles of users or tokens that have the role `view`")
    masked_properties: AtOnce[tuple[str, ...]] = Field(
        default=(),
        description="Names of message properties, with `*` and `?`, whose values `bascule browse`, `bascule receive`, the"
        " console, logs and the reasons of dead letters show as `********`",
    )
    public_metrics: AtOnce[bool] = Field(default=False, description="Whether `/metrics` needs no role")

    @property
    def url_scheme(self) -> str:
        """Return the scheme of the URL of the admin server."""
        return "https" if self.tls.enabled else "http"

    @property
    def restricted(self) -> bool:
        """Return whether the settings name somebody who may use the admin server."""
        named = self.token or self.edit_token or self.view_token or self.manage or self.edit or self.view
        return bool(named or self.tls.client_ca)
