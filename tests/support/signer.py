"""An authority that signs any certificate: with other names, times and purposes than those of ``tests.support.certificates``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, ObjectIdentifier

from tests.support.certificates import STORE_PASSWORD, Certificate

DAY = timedelta(days=1)
LOCAL_NAMES = (x509.DNSName("localhost"),)
BOTH_PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Signer:
    """An authority. Times count from now."""

    def __init__(self, directory: Path, name: str = "signer", *, lasts: timedelta = 2 * DAY) -> None:
        """Create an authority. ``directory`` exists and takes the files."""
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name.from_rfc4514_string(f"CN={name}")
        self.certificate = directory / f"{name}.pem"
        made = self._builder(self._name, self._key.public_key(), -DAY, lasts).add_extension(
            x509.BasicConstraints(True, None), critical=True
        )
        self.certificate.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self, name: str, *, subject: str | None = None, names: Sequence[x509.GeneralName] = LOCAL_NAMES, begins: timedelta = -DAY,
        lasts: timedelta = 2 * DAY, purposes: Sequence[ObjectIdentifier] = BOTH_PURPOSES,
    ) -> Certificate:  # fmt: skip
        """Issue a certificate. ``name`` is the name of the files, and the common name unless there is a ``subject`` (RFC 4514)."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name.from_rfc4514_string(subject or f"CN={name}"), key.public_key(), begins, lasts)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if purposes:
            builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        made = Certificate(*(self._directory / f"{name}.{suffix}" for suffix in ("pem", "key", "p12")))
        made.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        encryption = PrivateFormat.PKCS12.encryption_builder().build(STORE_PASSWORD.encode())
        made.store.write_bytes(pkcs12.serialize_key_and_certificates(name.encode(), key, signed, None, encryption))
        return made

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begins: timedelta, lasts: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
            .serial_number(x509.random_serial_number()).not_valid_before(now + begins).not_valid_after(now + lasts)
        )  # fmt: skip
