"""A certificate authority for tests of TLS, made by the command ``openssl``: PEM for Python, PKCS #12 for Java."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from bascule.embedded.java import find_java

#: Password of each PKCS #12 file: Java opens none without a password.
STORE_PASSWORD = "changeit"
DAYS = 2
TIMEOUT_S = 60


class Certificate(NamedTuple):
    """The files of one holder: certificate and key in PEM, and both in one PKCS #12 file."""

    certificate: Path
    key: Path
    store: Path


def java_options(trust_store: Path, client: Certificate | None = None) -> str:
    """Return the options in a URL of a Java client that trusts an authority, and has a certificate if ``client`` is given."""
    options = {"trustStoreLocation": trust_store, "trustStorePassword": STORE_PASSWORD, "storeType": "PKCS12"}
    if client is not None:
        options |= {"keyStoreLocation": client.store, "keyStorePassword": STORE_PASSWORD}
    return "&".join(f"transport.{name}={value}" for name, value in options.items())


class Authority:
    """An authority that signs certificates for a test."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        """Create an authority. ``directory`` exists and takes the files. Skips the test if the command openssl is missing."""
        if shutil.which("openssl") is None:
            pytest.skip("the command openssl makes the certificates of this test")
        self._directory = directory
        self.certificate = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        self._openssl("req", "-x509", *self._new(self._key, name), "-days", str(DAYS), "-out", str(self.certificate))

    @property
    def trust_store(self) -> Path:
        """Return the authority's certificate in a PKCS #12 file that Java accepts as a trust store."""
        store = self.certificate.with_suffix(".p12")
        if not store.exists():
            self._keytool_import(store)
        return store

    def issue(self, name: str) -> Certificate:
        """Issue a certificate for a server on this machine, or for a client with this common name."""
        made = Certificate(*(self._directory / f"{name}.{suffix}" for suffix in ("pem", "key", "p12")))
        request, names = self._directory / f"{name}.csr", self._directory / f"{name}.names"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        self._openssl("req", "-new", *self._new(made.key, name), "-out", str(request))
        self._openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial",
            "-days", str(DAYS), "-extfile", str(names), "-out", str(made.certificate),
        )  # fmt: skip
        self._openssl(
            "pkcs12", "-export", "-in", str(made.certificate), "-inkey", str(made.key), "-name", name, "-out", str(made.store),
            "-passout", f"pass:{STORE_PASSWORD}",
        )  # fmt: skip
        return made

    @staticmethod
    def _new(key: Path, name: str) -> tuple[str, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-keyout", str(key), "-subj", f"/O=Bascule/CN={name}")

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(("openssl", *arguments), check=True, capture_output=True, timeout=TIMEOUT_S)

    def _keytool_import(self, store: Path) -> None:
        keytool = find_java().home / "bin" / "keytool"
        subprocess.run(
            (keytool, "-importcert", "-noprompt", "-alias", "authority", "-file", self.certificate, "-keystore", store,
             "-storetype", "PKCS12", "-storepass", STORE_PASSWORD),
            check=True, capture_output=True, timeout=TIMEOUT_S,
        )  # fmt: skip
