"""Defaults of settings, and values that are derived from them."""

from typing import Any

import pytest
from pydantic import ValidationError

from bascule.config.settings import MIB, Broker, Settings
from bascule.core.defaults import EXCLUSIVE_DIVERTS_MAX


def test_settings_have_defaults_and_ignore_the_environment_without_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_BROKER__PORT", "1")
    settings = Settings()
    assert settings.broker.port == 5672
    assert settings.broker.max_message_bytes == 64 * MIB
    assert settings.kafka.bootstrap_servers is None
    assert settings.journal_topics.journal == "bascule.journal"
    assert settings.journal_topics.dead_letters == "bascule.dead-letter"


def test_more_exclusive_diverts_than_a_journal_entry_can_name_are_refused() -> None:
    diverts: list[dict[str, Any]] = [{"name": f"d{number}", "from": "a", "exclusive": True} for number in range(EXCLUSIVE_DIVERTS_MAX + 1)]
    diverts[7]["enabled"] = False
    assert len(Settings.model_validate({"divert": diverts}).divert) == EXCLUSIVE_DIVERTS_MAX + 1
    diverts[7]["enabled"] = True
    with pytest.raises(ValidationError, match="more than 255 enabled diverts are exclusive"):
        Settings.model_validate({"divert": diverts})


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        Settings().broker.port = 1


@pytest.mark.parametrize(
    ("host", "users", "setting", "allowed"),
    [
        ("127.0.0.1", {}, None, True),
        ("::1", {}, None, True),
        ("localhost", {}, None, True),
        ("127.0.0.1", {"ann": "pw"}, None, False),
        ("127.0.0.1", {"ann": "pw"}, True, True),
        ("0.0.0.0", {"ann": "pw"}, None, False),
        ("0.0.0.0", {}, True, True),
    ],
)
def test_anonymous_clients_are_allowed_by_default_only_on_loopback_without_users(
    host: str, users: dict[str, str], setting: bool | None, allowed: bool
) -> None:
    assert Broker.model_validate({"host": host, "users": users, "allow_anonymous": setting}).anonymous_allowed is allowed


def test_password_is_never_in_the_repr() -> None:
    broker = Broker.model_validate({"users": {"ann": "hush"}})
    assert "hush" not in repr(broker)
    assert broker.passwords == {"ann": "hush"}


def test_pipeline_transaction_longer_than_20_s_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 20"):
        Settings.model_validate({"pipelines": {"transaction_s": 21}})


def test_size_may_be_given_with_a_unit() -> None:
    assert Broker.model_validate({"max_message_bytes": "4 MiB"}).max_message_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({}, True),
        ({"host": "127.0.0.2", "users": {"ann": "x"}}, True),
        ({"host": "0.0.0.0", "users": {"ann": "x"}}, False),
        ({"host": "0.0.0.0", "users": {"ann": "x"}, "allow_insecure": True}, True),
        ({"host": "0.0.0.0", "users": {"ann": "x"}, "tls": {"certificate": "x"}}, False),
        ({"host": "0.0.0.0", "users": {"ann": "x"}, "tls": {"certificate": "x"}, "allow_insecure": True}, True),
        ({"host": "name.of.a.machine", "users": {"ann": "x"}}, False),
    ],
)
@pytest.mark.parametrize("rules", [[], [{"match": "#"}]], ids=["everything-allowed", "permissions"])
def test_broker_that_other_machines_reach_needs_tls_and_permissions_or_the_accepted_risk(
    settings: dict[str, object], accepted: bool, rules: list[dict[str, str]]
) -> None:
    if accepted or (rules and "tls" in settings):
        assert Settings.model_validate({"broker": settings, "permission": rules})
    else:
        with pytest.raises(ValidationError, match="allow_insecure = true"):
            Settings.model_validate({"broker": settings, "permission": rules})


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, True),
        ({"host": "0.0.0.0", "users": {"ann": "x"}}, False),
        ({"host": "0.0.0.0", "users": {"ann": "x"}, "tls": {"certificate": "x"}}, True),
        ({"host": "0.0.0.0", "users": {"ann": "x"}, "allow_insecure": True}, True),
    ],
)
def test_clients_may_send_passwords_only_under_tls_on_loopback_or_with_the_accepted_risk(
    settings: dict[str, object], allowed: bool
) -> None:
    assert Broker.model_validate(settings).plain_allowed is allowed


def test_roles_of_tokens_count_as_roles_of_permissions_and_of_the_admin_server() -> None:
    oidc = {"issuer": "https://login.example", "audience": ["b"], "roles_claim": "roles", "roles": ["sales"]}
    rules = [{"match": "#", "send": ["sales"]}]
    chosen = Settings.model_validate({"broker": {"oidc": oidc}, "permission": rules, "admin": {"view": ["sales"]}})
    assert chosen.broker.has_logins
    assert not chosen.broker.has_passwords
    assert not chosen.broker.anonymous_allowed


@pytest.mark.parametrize("kind", ["divert", "ingress"])
def test_user_of_a_pipeline_must_have_a_password_or_a_role_if_there_are_permissions(kind: str) -> None:
    def tree(user: str, **broker: object) -> dict[str, object]:
        source = {"from": "q"} if kind == "divert" else {"topics": ["t"]}
        broker = {"users": {"ann": "x"}, "roles": {"sales": ["cert"]}, **broker}
        return {"broker": broker, "permission": [{"match": "#"}], kind: [{"name": "p", "user": user, **source}]}

    for user in ("ann", "cert", "anonymous"):
        assert Settings.model_validate(tree(user))
    with pytest.raises(ValidationError, match="there is no user 'bob' with a password or a role") as caught:
        Settings.model_validate(tree("bob"))
    assert caught.value.errors()[0]["ctx"]["path"] == (kind, 0, "user")
    assert Settings.model_validate(tree("bob", users_file="users")), "the file is read by the broker and `config check`"
    assert Settings.model_validate(tree("bob") | {"permission": []}), "everybody may do everything, and the pipelines know no permissions"


def test_file_of_users_counts_as_users_and_may_define_roles() -> None:
    broker = {"users_file": "users"}
    assert not Broker.model_validate(broker).anonymous_allowed
    assert Settings.model_validate({"broker": broker, "permission": [{"match": "#", "send": ["sales"]}]})
    with pytest.raises(ValidationError, match="there is no role 'sales'"):
        Settings.model_validate({"permission": [{"match": "#", "send": ["sales"]}]})
