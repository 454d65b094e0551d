"""Where settings come from, which source has precedence, and the text of every error."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bascule.amqp.verifiers import SCRAM_SHA_512, Verifier
from bascule.config import ConfigError, load
from bascule.core.masking import MASK

DIVERT = '[[divert]]\nname = "delayed"\nfrom = "flights"\n'
INGRESS = '[[ingress]]\nname = "alerts"\ntopics = ["airport.alerts"]\n'


@pytest.fixture(autouse=True)
def _no_other_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BASCULE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def written(text: str) -> Path:
    file = Path("bascule.toml")
    file.write_text(text)
    return file


def error_of(text: str, **flags: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(written(text), flags=flags)
    assert raised.value.exit_code == 2
    return str(raised.value)


def test_example_of_the_documentation_loads() -> None:
    settings = load(
        written("""
            [bridge]
            id = "demo"

            [[divert]]
            name = "delayed"
            from = "flights"
            selector = "dep_delay > 30 AND origin = 'JFK'"
            to = "kafka.${address}.delayed"
            key = "property:carrier"
            exclusive = false
            start = "latest"

            [[ingress]]
            name = "alerts"
            topics = ["airport.alerts"]
            to = "alerts"
            routing = "multicast"
            body = "text"
            start = "earliest"
        """)
    ).settings
    (divert,), (ingress,) = settings.divert, settings.ingress
    assert (settings.bridge.id, divert.from_address, divert.to, divert.key) == (
        "demo",
        "flights",
        "kafka.${address}.delayed",
        "property:carrier",
    )
    assert (ingress.topics, ingress.routing, ingress.unbound, ingress.start_ms) == (("airport.alerts",), "multicast", "drop", None)


def test_flags_override_the_environment_and_the_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = written("[broker]\nport = 1\nhost = '127.0.0.2'\n[broker.users]\nann = 'a'\n[admin]\nport = 3\n")
    monkeypatch.setenv("BASCULE_BROKER__PORT", "2")
    monkeypatch.setenv("BASCULE_ADMIN__PORT", "4")
    monkeypatch.setenv("BASCULE_BROKER__USERS", '{"Bob": "b"}')
    configuration = load(file, flags={"admin": {"port": 5}})
    settings = configuration.settings
    assert (settings.broker.host, settings.broker.port, settings.admin.port) == ("127.0.0.2", 2, 5)
    assert settings.broker.passwords == {"ann": "a", "Bob": "b"}
    sources = {value.key: value.source for value in configuration.explain()}
    assert sources["broker.host"] == "bascule.toml:3"
    assert sources["broker.port"] == "environment BASCULE_BROKER__PORT"
    assert sources["broker.users.ann"] == "bascule.toml:5"
    assert sources["broker.users.Bob"] == "environment BASCULE_BROKER__USERS"
    assert sources["admin.port"] == "flag"
    assert sources["journal.prefix"] == "default"


def test_environment_variable_names_the_settings_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.toml").write_text("[bridge]\nid = 'other'\n")
    monkeypatch.setenv("BASCULE_CONFIG", "other.toml")
    assert load().settings.bridge.id == "other"


def test_settings_file_of_the_working_directory_is_read_if_present() -> None:
    assert load().settings.bridge.id == "bascule"
    written("[bridge]\nid = 'here'\n")
    assert load().settings.bridge.id == "here"


def test_kafka_client_settings_pass_through_with_underscores_of_environment_as_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_KAFKA__CLIENT__SASL_PASSWORD", "hush")
    configuration = load(
        written("[kafka]\nbootstrap_servers = 'k:9092'\n[kafka.client]\n'security.protocol' = 'SASL_SSL'\n'socket.timeout.ms' = 5\n")
    )
    assert configuration.settings.kafka.client == {"security.protocol": "SASL_SSL", "socket.timeout.ms": 5, "sasl.password": "hush"}
    shown = {value.key: value for value in configuration.explain()}
    assert shown['kafka.client."sasl.password"'].value == MASK
    assert shown['kafka.client."security.protocol"'].value == "SASL_SSL"


def test_password_may_be_read_from_a_file() -> None:
    Path("password").write_text("hush\n")
    assert load(written("[broker]\nusers = {ann = 'file:password'}")).settings.broker.passwords == {"ann": "hush"}


@pytest.mark.parametrize(
    ("start", "milliseconds"),
    [("2026-01-31T08:00:00Z", 1769846400000), ("2026-01-31T10:00:00+02:00", 1769846400000), ("2026-01-31 08:00", 1769846400000)],
)
def test_start_may_be_a_quoted_or_toml_timestamp(start: str, milliseconds: int) -> None:
    assert load(written(f"{DIVERT}start = '{start}'")).settings.divert[0].start_ms == milliseconds
    toml = datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
    assert load(written(f"{DIVERT}start = {toml}")).settings.divert[0].start_ms == milliseconds


#: Tokens give the role ``sales``.
OIDC_ROLES = "[broker.oidc]\nissuer = 'https://login.example'\naudience = ['b']\nroles_claim = 'roles'\nroles = ['sales']\n"
ERRORS = [
    ("[broker]\nprot = 1", "bascule.toml:2: broker.prot: unknown setting; did you mean 'port'?"),
    ("[brokre]\nport = 1", "bascule.toml:1: brokre: unknown setting; did you mean 'broker'?"),
    ("[bridge]\nxyz = 1", "bascule.toml:2: bridge.xyz: unknown setting; known are id"),
    ("[broker]\nport = 99999", "bascule.toml:2: broker.port = 99999: should be less than or equal to 65535"),
    ("[broker]\nport = 'x'", 'bascule.toml:2: broker.port = "x": should be a valid integer, unable to parse string as an integer'),
    ("[broker]\nmax_message_bytes = '65 MiB'", 'broker.max_message_bytes = "65 MiB": should be less than or equal to 67108864'),
    (
        "[broker]\nhost = '0.0.0.0'",
        "broker: no client could connect to host '0.0.0.0'; set users, users_file, oidc.issuer, tls.client_ca, or allow_anonymous = true",
    ),
    (
        "[broker]\nport = 1\nhost = '0.0.0.0'\nallow_anonymous = true",
        'bascule.toml:3: broker.host = "0.0.0.0": other machines can reach the broker, and there is no [broker.tls] and no [[permission]];'
        " set [broker.tls] and [[permission]], or accept the risk with allow_insecure = true",
    ),
    (
        "[broker]\nhost = '::'\nusers = {ann = 'x'}\ntls = {certificate = 'x'}",
        "and there is no [[permission]]; set [[permission]], or accept the risk with allow_insecure = true",
    ),
    (
        "[broker]\nhost = '192.0.2.1'\nusers = {ann = 'x'}\n[[permission]]\nmatch = '#'",
        "and there is no [broker.tls]; set [broker.tls], or accept the risk with allow_insecure = true",
    ),
    (
        f"[broker]\nusers = {{ann = '{Verifier.of('x', b'x', 1, SCRAM_SHA_512)}'}}",
        "broker.users: ann: a hash in the settings must be for SCRAM-SHA-256; broker.users_file has hashes for all mechanisms",
    ),
    ("[broker]\nfailover = ['a:1', 'b']", """bascule.toml:2: broker.failover = ["a:1", "b"]: 'b' is not HOST:PORT"""),
    ("[broker]\nusers = {anonymous = 'x'}", "'anonymous' is the user of a client without a login; choose another name"),
    ("[broker]\nusers = {'' = 'x'}", "a user must have 1 to 200 printable characters"),
    ("[broker]\nusers = {ann = 'file:nowhere'}", "bascule.toml:2: broker.users: ann: nowhere: No such file or directory"),
    ("[journal]\nmin_insync_replicas = 2", "journal: min_insync_replicas 2 is more than replication_factor 1"),
    ("[kafka.client]\nacks = '1'", "kafka.client: 'acks' is set by Bascule: a record counts when all in-sync replicas have it"),
    (f"{DIVERT}selektor = ''", """bascule.toml:4: divert["delayed"].selektor: unknown setting; did you mean 'selector'?"""),
    ('[[divert]]\nfrom = "a"', "bascule.toml:1: divert[1].name: must be given"),
    ('[[divert]]\nname = "a b"\nfrom = "a"', """divert["a b"].name = "a b": must be 1 to 100 letters, digits, '.', '_' and '-'"""),
    (f"{DIVERT}{DIVERT}", """bascule.toml:5: divert["delayed"].name = "delayed": the name 'delayed' is given twice"""),
    (
        '[[divert]]\nname = "a"\nfrom = "news.*x"',
        """divert["a"].from = "news.*x": words must be separated by dots; '*' and '#' must stand for whole words""",
    ),
    (
        f"{DIVERT}to = 'k.${{topic}}'",
        """divert["delayed"].to = "k.${topic}": '${topic}' is not a placeholder: only ${address} and ${rest} are replaced""",
    ),
    (f"{DIVERT}to = '${{rest}}'", "to: ${rest} requires that `from` ends with '#' and has no other '#'"),
    (f"{DIVERT}to = 'k/${{address}}'", """must be a Kafka topic name: 1 to 249 letters, digits, '.', '_' and '-'"""),
    (f"{DIVERT}to = 'bascule.journal'", """divert["delayed"].to = "bascule.journal": 'bascule.journal' is one of Bascule's own topics"""),
    (f"{DIVERT}to = 'bascule.xa.decisions'", "'bascule.xa.decisions' is one of Bascule's own topics"),
    (f"{DIVERT}to = 'lines'\n[audit]\ntopic = 'lines'", "'lines' is one of Bascule's own topics"),
    (f"{DIVERT}to = 'bascule.dead-letter'", "'bascule.dead-letter' is the dead-letter topic (pipelines.dead_letter_topic)"),
    (f"{DIVERT}key = 'header:x'", "must be message-id, correlation-id, group-id, none or property:NAME"),
    (f"{DIVERT}key = 'property:a-b'", "must be message-id, correlation-id, group-id, none or property:NAME"),
    (f"{DIVERT}start = 'yesterday'", "must be 'earliest', 'latest' or a timestamp such as '2026-01-31T08:00:00Z'"),
    (f"{DIVERT}start = 5", "must be 'earliest', 'latest' or a timestamp such as '2026-01-31T08:00:00Z'"),
    (f"{DIVERT}python = 'a.b'", "must be MODULE:FUNCTION, such as 'mypackage.transforms:delays'"),
    (f"{DIVERT}select = ['value']\npython = 'a:b'", """bascule.toml:1: divert["delayed"]: give either select or python, not both"""),
    (f"{INGRESS}pattern = 'a'", """bascule.toml:1: ingress["alerts"]: give either topics or pattern, not both"""),
    ("[[ingress]]\nname = 'a'", 'ingress["a"]: give either topics or pattern'),
    ("[[ingress]]\nname = 'a'\npattern = 'a['", 'ingress["a"].pattern = "a[": column 2: unterminated character set\n    a[\n     ^'),
    ("[[ingress]]\nname = 'a'\npattern = '(?!a).*'", "look-around, back-references, possessive quantifiers, word boundaries"),
    (f"{INGRESS}routing = 'both'", """ingress["alerts"].routing = "both": should be 'multicast' or 'anycast'"""),
    (f"{INGRESS}to = '${{address}}'", "'${address}' is not a placeholder: only ${topic} and ${header:NAME} are replaced"),
    ("[[ingress]]\nname = 'a'\ntopics = ['bascule.journal']", "'bascule.journal' is one of Bascule's own topics"),
    ("[[ingress]]\nname = 'a'\ntopics = ['a b']", """ingress["a"].topics[1] = "a b": must be a Kafka topic name"""),
    (
        "[[address]]\nmatch = 'orders.#'\nmax_mesages = 1",
        """bascule.toml:3: address["orders.#"].max_mesages: unknown setting; did you mean 'max_messages'?""",
    ),
    ("[[address]]\nmax_messages = 1", "bascule.toml:1: address[1].match: must be given"),
    (
        "[broker.roles]\nsales = ['ann']\n[[permission]]\nmatch = 'orders.#'\ncreateAddress = ['sale']",
        """bascule.toml:5: permission["orders.#"].createAddress = ["sale"]: there is no role 'sale'; known are sales""",
    ),
    (
        "[broker.roles]\nsales = ['ann']\n[[limit]]\nroles = ['sale']\nmax_links = 1",
        """bascule.toml:4: limit[1].roles = ["sale"]: there is no role 'sale'; known are sales""",
    ),
    (
        OIDC_ROLES + "[[limit]]\nroles = ['sales']\nmax_links = 1",
        "only tokens give the role 'sales'; a limit is for users, or for roles of [broker.roles]",
    ),
    (OIDC_ROLES + "[admin]\nview = ['sale']", "there is no role 'sale'; known are sales"),
    ("[[limit]]\nmax_links = 1", "bascule.toml:1: limit[1]: the table names no user and no role; set users or roles"),
    ("[[limit]]\nusers = ['a']", "bascule.toml:1: limit[1]: the table sets no limit; set at least one, such as max_connections"),
    ("[[limit]]\nusers = ['a']\nmax_message_bytes = '1 B'", "should be greater than or equal to 1024"),
    (
        "[[permission]]\nmatch = 'a'\nsned = []",
        """bascule.toml:3: permission["a"].sned: unknown setting; did you mean 'send'?""",
    ),
    (
        "[[address]]\nmatch = 'a#'",
        """address["a#"].match = "a#": words must be separated by dots; '*' and '#' must stand for whole words""",
    ),
    (
        "[[address]]\nmatch = 'a'\nwhen_full = 'page'",
        """address["a"].when_full = "page": should be 'block', 'reject' or 'drop-oldest-nonpersistent'""",
    ),
    ("[[address]]\nmatch = 'a'\nmax_messages = -1", """address["a"].max_messages = -1: should be greater than or equal to 0"""),
    (
        "[[address]]\nmatch = 'a'\nredelivery_delay_s = 60\nredelivery_delay_max_s = 5",
        """bascule.toml:1: address["a"]: redelivery_delay_s 60 is more than redelivery_delay_max_s 5""",
    ),
    (
        "[broker]\nmax_expiry_s = 5\n[[address]]\nmatch = 'a'\nexpiry_s = 6",
        """bascule.toml:3: address["a"]: with the settings of [broker], expiry_s 6 is more than max_expiry_s 5""",
    ),
    (
        "[[address]]\nmatch = 'a'\n[[address]]\nmatch = 'a'",
        """bascule.toml:4: address["a"].match = "a": 'a' is given twice""",
    ),
    (
        "[[address]]\nmatch = 'a'\ndead_letter_address = 'DLQ.#'",
        "dead_letter_address = \"DLQ.#\": must name one destination; the wildcards '*' and '#'",
    ),
    (
        "[[queue]]\nname = 'orders.*'",
        """queue["orders.*"].name = "orders.*": must name one destination; the wildcards '*' and '#' are not allowed""",
    ),
    ("[[queue]]\nname = '$management'", """name = "$management": is the address of the management node"""),
    ("[[address]]\nmatch = 'a'\ndead_letter_address = '$management'", """dead_letter_address = "$management": is the address of the"""),
    ("[[queue]]\nname = 'a'\nmax_messages = 1", """queue["a"].max_messages: unknown setting; known are name"""),
    ("[[topic]]\nname = 'a'\n[[topic]]\nname = 'a'", """bascule.toml:4: topic["a"].name = "a": 'a' is given twice"""),
    ("[broker.tls]\nkey = 'k'", "bascule.toml:1: broker.tls: key is set without certificate; nothing would be encrypted"),
    (
        "[broker.tls]\ncertificate = 'c'\nclient_certificate = 'required'",
        "broker.tls: client_certificate is set without client_ca; no certificate could be checked",
    ),
    ("[broker.tls]\ncertficate = 'c'", "bascule.toml:2: broker.tls.certficate: unknown setting; did you mean 'certificate'?"),
    ("[broker]\nusers = {ann = 'SCRAM-SHA-256$x'}", "broker.users: ann: must be SCRAM-SHA-256$ITERATIONS:SALT$STORED-KEY:SERVER-KEY"),
    ("[admin]\ntoken = 'file:nowhere'", "admin.token = ********: nowhere: No such file or directory"),
    ("[divert]\nname = 'a'", "bascule.toml:1: divert: must be an array of tables: write [[divert]]"),
    ("[address.'orders.#']\nmax_messages = 1", "bascule.toml: address: must be an array of tables: write [[address]]"),
    ("divert = ['a']", 'bascule.toml:1: divert[1] = "a": must be a table'),
    ("[[broker]]\nport = 1", 'broker = [{"port": 1}]: must be a table'),
    ("[broker]\ntls = true", "bascule.toml:2: broker.tls = true: must be a table"),
    ("[kafka]\nclient = 'x'", "bascule.toml:2: kafka.client = ********: must be a table"),
    ("[[ingress]]\nname = 'a'\ntopics = 't'", """ingress["a"].topics = "t": must be an array, in square brackets"""),
    ("[embedded]\ndata_dir = 3", "bascule.toml:2: embedded.data_dir = 3: must be a path, in quotes"),
    ("[broker]\nmemory_bytes = 1.5", "bascule.toml:2: broker.memory_bytes = 1.5: must be a number of bytes, such as 1048576 or '512 MiB'"),
    ("[broker]\nmemory_bytes = '1 X'", "broker.memory_bytes = \"1 X\": must be a number of bytes, such as 1048576 or '512 MiB'"),
    ("port = ", "bascule.toml: not valid TOML: Invalid value (at end of document)"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=[message[-50:] for _, message in ERRORS])
def test_settings_error_names_place_key_value_and_remedy(text: str, message: str) -> None:
    assert message in error_of(text)


def test_all_settings_errors_are_reported_at_once() -> None:
    assert len(error_of("[broker]\nport = -1\nprot = 1\n[admin]\nport = -1").splitlines()) == 3


def test_invalid_selector_in_settings_is_shown_with_its_column() -> None:
    first, *caret = error_of(f"{DIVERT}selector = \"dep_delay > 30 ADN origin = 'JFK'\"").splitlines()
    assert first.startswith('bascule.toml:4: divert["delayed"].selector = "dep_delay > 30 ADN origin = \'JFK\'": ')
    assert "column 16" in first
    assert caret[0].endswith("dep_delay > 30 ADN origin = 'JFK'")
    assert caret[1].index("^") == caret[0].index("ADN")


def test_secret_is_never_shown_in_an_error() -> None:
    assert "hush" not in error_of("[broker.users]\nann = ['hush']\n[kafka.client]\n'sasl.password' = ['hush']")


@pytest.mark.parametrize(
    "text",
    [
        "[broker]\nusers = 'ann:hush'",
        "[broker]\nusers = ['ann:hush']",
        "[kafka]\nclient = 'sasl.password=hush'",
        "[pipelines]\nspark = ['spark.password=hush']",
        "[pipelines.spark]\n'spark.hadoop.fs.azure.account.key.x' = ['hush']",
    ],
)
def test_a_secret_at_the_wrong_place_is_masked_in_an_error(text: str) -> None:
    message = error_of(text)
    assert MASK in message
    assert "hush" not in message


@pytest.mark.parametrize("setting", ["admin.token", "admin.edit_token", "admin.view_token", "broker.users.ann", "broker.tls.key_password"])
def test_an_empty_secret_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "must not be empty" in error_of(f"{setting} = ''")
    monkeypatch.setenv(f"BASCULE_{setting.upper().replace('.', '__')}", "")
    assert "must not be empty" in error_of("")


@pytest.mark.parametrize(
    "text",
    [
        "[pipelines.openlineage]\nurl = 'http://ann:hush@marquez:5000'",
        "[pipelines.openlineage]\nurl = 'https://hush@marquez'",
        "[pipelines.openlineage]\nurl = 'marquez://ann:hush@a'",
        "[broker.oidc]\nissuer = 'https://ann:hush@login.example'",
    ],
)
def test_the_password_in_a_url_is_masked_in_an_error(text: str) -> None:
    message = error_of(text)
    assert MASK in message
    assert "hush" not in message


@pytest.mark.parametrize(
    "key",
    [
        "spark.hadoop.fs.s3a.access.key", "spark.hadoop.google.cloud.auth.service.account.private.key", "spark.executorEnv.API_KEY",
        "spark.executorEnv.OTEL_EXPORTER_OTLP_HEADERS", "spark.executorEnv.DB_PASSWD", "spark.ssl.keyPassword",
        "spark.executorEnv.OPENLINEAGE__TRANSPORT__AUTH__APIKEY", "spark.hadoop.fs.azure.account.key.store",
        "spark.driver.extraJavaOptions", "spark.executorEnv.JAVA_TOOL_OPTIONS", "spark.executorEnv.JDK_JAVA_OPTIONS",
        "spark.hadoop.fs.azure.sas.x",
    ],
)  # fmt: skip
def test_a_setting_of_spark_whose_name_indicates_a_secret_is_masked(key: str) -> None:
    shown = {value.key: value.value for value in load(written(f"[pipelines.spark]\n'{key}' = 'hush'")).explain()}
    assert shown[f'pipelines.spark."{key}"'] == MASK


def test_the_password_in_a_url_is_masked_in_the_list_of_settings() -> None:
    proxy = "[pipelines.spark]\n'spark.executorEnv.HTTPS_PROXY' = 'http://ann:hush@proxy:3128/'\n"
    file = written(f"{proxy}[[ingress]]\nname = 'in'\ntopics = ['t']\nto = 'queue://orders@eu'")
    shown = {value.key: value.value for value in load(file).explain()}
    assert shown['pipelines.spark."spark.executorEnv.HTTPS_PROXY"'] == f"http://{MASK}@proxy:3128/"
    assert shown['ingress["in"].to'] == "queue://orders@eu"


@pytest.mark.parametrize(
    "text",
    [
        "[admin]\ntokn = 'hush'",
        "[admin.tls]\nkey_pasword = 'hush'",
        "[broker]\npassword = 'hush'",
        "[broker]\npwd = 'hush'",
        "[broker]\nuser = {ann = 'hush'}",
        "[broker]\nusr = ['ann:hush']",
        "[kafka]\nsasl_pasword = 'hush'",
        "[brokre]\nusers = {ann = 'hush'}",
        "ann = 'hush'",
        "[[divert]]\nname = 'a'\nfrom = 'b'\npwd = 'hush'",
    ],
)
def test_the_value_of_an_unknown_setting_is_not_shown(text: str) -> None:
    message = error_of(text)
    assert "unknown setting" in message
    assert "hush" not in message


def test_errors_about_the_environment_do_not_show_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BASCULE_BROKER__PWD", "hush"), ("BASCULE_BROKER__USERS", "ann:hush"), ("BASCULE_BROKRE__USERS", "hush")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as error:
            load()
        assert "environment" in str(error.value)
        assert "hush" not in str(error.value)
        monkeypatch.delenv(name)


def test_a_secret_of_kafka_and_spark_is_read_from_a_credential_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("hush\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    settings = load(
        written("[kafka.client]\n'sasl.password' = 'credential:key'\n[pipelines.spark]\n'a.secret' = 'credential:key'")
    ).settings
    assert (settings.kafka.client, settings.pipelines.spark) == ({"sasl.password": "hush"}, {"a.secret": "hush"})
    assert "must be the name of a credential, not a path" in error_of("[admin]\ntoken = 'credential:../key'")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert "CREDENTIALS_DIRECTORY is not set; use LoadCredential=key:PATH" in error_of("[admin]\ntoken = 'credential:key'")


def test_address_shows_only_its_explicit_settings_and_admin_token_is_masked() -> None:
    text = "[[address]]\nmatch = 'orders.#'\nmax_messages = 10\n[[address]]\nmatch = 'orders.*'\nexpiry_s = 2\n[admin]\ntoken = 'hush'\n"
    configuration = load(written(text))
    shown = {value.key: value.value for value in configuration.explain()}
    assert {key: value for key, value in shown.items() if key.startswith("address")} == {
        'address["orders.#"].match': "orders.#", 'address["orders.#"].max_messages': 10,
        'address["orders.*"].match': "orders.*", 'address["orders.*"].expiry_s': 2,
    }  # fmt: skip
    assert shown["admin.token"] == MASK
    assert shown["broker.max_messages"] == 0
    assert configuration.settings.address[0].given() == {"max_messages": 10}


def test_invalid_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_BROKER__PORT", "abc")
    assert error_of("").startswith('environment BASCULE_BROKER__PORT: broker.port = "abc": should be')
    monkeypatch.setenv("BASCULE_BROKER__PORT", "1")
    monkeypatch.setenv("BASCULE_DIVERT", "[{")
    assert "a list or table must be given as JSON" in error_of("")
    monkeypatch.setenv("BASCULE_BROKR__PORT", "1")
    assert error_of("") == "environment BASCULE_BROKR__PORT: unknown section 'brokr'; did you mean 'broker'?"


def test_missing_settings_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.toml: No such file or directory$"):
        load(Path("nowhere.toml"))


def test_invalid_flag_is_named_as_a_flag() -> None:
    assert error_of("", broker={"port": -1}) == "flag: broker.port = -1: should be greater than or equal to 0"
