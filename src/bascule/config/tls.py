"""TLS of the listeners."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from bascule.config.fields import Secret, Section
from bascule.config.reload_effect import ForNew
from bascule.config.user_rules import UserRule

#: The field of a client's certificate that names the user. ``san_``: the first subject alternative name of a kind.
UserFrom = Literal["common_name", "distinguished_name", "san_dns", "san_email", "san_uri"]


class Tls(Section):
    """TLS of a listener. If a certificate is set, the listener accepts no unencrypted connection."""

    certificate: ForNew[Path | None] = Field(
        default=None, description="PEM file with the certificate of the server and the certificates that signed it; unset = no TLS"
    )
    key: ForNew[Path | None] = Field(
        default=None, description="PEM file with the private key of the certificate; unset = the key is in the certificate's file"
    )
    key_password: ForNew[Secret | None] = Field(
        default=None, description='Password of the private key, or "file:PATH" to read it from a file'
    )
    client_ca: ForNew[Path | None] = Field(
        default=None,
        description="PEM file with the authorities that sign client certificates. A client with such a certificate needs no password",
    )
    user_from: ForNew[UserFrom] = Field(
        default="common_name",
        description="The field of a client's certificate that names the user: `common_name`, `distinguished_name` (as in RFC 4514:"
        " `CN=ann,OU=sales,O=Acme`), or the first subject alternative name of a kind: `san_dns`, `san_email` or `san_uri`",
    )
    user_rules: ForNew[tuple[str, ...]] = Field(
        default=(),
        description="Rules that map this field to the user, as in Kafka's `ssl.principal.mapping.rules`: `RULE:PATTERN/REPLACEMENT/`, with"
        " `L` (lower case) or `U` (upper case) at its end, or `DEFAULT`. The first rule whose pattern matches the whole field counts; if"
        " none matches, the certificate is no login. Unset = the field is the user",
    )
    only_known_users: ForNew[bool] = Field(
        default=False,
        description="Accept only certificates of users in users, in users_file, or in roles of [broker]; false = of all users",
    )

    @field_validator("user_rules")
    @classmethod
    def _rules(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for each in rules:
            UserRule.parse(each)
        return rules

    @property
    def enabled(self) -> bool:
        """Return whether the listener uses TLS."""
        return self.certificate is not None

    @model_validator(mode="after")
    def _certificate_there(self) -> Tls:
        if not self.enabled and (given := [key for key, value in self if value is not None and key in self.model_fields_set]):
            raise ValueError(f"{given[0]} is set without certificate; nothing would be encrypted")
        return self

    @model_validator(mode="after")
    def _somebody_signs(self) -> Tls:
        about_clients = ("client_certificate", "user_from", "user_rules", "only_known_users")
        if self.client_ca is None and (given := [key for key in about_clients if key in self.model_fields_set and getattr(self, key)]):
            raise ValueError(f"{given[0]} is set without client_ca; no certificate could be checked")
        return self


class BrokerTls(Tls):
    """TLS of the AMQP listener."""

    client_certificate: ForNew[Literal["optional", "required"] | None] = Field(
        default=None, description="Whether a client may or must present a certificate; unset = optional, if client_ca is set"
    )
    channel_binding: ForNew[bool] = Field(
        default=True,
        description="Offer logins by password that are bound to the TLS connection (SCRAM-SHA-512-PLUS, SCRAM-SHA-256-PLUS). Set this to"
        " false if a proxy between clients and broker ends TLS and presents another certificate than the broker",
    )
