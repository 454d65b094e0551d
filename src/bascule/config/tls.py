"""TLS of the listeners."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from bascule.config.fields import Secret, Section


class Tls(Section):
    """TLS of a listener. If a certificate is set, the listener accepts no unencrypted connection."""

    certificate: Path | None = Field(
        default=None, description="PEM file with the certificate of the server and the certificates that signed it; unset = no TLS"
    )
    key: Path | None = Field(
        default=None, description="PEM file with the private key of the certificate; unset = the key is in the certificate's file"
    )
    key_password: Secret | None = Field(default=None, description='Password of the private key, or "file:PATH" to read it from a file')

    @property
    def enabled(self) -> bool:
        """Return whether the listener uses TLS."""
        return self.certificate is not None

    @model_validator(mode="after")
    def _certificate_there(self) -> Tls:
        if not self.enabled and (given := [key for key, value in self if value is not None and key in self.model_fields_set]):
            raise ValueError(f"{given[0]} is set without certificate; nothing would be encrypted")
        return self


class BrokerTls(Tls):
    """TLS of the AMQP listener."""

    client_ca: Path | None = Field(
        default=None,
        description="PEM file with the authorities that sign client certificates. A client with such a certificate logs in under the"
        " common name of the certificate (SASL EXTERNAL)",
    )
    client_certificate: Literal["optional", "required"] | None = Field(
        default=None, description="Whether a client may or must present a certificate; unset = optional, if client_ca is set"
    )

    @model_validator(mode="after")
    def _somebody_signs(self) -> BrokerTls:
        if self.client_certificate and self.client_ca is None:
            raise ValueError("client_certificate is set without client_ca; no certificate could be checked")
        return self
