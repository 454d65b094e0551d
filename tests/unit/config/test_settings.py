"""Defaults of settings, and values that are derived from them."""

import pytest
from pydantic import ValidationError

from bascule.config.settings import MIB, Broker, Settings


def test_settings_have_defaults_and_ignore_the_environment_without_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_BROKER__PORT", "1")
    settings = Settings()
    assert settings.broker.port == 5672
    assert settings.broker.max_message_bytes == 64 * MIB
    assert settings.kafka.bootstrap_servers is None
    assert settings.journal_topics.journal == "bascule.journal"
    assert settings.journal_topics.dead_letters == "bascule.dead-letter"


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
