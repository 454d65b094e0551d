"""TLS of the listeners: contexts from the settings, and what TLS says about a client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from cryptography import x509

from bascule.amqp.channel_binding import NO_BINDINGS, TLS_SERVER_END_POINT, TLS_UNIQUE, server_end_point
from bascule.config.tls import BrokerTls, Tls
from bascule.core.errors import InvalidInput
from bascule.core.log import get_log
from bascule.server.certificate_users import CertificateUsers
from bascule.server.certificates import held_certificates
from bascule.server.tls import check_readable, reason_of, trust

#: Cipher suites for TLS 1.2: with forward secrecy and authenticated encryption. Those of TLS 1.3 have both.
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
#: Characters of the reason why a certificate names no user, which may have a name of the certificate.
REASON_SHOWN_MAX: Final = 200

log = get_log(__name__)


class ListenerContext(ssl.SSLContext):
    """The TLS context of a listener, with what the module ``ssl`` does not tell about it."""

    binds = False  # whether clients may bind their login to the connection
    end_point: bytes | None = None  # channel binding of the certificate
    users: CertificateUsers | None = None  # of clients' certificates


class TlsPeer(NamedTuple):
    """What TLS says about a client: the user of its certificate, and the channel bindings of its connection."""

    user: str | None = None
    bindings: Mapping[str, bytes] = NO_BINDINGS


def server_context(tls: Tls, where: str) -> ListenerContext | None:
    """Return the TLS context of a listener; None if it has no certificate. ``where`` is its table in the file. Raises InvalidInput."""
    if tls.certificate is None:
        return None
    context = ListenerContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(CIPHERS)
    key = tls.key or tls.certificate
    check_readable(tls.certificate, f"{where}.certificate")
    check_readable(key, f"{where}.key")
    # Without a password OpenSSL would ask for one on the terminal.
    password = tls.key_password.get_secret_value() if tls.key_password else ""
    try:
        context.load_cert_chain(tls.certificate, key, password=lambda: password)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{where}: certificate {tls.certificate} with key {key} cannot be used: {reason_of(error)}") from error
    if tls.client_ca is not None:
        trust(context, tls.client_ca, f"{where}.client_ca")
        context.verify_mode = ssl.CERT_OPTIONAL
        context.users = CertificateUsers(tls)
    return context


def amqp_tls(tls: BrokerTls) -> ListenerContext | None:
    """Return the TLS context of the AMQP listener. Raises InvalidInput."""
    context = server_context(tls, "broker.tls")
    if context is not None and tls.channel_binding:
        context.binds, context.end_point = True, _end_point(tls)
    if context is not None and tls.client_certificate == "required":
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def tls_peer(transport: asyncio.BaseTransport, may_log: Callable[[], bool]) -> TlsPeer:
    """Return what the TLS layer says about a client; nothing for a connection without TLS.

    If a certificate names no user, the log says so if ``may_log`` returns True.
    """
    ssl_object = transport.get_extra_info("ssl_object")
    if ssl_object is None or not isinstance(ssl_object.context, ListenerContext):
        return TlsPeer()
    host = (transport.get_extra_info("peername") or ("",))[0]
    return TlsPeer(_user(ssl_object, ssl_object.context, host, may_log), _bindings(ssl_object, ssl_object.context))


def _user(ssl_object: ssl.SSLObject, context: ListenerContext, host: str, may_log: Callable[[], bool]) -> str | None:
    """Return the user of the certificate that a client has presented and the TLS layer has verified; None if there is none."""
    presented = ssl_object.getpeercert(binary_form=True)
    if presented is None or context.users is None:
        return None
    try:
        return context.users.user_of(x509.load_der_x509_certificate, presented)
    except ValueError as error:  # also a certificate that is valid only for OpenSSL
        if may_log():
            log.info("client certificate names no user", host=host, reason=str(error)[:REASON_SHOWN_MAX])
        return None


def _bindings(ssl_object: ssl.SSLObject, context: ListenerContext) -> Mapping[str, bytes]:
    """Return the channel bindings of a connection."""
    if not context.binds:
        return NO_BINDINGS
    found = {} if context.end_point is None else {TLS_SERVER_END_POINT: context.end_point}
    # In a resumed session, an attacker may have made it equal in two connections (RFC 7627, section 1). TLS 1.3 does not define it.
    if ssl_object.version() == "TLSv1.2" and not ssl_object.session_reused:
        unique = ssl_object.get_channel_binding("tls-unique")
        found |= {} if unique is None else {TLS_UNIQUE: unique}
    return found


def _end_point(tls: Tls) -> bytes | None:
    own = held_certificates(tls.model_copy(update={"client_ca": None}), "broker.tls")
    return server_end_point(own[0].der) if own else None
