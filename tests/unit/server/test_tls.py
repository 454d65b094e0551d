"""TLS of the listeners, on real sockets of this machine."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bascule.amqp.channel_binding import TLS_SERVER_END_POINT, TLS_UNIQUE, server_end_point
from bascule.config.tls import BrokerTls, Tls
from bascule.core.errors import InvalidInput
from bascule.server.listener_tls import amqp_tls, server_context, tls_peer
from bascule.server.tls import client_context
from tests.support.certificates import Authority, Certificate
from tests.support.tls_pair import OfPair, TlsPair, handshake


@pytest.fixture(scope="session")
def server(authority: Authority) -> Certificate:
    return authority.issue("server")


@pytest.fixture(scope="session")
def ann(authority: Authority) -> Certificate:
    return authority.issue("ann")


def settings(server: Certificate, **more: object) -> BrokerTls:
    return BrokerTls.model_validate({"certificate": server.certificate, "key": server.key, **more})


def seen(context: ssl.SSLContext | None, client: ssl.SSLContext) -> str | None:
    """Return the name that a server takes a client for, "refused" if the handshake fails."""

    async def run() -> str | None:
        names: asyncio.Queue[str | None] = asyncio.Queue()

        class Seen(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                names.put_nowait(tls_peer(transport, lambda: True).user)
                assert isinstance(transport, asyncio.Transport)
                transport.close()

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # some tests need a failing handshake
        listener = await loop.create_server(Seen, "127.0.0.1", 0, ssl=context)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.sockets[0].getsockname()[1], ssl=client)
            await reader.read()
            writer.close()
            return "refused" if names.empty() else names.get_nowait()  # TLS 1.3 refuses after the client's side has finished
        except (ssl.SSLError, ConnectionError):
            return "refused"
        finally:
            listener.close()

    return asyncio.run(run())


def client_of(authority: Authority, certificate: Certificate | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    return context


def test_a_client_without_certificate_connects_and_has_no_certified_name(authority: Authority, server: Certificate) -> None:
    assert seen(amqp_tls(settings(server)), client_of(authority)) is None


def test_a_client_with_a_certificate_is_identified_by_its_common_name(authority: Authority, server: Certificate, ann: Certificate) -> None:
    context = amqp_tls(settings(server, client_ca=authority.certificate))
    assert seen(context, client_of(authority, ann)) == "ann"
    assert seen(context, client_of(authority)) is None


def test_a_certificate_is_ignored_without_a_configured_client_ca(authority: Authority, server: Certificate, ann: Certificate) -> None:
    assert seen(amqp_tls(settings(server)), client_of(authority, ann)) is None


def test_a_client_without_a_trusted_certificate_is_refused_if_one_is_required(
    authority: Authority, server: Certificate, tmp_path: Path
) -> None:
    context = amqp_tls(settings(server, client_ca=authority.certificate, client_certificate="required"))
    stranger = Authority(tmp_path, "stranger").issue("ann")
    assert seen(context, client_of(authority)) == "refused"
    assert seen(context, client_of(authority, stranger)) == "refused"


def test_local_command_trusts_only_certificate_of_admin_listener(server: Certificate, ann: Certificate) -> None:
    context = server_context(Tls(certificate=server.certificate, key=server.key), "admin.tls")
    assert seen(context, client_context(server.certificate, "admin.tls")) is None
    assert seen(context, client_context(ann.certificate, "admin.tls")) == "refused"


def test_a_key_may_be_in_the_certificates_file(server: Certificate, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(server.certificate.read_text() + server.key.read_text())
    assert server_context(Tls(certificate=both), "admin.tls") is not None


@pytest.mark.parametrize(
    ("certificate", "key", "text"),
    [
        ("nowhere.pem", "server.key", r"broker.tls.certificate: .*nowhere.pem: No such file or directory"),
        ("server.pem", "nowhere.key", r"broker.tls.key: .*nowhere.key: No such file or directory"),
        ("server.pem", "ann.key", r"certificate .*server.pem with key .*ann.key cannot be used: key values mismatch"),
        ("server.key", "server.key", r"cannot be used: "),
    ],
)
def test_unusable_tls_files_are_named_in_error(server: Certificate, ann: Certificate, certificate: str, key: str, text: str) -> None:
    directory = server.certificate.parent
    with pytest.raises(InvalidInput, match=text):
        amqp_tls(BrokerTls(certificate=directory / certificate, key=directory / key))


def test_an_invalid_client_ca_is_named(server: Certificate) -> None:
    with pytest.raises(InvalidInput, match=r"broker.tls.client_ca: .*server.key cannot be used"):
        amqp_tls(settings(server, client_ca=server.key))


@pytest.mark.parametrize(
    ("version", "kinds"), [(ssl.TLSVersion.TLSv1_2, {TLS_SERVER_END_POINT, TLS_UNIQUE}), (ssl.TLSVersion.TLSv1_3, {TLS_SERVER_END_POINT})]
)
def test_both_sides_of_a_connection_have_the_same_channel_bindings(
    version: ssl.TLSVersion, kinds: set[str], authority: Authority, server: Certificate
) -> None:
    client = client_of(authority)
    client.maximum_version = version
    pair = handshake(amqp_tls(settings(server)), client)
    found = bindings(pair)
    certificate = pair.client.getpeercert(binary_form=True)
    assert certificate is not None
    assert found.keys() == kinds
    assert found[TLS_SERVER_END_POINT] == server_end_point(certificate)
    assert found.get(TLS_UNIQUE) in (None, pair.client.get_channel_binding("tls-unique"))
    assert bindings(handshake(amqp_tls(settings(server)), client)).get(TLS_UNIQUE, b"") != found.get(TLS_UNIQUE)


def test_resumed_session_has_no_channel_binding_that_an_attacker_may_have_made_equal(authority: Authority, server: Certificate) -> None:
    context, client = amqp_tls(settings(server)), client_of(authority)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    first = handshake(context, client)
    resumed = handshake(context, client, session=first.client.session)
    assert resumed.server.session_reused
    assert bindings(resumed).keys() == {TLS_SERVER_END_POINT}


def test_settings_switch_channel_binding_off(authority: Authority, server: Certificate) -> None:
    assert not bindings(handshake(amqp_tls(settings(server, channel_binding=False)), client_of(authority)))


def test_admin_server_has_no_channel_binding(authority: Authority, server: Certificate) -> None:
    context = server_context(Tls(certificate=server.certificate, key=server.key), "admin.tls")
    assert not bindings(handshake(context, client_of(authority)))


def bindings(pair: TlsPair) -> Mapping[str, bytes]:
    transport: Any = OfPair(pair.server)
    return tls_peer(transport, lambda: True).bindings
