"""Log-in with the tokens of an OpenID Connect provider."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from bascule.config.fields import Section, is_loopback
from bascule.config.reload_effect import ForNew

#: Signatures by a key of which the broker knows only the public part. With a shared secret (HS256), the broker could make tokens itself.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
ALGORITHMS: Final[tuple[Algorithm, ...]] = ("RS256", "PS256", "ES256", "ES384", "ES512", "EdDSA")
#: Where a provider describes itself (OpenID Connect Discovery 1.0, section 4).
DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
#: A URL of a client's error message: it must fit into a SASL frame of 512 bytes, the limit of some clients.
URL_LENGTH_MAX: Final = 200


def check_url(url: str) -> str:
    """Return a URL from which keys may be fetched: https, or http on this machine. Raises ValueError."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if not host or port == 0 or parts.username is not None or parts.fragment or not url.isprintable() or " " in url:
        raise ValueError("must be a URL such as https://login.example/keys, without a user and without a fragment")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ValueError("must begin with https://, because whoever changes the keys can log in; http:// is allowed on a loopback host")
    return url


Url = Annotated[str, Field(max_length=URL_LENGTH_MAX), AfterValidator(check_url)]


class Oidc(Section):
    """Log-in with the tokens of an OpenID Connect provider. Without ``issuer``, no token is accepted."""

    issuer: ForNew[Url | None] = Field(
        default=None, description="Issuer of the tokens, exactly as in their claim `iss`; unset = no log-in with tokens"
    )
    audience: ForNew[tuple[str, ...]] = Field(
        default=(), description="Names of this broker. The claim `aud` of a token must have one of them; must be given with issuer"
    )
    jwks_url: ForNew[Url | None] = Field(
        default=None, description="URL of the key set; unset, without jwks_file = the `jwks_uri` that the issuer publishes"
    )
    jwks_file: ForNew[Path | None] = Field(default=None, description="File with the key set, in place of a URL")
    ca_file: ForNew[Path | None] = Field(
        default=None, description="PEM file with the authorities that sign the provider's certificate; unset = those of the machine"
    )
    user_claim: ForNew[str] = Field(
        default="sub", min_length=1, description="Claim with the name of the user, such as `preferred_username`"
    )
    roles_claim: ForNew[str | None] = Field(
        default=None,
        min_length=1,
        description="Claim with the roles of the user: a list, or a text with blanks in between. Dots lead into nested claims, as in"
        " `realm_access.roles`; unset = tokens give no roles",
    )
    roles: ForNew[tuple[str, ...]] = Field(
        default=(), description="Roles that a token may give. Other roles in the claim have no effect; must be given with roles_claim"
    )
    required_claims: ForNew[dict[str, str]] = Field(
        default={}, description="Claims that a token must have, each with its value, or with one of the values if the claim is a list"
    )
    algorithms: ForNew[tuple[Algorithm, ...]] = Field(
        default=ALGORITHMS, min_length=1, description="Algorithms of signatures that are accepted; none of them uses a shared secret"
    )
    clock_skew_s: ForNew[float] = Field(
        default=30, ge=0, le=300, description="Accept a token N seconds before its begin and after its end, because clocks differ"
    )
    refresh_s: ForNew[float] = Field(
        default=300,
        ge=10,
        description="Fetch the key set, or read its file, every N seconds. A token with an unknown key causes a further attempt",
    )

    @property
    def enabled(self) -> bool:
        """Return whether a client may log in with a token."""
        return self.issuer is not None

    @property
    def configuration_url(self) -> str:
        """Return the URL at which the issuer describes itself."""
        return f"{(self.issuer or '').removesuffix('/')}{DISCOVERY_PATH}"

    @model_validator(mode="after")
    def _complete(self) -> Oidc:
        if self.issuer is None:
            if given := [key for key in type(self).model_fields if key in self.model_fields_set]:
                raise ValueError(f"{given[0]} is set without issuer; no token would be accepted")
            return self
        if not self.audience or "" in self.audience:
            raise ValueError("audience must be given, because tokens for other services of the issuer are not for this broker")
        if self.jwks_url is not None and self.jwks_file is not None:
            raise ValueError("jwks_url and jwks_file are given; the key set has one source")
        if self.jwks_file is not None and self.ca_file is not None:
            raise ValueError("ca_file is set with jwks_file; nothing is fetched")
        if (self.roles_claim is None) != (not self.roles):
            raise ValueError("roles_claim and roles must be given together: where the roles of a token are, and which of them count")
        return self
