"""Which variables of the environment a child process inherits, and which settings the pipelines read."""

from pathlib import Path

import pytest

from bascule.config import Settings, load
from bascule.config.load import ConfigError
from bascule.core.environment import NOTHING, PIPELINES_NEED, inherited
from bascule.pipelines.spec import from_settings

GIVEN = {
    "PATH": "/bin",
    "BASCULE_CACHE_DIR": "/cache",
    "BASCULE_CONFIG": "bascule.toml",
    "BASCULE_PASSWORD": "hush",
    "BASCULE_BROKER__USERS": '{"ann": "hush"}',
    "BASCULE_BROKER__USERS__BOB": "hush",
    "bascule_admin__token": "hush",
    "BASCULE_BROKER__SESSION_TIMEOUT_S": "6",
    "BASCULE_KAFKA__CLIENT__SASL_PASSWORD": "hush",
    "CREDENTIALS_DIRECTORY": "/run/credentials",
    "OPENLINEAGE__TRANSPORT__AUTH__APIKEY": "hush",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hush",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=hush",
    "OTEL_SERVICE_NAME": "shop",
}
NO_SETTINGS = {"PATH", "BASCULE_CACHE_DIR", "BASCULE_CONFIG", "OTEL_SERVICE_NAME"}
OF_TELEMETRY = {"OPENLINEAGE__TRANSPORT__AUTH__APIKEY", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"}


def test_process_outside_of_bascule_inherits_no_setting() -> None:
    assert inherited(GIVEN, NOTHING).keys() == NO_SETTINGS


def test_pipelines_inherit_settings_of_kafka_and_telemetry_and_none_of_users_and_tokens() -> None:
    of_kafka = {"BASCULE_BROKER__SESSION_TIMEOUT_S", "BASCULE_KAFKA__CLIENT__SASL_PASSWORD", "CREDENTIALS_DIRECTORY"}
    assert inherited(GIVEN, PIPELINES_NEED).keys() == NO_SETTINGS | OF_TELEMETRY | of_kafka


def test_pipelines_do_not_read_secrets_of_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kafka-password").write_text("of kafka\n")
    Path("bascule.toml").write_text(
        "[broker]\nusers = {ann = 'file:missing'}\nsession_timeout_s = 7\n[broker.tls]\nkey_password = 'file:missing'\n"
        "[admin]\ntoken = 'file:missing'\n[kafka.client]\n'sasl.password' = 'file:kafka-password'\n"
    )
    with pytest.raises(ConfigError):
        load()
    settings = load(needs=PIPELINES_NEED).settings
    assert settings.broker.session_timeout_s == 7
    assert settings.kafka.client == {"sasl.password": "of kafka"}


def test_setting_that_the_pipelines_do_not_need_cannot_be_read_as_its_default(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text("[broker]\nport = 7\n")
    settings = load(file, needs=PIPELINES_NEED).settings
    for read in (lambda: settings.broker.port, lambda: settings.broker.users, lambda: settings.queue, lambda: settings.audit.file):
        with pytest.raises(AttributeError):
            read()
    assert settings.broker.session_timeout_s == load(file).settings.broker.session_timeout_s


def test_each_key_that_the_pipelines_need_is_a_setting() -> None:
    for section, keys in PIPELINES_NEED.items():
        table = type(getattr(Settings(), section))
        assert keys is None or keys <= table.model_fields.keys(), section


def test_guide_to_a_second_configuration_file_names_each_setting_that_the_pipelines_need() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "user-code.md").read_text()
    wanted = [f"`{section}.{key}`" for section, keys in PIPELINES_NEED.items() for key in keys or ()]
    assert [each for each in wanted if each not in guide] == []


def test_error_in_a_section_that_the_pipelines_need_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    for text in ("broker = 3\n", "[kafka]\nbootstrap = 'a'\n", "pipelines = 'a'\n"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load(file, needs=PIPELINES_NEED)


def test_pipelines_are_the_same_with_and_without_the_settings_that_they_do_not_need(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text(
        "[bridge]\nid = 'b'\n[broker]\nsession_timeout_s = 7\nmax_message_bytes = 1000\nvalidated_user = 'set'\n"
        "[admin]\nmasked_properties = ['card']\n[audit]\ntopic = 'lines'\n[pipelines]\ntransaction_records = 7\n"
        "[[divert]]\nname = 'd'\nfrom = 'a'\n[[ingress]]\nname = 'i'\ntopics = ['t']\nto = 'q'\n"
    )
    assert from_settings(load(file, needs=PIPELINES_NEED).settings, "kafka") == from_settings(load(file).settings, "kafka")
