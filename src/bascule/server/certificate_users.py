"""The user of a client's certificate: the field that names the user, and the rules that map the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from bascule.config.tls import Tls, UserFrom
from bascule.config.user_names import check_name
from bascule.config.user_rules import UserRule, mapped
from bascule.core.errors import InvalidInput

#: Characters of a name in a certificate. A longer name is refused, because the time that a rule takes grows with it.
CERTIFICATE_NAME_LENGTH_MAX: Final = 1000
#: Errors of certificates that OpenSSL accepts: cryptography raises them besides ValueError.
UNREADABLE: Final = (x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType)


class CertificateUsers:
    """Finds the user of a certificate by the settings of a listener."""

    def __init__(self, tls: Tls) -> None:
        self._from = tls.user_from
        self._rules = [UserRule.parse(text) for text in tls.user_rules]

    def user_of(self, load: Callable[[bytes], x509.Certificate], data: bytes) -> str:
        """Return the user of a certificate that ``load`` reads. Raises ValueError with the reason if it names none."""
        try:
            name = self._name(load(data))
        except UNREADABLE as error:
            raise ValueError(f"it cannot be read: {error}") from error
        if len(name) > CERTIFICATE_NAME_LENGTH_MAX:
            raise ValueError(f"the {self._from} has more than {CERTIFICATE_NAME_LENGTH_MAX} characters")
        user = mapped(self._rules, name) if self._rules else name
        if user is None:
            raise ValueError(f"no rule of user_rules matches {name!r}")
        return check_name(user, "user")

    def _name(self, certificate: x509.Certificate) -> str:
        found = _FIELDS[self._from](certificate)
        if not found:
            raise ValueError(f"it has no {self._from}")
        return found


def user_of_file(tls: Tls, file: Path) -> str:
    """Return the user of the first certificate in a PEM file. Raises InvalidInput."""
    try:
        return CertificateUsers(tls).user_of(x509.load_pem_x509_certificate, file.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{file}: the certificate names no user: {error}") from None


def _common_name(certificate: x509.Certificate) -> str:
    """Return the most specific common name."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[-1].value) if names else ""


def _alternative(kind: type[x509.DNSName | x509.RFC822Name | x509.UniformResourceIdentifier]) -> Callable[[x509.Certificate], str]:
    """Return a function that returns the first subject alternative name of a kind."""

    def first(certificate: x509.Certificate) -> str:
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return ""
        return next(iter(names.get_values_for_type(kind)), "")

    return first


_FIELDS: Final[dict[UserFrom, Callable[[x509.Certificate], str]]] = {
    "common_name": _common_name,
    "distinguished_name": lambda certificate: certificate.subject.rfc4514_string(),
    "san_dns": _alternative(x509.DNSName),
    "san_email": _alternative(x509.RFC822Name),
    "san_uri": _alternative(x509.UniformResourceIdentifier),
}
