"""Users of client certificates, with TLS on real sockets: the field that names the user, rules, known users, and the admin server."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from bascule.amqp.sasl import ExternalClient, PlainClient, SaslClient, SaslServer
from bascule.config import Settings
from bascule.config.tls import BrokerTls
from bascule.config.users_file import User, changing
from bascule.core.errors import InvalidInput
from bascule.server.admin_logins import admin_access
from bascule.server.certificate_users import CERTIFICATE_NAME_LENGTH_MAX, user_of_file
from bascule.server.listener_tls import TlsPeer, server_context
from bascule.server.logins import LoginChecks, sasl_mechanisms
from bascule.server.user_directory import EndedLogins, UserDirectory, listed_users
from tests.support.certificates import Certificate
from tests.support.signer import Signer
from tests.unit.amqp.pair import Pair
from tests.unit.server.test_admin import Broker, served

NAMES = (
    x509.RFC822Name("ann@acme.example"), x509.DNSName("ann.acme.example"), x509.DNSName("second.example"),
    x509.UniformResourceIdentifier("spiffe://acme/ann"),
)  # fmt: skip
SUBJECT = r"CN=ann,OU=sales\, north,O=Acme"


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("signer"))


@pytest.fixture(scope="module")
def ann(signer: Signer) -> Certificate:
    return signer.issue("ann", subject=SUBJECT, names=NAMES)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tls(**more: object) -> BrokerTls:
    return BrokerTls.model_validate({"certificate": "c", "client_ca": "a", **more})


@pytest.mark.parametrize(
    ("settings", "user"),
    [
        ({}, "ann"),
        ({"user_from": "distinguished_name"}, SUBJECT),
        ({"user_from": "san_dns"}, "ann.acme.example"),
        ({"user_from": "san_email"}, "ann@acme.example"),
        ({"user_from": "san_uri"}, "spiffe://acme/ann"),
        ({"user_from": "distinguished_name", "user_rules": ["RULE:CN=(.*?),.*,O=Acme/acme-$1/"]}, "acme-ann"),
        ({"user_from": "san_uri", "user_rules": [r"RULE:spiffe:\/\/acme\/(.*)/$1/U", "DEFAULT"]}, "ANN"),
    ],
)
def test_settings_choose_the_field_and_the_rules_that_name_the_user(settings: dict[str, Any], user: str, ann: Certificate) -> None:
    assert user_of_file(tls(**settings), ann.certificate) == user


@pytest.mark.parametrize(
    ("settings", "subject", "reason"),
    [
        ({}, "O=Acme", "it has no common_name"),
        ({"user_from": "san_uri"}, "CN=ann", "it has no san_uri"),
        ({"user_rules": ["RULE:b.*/b/"]}, "CN=ann", "no rule of user_rules matches 'ann'"),
        ({"user_rules": ["RULE:ann//"]}, "CN=ann", "1 to 200 printable characters"),
        ({}, "CN=anonymous", "'anonymous' is the user of a client without a login"),
        ({}, r"CN=ann\0A", "printable"),
        ({}, r"CN=ann\00.acme", "printable"),
        ({"user_from": "distinguished_name"}, ",".join(["OU=" + "x" * 60] * 20), f"more than {CERTIFICATE_NAME_LENGTH_MAX} characters"),
    ],
)
def test_certificate_without_a_valid_user_is_no_login_and_the_reason_is_told(
    settings: dict[str, Any], subject: str, reason: str, signer: Signer
) -> None:
    other = signer.issue("other", subject=subject, names=())
    with pytest.raises(InvalidInput, match=reason):
        user_of_file(tls(**settings), other.certificate)


@pytest.mark.parametrize(
    ("given", "instead", "reason"),
    [
        (bytes.fromhex("0603551d25"), bytes.fromhex("0603551d11"), "it cannot be read: Duplicate"),  # the purposes are names, too
        (bytes.fromhex("a003020102"), bytes.fromhex("a003020107"), "it cannot be read: 7"),
    ],
)
def test_certificate_that_cannot_be_read_is_no_login(given: bytes, instead: bytes, reason: str, ann: Certificate, tmp_path: Path) -> None:
    content = ssl.PEM_cert_to_DER_cert(ann.certificate.read_text())
    assert content.count(given) == 1
    (tmp_path / "odd.pem").write_text(ssl.DER_cert_to_PEM_cert(content.replace(given, instead)))
    with pytest.raises(InvalidInput, match=reason):
        user_of_file(tls(user_from="san_dns"), tmp_path / "odd.pem")


def test_most_specific_common_name_counts(signer: Signer) -> None:
    both = signer.issue("both", subject="CN=ann,CN=group,O=Acme")
    assert user_of_file(tls(), both.certificate) == "ann"


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_file_without_a_certificate_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"none\.pem"):
        user_of_file(tls(), tmp_path / "none.pem")


def directory(**broker: Any) -> tuple[Settings, UserDirectory]:
    certificates = {"certificate": "c", "client_ca": "a", "only_known_users": True}
    chosen = Settings.model_validate({"broker": {"users_file": "users", "tls": certificates, **broker}})
    return chosen, UserDirectory(chosen)


def add(*users: User) -> None:
    with changing(Path("users")) as draft:
        for each in users:
            draft.content = draft.content.with_user(each)


def logged_in(server: SaslServer, *clients: Any) -> str | None:
    return Pair(sasl=server, client_sasl=SaslClient(clients), require_sasl=True).run().server.user


def test_only_known_users_log_in_by_certificate_if_the_settings_say_so() -> None:
    add(User("carl", {}, ("sales",)), User("dora", {}), User.of("eve", "hush", (), 1))
    chosen, users = directory(users={"bob": "x"}, roles={"sales": ["fay"]})
    for known in ("bob", "carl", "dora", "eve", "fay"):
        assert logged_in(SaslServer(sasl_mechanisms(chosen.broker, users)(TlsPeer(known))), ExternalClient()) == known
    assert "EXTERNAL" not in sasl_mechanisms(chosen.broker, users)(TlsPeer("nobody"))
    everybody = chosen.broker.model_copy(update={"tls": tls()})
    assert logged_in(SaslServer(sasl_mechanisms(everybody, users)(TlsPeer("nobody"))), ExternalClient()) == "nobody"


def test_user_without_a_password_has_roles_and_logs_in_by_no_password() -> None:
    add(User("carl", {}, ("sales",)), User.of("eve", "hush", (), 1))
    chosen, users = directory()
    assert users.roles.of("carl") == {"sales"}
    for password in ("", "hush"):
        assert not users.check("carl", password)
        assert logged_in(SaslServer(sasl_mechanisms(chosen.broker, users)(TlsPeer())), PlainClient("carl", password)) is None
    assert [(each.user, each.iterations) for each in listed_users(chosen)] == [("carl", None), ("eve", 1)]


@pytest.mark.parametrize(("only_known", "all_logins"), [(True, True), (False, False)])
def test_removed_user_loses_connections_with_a_certificate_if_only_known_users_log_in(only_known: bool, all_logins: bool) -> None:
    add(User("carl", {}), User("dora", {}))
    chosen, users = directory(roles={"sales": ["dora"]}, tls={"certificate": "c", "client_ca": "a", "only_known_users": only_known})
    about_to = sasl_mechanisms(chosen.broker, users)(TlsPeer("carl"))
    with changing(Path("users")) as draft:
        draft.content = draft.content.without("carl").without("dora")
    assert users.read_again() == {
        "carl": EndedLogins("user 'carl' was removed", all_logins=all_logins),
        "dora": EndedLogins("user 'dora' was removed", all_logins=False),  # is known by the settings
    }
    assert logged_in(SaslServer(about_to), ExternalClient()) == (None if only_known else "carl")


def presenting(signer: Signer, certificate: Certificate | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=signer.certificate)
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    return context


def test_admin_server_gives_the_user_of_a_certificate_the_roles_of_the_user(signer: Signer, ann: Certificate, tmp_path: Path) -> None:
    server, bob, eve = (signer.issue(each) for each in ("server", "bob", "eve"))
    chosen = Settings.model_validate(
        {
            "broker": {"roles": {"looks": ["ann"], "acts": ["bob"]}},
            "admin": {
                "tls": {"certificate": server.certificate, "key": server.key, "client_ca": signer.certificate, "only_known_users": True},
                "view": ["*"], "manage": ["acts"],
            },
            "embedded": {"data_dir": tmp_path},
        }
    )  # fmt: skip
    access = admin_access(chosen, UserDirectory(chosen), LoginChecks())
    context = server_context(chosen.admin.tls, "admin.tls")

    def answer(port: int, certificate: Certificate | None, method: str, path: str, header: str = "") -> int:
        connection = http.client.HTTPSConnection("localhost", port, context=presenting(signer, certificate), timeout=60)
        try:
            connection.request(method, path, headers={"authorization": header} if header else {})
            return connection.getresponse().status
        finally:
            connection.close()

    def ask(port: int) -> None:
        assert answer(port, None, "GET", "/status") == 401
        assert answer(port, ann, "GET", "/status") == 200
        assert answer(port, ann, "GET", "/dead-letters") == 403
        assert answer(port, bob, "GET", "/dead-letters") == 200
        assert answer(port, eve, "GET", "/status") == 401  # is not known
        assert answer(port, ann, "GET", "/status", "Bearer guess") == 401  # credentials in the request decide alone

    served(Broker(), ask, access=access, tls=lambda: context)
