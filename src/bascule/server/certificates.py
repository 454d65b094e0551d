"""The certificates in the files of a listener, and when they expire."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from bascule.config import Settings
from bascule.config.tls import Tls
from bascule.core.errors import InvalidInput

#: Days before the end of a certificate at which it is reported; from the last one on, each day.
WARNED_DAYS: Final = (30, 7, 1)
DAY_S: Final = 86_400
#: Characters of a subject in a log line.
SUBJECT_SHOWN_MAX: Final = 200


class HeldCertificate(NamedTuple):
    """A certificate in the file of a setting. Times are in seconds since 1970."""

    setting: str
    file: Path
    subject: str
    begins_s: float
    expires_s: float
    der: bytes

    @classmethod
    def of(cls, setting: str, file: Path, certificate: x509.Certificate) -> HeldCertificate:
        """Read a certificate. Raises ValueError."""
        subject = certificate.subject.rfc4514_string()[:SUBJECT_SHOWN_MAX]
        begin, end = (each.timestamp() for each in (certificate.not_valid_before_utc, certificate.not_valid_after_utc))
        return cls(setting, file, subject, begin, end, certificate.public_bytes(Encoding.DER))

    @property
    def expires(self) -> str:
        """Return the end in ISO 8601."""
        return _utc(self.expires_s)

    def days_left(self, now_s: float) -> int:
        """Return the days until the end, rounded up. Not positive: the certificate has expired."""
        return math.ceil((self.expires_s - now_s) / DAY_S)

    def stage(self, now_s: float) -> int | None:
        """Return which of the reports is due; None if the end is far. Another stage is due at another of ``WARNED_DAYS``, then each day."""
        left = self.days_left(now_s)
        return left if left <= WARNED_DAYS[-1] else min((days for days in WARNED_DAYS if left <= days), default=None)

    def weakness(self, now_s: float) -> str | None:
        """Return in words that the certificate expires soon, has expired, or is not yet valid."""
        what = f"{self.setting}: {self.file}: the certificate of {self.subject!r}"
        if self.stage(now_s) is not None:
            return f"{what} expires at {self.expires}" if self.expires_s > now_s else f"{what} expired at {self.expires}"
        return f"{what} is not valid before {_utc(self.begins_s)}" if self.begins_s > now_s else None


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def held_certificates(tls: Tls, where: str) -> list[HeldCertificate]:
    """Return the certificates in the files of a listener, the server's own first. ``where`` is its table in the settings.

    Those that only OpenSSL understands are left out. Raises InvalidInput.
    """
    found: list[HeldCertificate] = []
    for key, file in (("certificate", tls.certificate), ("client_ca", tls.client_ca)):
        if file is not None:
            found += _in_file(f"{where}.{key}", file)
    return found


def _in_file(setting: str, file: Path) -> list[HeldCertificate]:
    try:
        return [HeldCertificate.of(setting, file, each) for each in x509.load_pem_x509_certificates(file.read_bytes())]
    except OSError as error:
        raise InvalidInput(f"{setting}: {file}: {error.strerror}") from error
    except (ValueError, x509.InvalidVersion):
        return []


def certificate_weaknesses(settings: Settings, now_s: float) -> Iterator[str]:
    """Yield what is likely wrong about the certificates of the listeners: they expire soon, have expired, or are not yet valid."""
    for tls, where in ((settings.broker.tls, "broker.tls"), (settings.admin.tls, "admin.tls")):
        for each in held_certificates(tls, where):
            weakness = each.weakness(now_s)
            if weakness is not None:
                yield weakness
