"""``bascule config import`` takes no setting with another meaning without a row that says so, and shows no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.cli.imports.importer import ImportOptions, import_sources
from bascule.cli.imports.report import ImportOutcome
from bascule.core.errors import InvalidInput
from tests.unit.cli.test_imported_permissions import imported


def one(settings: str, match: str = "a") -> str:
    return f'<address-setting match="{match}">{settings}</address-setting>'


@pytest.mark.parametrize(
    ("settings", "element", "note"),
    [
        ("<max-redelivery-delay>-1</max-redelivery-delay>", "max-redelivery-delay", "redelivers at once"),
        ("<max-redelivery-delay>0</max-redelivery-delay>", "max-redelivery-delay", "redelivers at once"),
        ("<expiry-delay>0</expiry-delay>", "expiry-delay", "expires at once"),
        ("<max-expiry-delay>0</max-expiry-delay>", "max-expiry-delay", "expires at once"),
        ("<address-full-policy>FAIL</address-full-policy><max-size-bytes>0</max-size-bytes>", "max-size-bytes", "0 allows no message"),
        ("<address-full-policy>BLOCK</address-full-policy><max-size-messages>0</max-size-messages>", "max-size-messages", "0 allows no"),
        ("<page-limit-bytes>1G</page-limit-bytes>", "page-limit-bytes", "without page-full-policy"),
        ("<page-limit-messages>10</page-limit-messages>", "page-limit-messages", "without page-full-policy"),
        (f"<max-delivery-attempts>{'9' * 400}</max-delivery-attempts>", "max-delivery-attempts", "more than 64 bits"),
        (f"<redelivery-delay>{'9' * 400}</redelivery-delay>", "redelivery-delay", "more than 64 bits"),
        (f"<address-full-policy>FAIL</address-full-policy><max-size-bytes>{'9' * 18}T</max-size-bytes>", "max-size-bytes", "64 bits"),
        ("<redelivery-delay-multiplier>nan</redelivery-delay-multiplier>", "redelivery-delay-multiplier", "cannot have this value"),
    ],
)
def test_value_without_a_counterpart_is_not_taken(settings: str, element: str, note: str, tmp_path: Path) -> None:
    tree, rows = imported(tmp_path, f"<address-settings>{one(settings)}</address-settings>")
    (row,) = [row for row in rows if row.element.endswith(f"/{element}")]
    assert (row.outcome, note in row.note) == (ImportOutcome.NONE, True), row
    assert {key for each in tree.get("address", []) for key in each} <= {"match", "when_full"}


def test_address_inherits_from_each_match_that_includes_it(tmp_path: Path) -> None:
    """Neither ``b.#`` nor ``a.*`` includes ``a.b.#``."""
    settings = "".join(
        [
            one("<auto-create-addresses>false</auto-create-addresses><max-size-messages>5</max-size-messages>", "a.#"),
            one("<auto-create-addresses>true</auto-create-addresses>", "#"),
            one("<auto-create-addresses>true</auto-create-addresses><max-size-messages>9</max-size-messages>", "a.*"),
            one("<auto-create-queues>true</auto-create-queues><address-full-policy>FAIL</address-full-policy>", "a.b.#"),
        ]
    )
    tree, rows = imported(tmp_path, f"<address-settings>{settings}</address-settings>")
    (table,) = [each for each in tree["address"] if each["match"] == "a.b.#"]
    assert table == {"match": "a.b.#", "auto_create": False, "when_full": "reject", "max_messages": 5}
    assert any("true only if both are" in row.note for row in rows)


def test_creation_of_queues_alone_is_taken_with_a_difference(tmp_path: Path) -> None:
    _, rows = imported(tmp_path, f"<address-settings>{one('<auto-create-queues>false</auto-create-queues>')}</address-settings>")
    assert [row.outcome for row in rows if row.element.endswith("auto-create-queues")] == [ImportOutcome.DIFFERS]


def test_settings_of_an_address_count_wherever_its_queue_stands(tmp_path: Path) -> None:
    queue = '<addresses><address name="a"><anycast><queue name="a" exclusive="true"/></anycast></address></addresses>'
    tree, _ = imported(tmp_path, f"{queue}<address-settings>{one('<expiry-delay>1000</expiry-delay>')}</address-settings>")
    assert tree["address"] == [{"match": "a", "expiry_s": 1, "exclusive": True}]


def test_acceptor_that_allows_no_connection_does_not_become_one_without_limit(tmp_path: Path) -> None:
    acceptor = "<acceptors><acceptor>tcp://localhost:5672?protocols=AMQP;connectionsAllowed=0;amqpIdleTimeout=5000</acceptor></acceptors>"
    tree, rows = imported(tmp_path, f"<connection-ttl-override>9000</connection-ttl-override>{acceptor}")
    assert ("max_connections" in tree["broker"], tree["broker"]["idle_timeout_s"]) == (False, 5)
    assert any(row.note.startswith("in place of 9") for row in rows if row.element.endswith("?amqpIdleTimeout"))


SECRETS = """
<acceptors>
  <acceptor name="a">tcp://localhost:1?protocols=AMQP;sslEnabled=true;keyStorePassword=1-secret, 2-secret;trustStorePassword=3-secret
  </acceptor>
  <acceptor name="b">tcp://localhost:2?protocols=CORE;keyStorePassword=1-secret, 2-secret 3-secret</acceptor>
</acceptors>
<from-the-future user="ann" password="4-secret">
  <property key="password" value="5-secret"/><setting name="token">6-secret</setting><api-token><value>7-secret</value></api-token>
</from-the-future>
"""


def test_no_part_of_a_secret_is_shown(tmp_path: Path) -> None:
    _, rows = imported(tmp_path, SECRETS)
    assert "-secret" not in str(rows)
    assert any(row.element == "from-the-future@user" for row in rows)


def test_password_with_unusual_characters_is_neither_cut_nor_shown(tmp_path: Path) -> None:
    (tmp_path / "broker.xml").write_text("<configuration><core/></configuration>")
    (tmp_path / "users").write_text("ann = one\u2028two-secret\r\nbob = a \x85b-secret \ncyd = 1-secret\ncyd = 2-secret\n", newline="")
    result = import_sources(ImportOptions([tmp_path / "broker.xml"], tmp_path / "bascule.toml", tmp_path / "users"))
    assert [(each.name, each.password) for each in result.users or ()] == [("ann", None), ("bob", None), ("cyd", "2-secret")]
    assert "-secret" not in str(result.report.rows)
    assert any("line 4 replaces it" in row.note for row in result.report.rows)


def test_escaped_characters_outside_of_the_basic_plane_are_read(tmp_path: Path) -> None:
    (tmp_path / "broker.xml").write_text("<configuration><core/></configuration>")
    (tmp_path / "users").write_text("a\\ud83d\\ude00 = one\nb\\ud83d = two\n")
    result = import_sources(ImportOptions([tmp_path / "broker.xml"], tmp_path / "bascule.toml", tmp_path / "users"))
    assert [each.name for each in result.users or ()] == ["a\U0001f600", "b\ufffd"]


@pytest.mark.parametrize("users", ["ann = 1-secret\nbob = 2-secret\n", "ann = ENC(1024:00:00)\n"])
def test_files_of_users_and_roles_that_are_exchanged_are_refused(users: str, tmp_path: Path) -> None:
    (tmp_path / "broker.xml").write_text("<configuration><core/></configuration>")
    (tmp_path / "users").write_text(users)
    (tmp_path / "roles").write_text("sales = ann, bob\n")
    options = ImportOptions([tmp_path / "broker.xml"], tmp_path / "bascule.toml", users=tmp_path / "roles", roles=tmp_path / "users")
    with pytest.raises(InvalidInput, match="seems to be the file of users") as refused:
        import_sources(options)
    assert "-secret" not in str(refused.value)


@pytest.mark.parametrize(("to", "error"), [("broker.xml", "is a source of the import"), (".", "must be the path of a file")])
def test_result_cannot_replace_a_source(to: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broker.xml").write_text("<configuration><core/></configuration>")
    with pytest.raises(InvalidInput, match=error):
        import_sources(ImportOptions([Path("broker.xml")], Path(to)))


def bridge(directory: Path, text: str, **properties: str) -> tuple[str, str]:
    """Return the written configuration and the rows of the report for a configuration of the JMS Bridge."""
    (directory / "bridge.conf").write_text(f"bridge {{ id = a }}\n{text}")
    result = import_sources(ImportOptions([directory / "bridge.conf"], directory / "bascule.toml", properties=properties))
    return result.text, str(result.report.rows)


def test_optional_reference_to_nothing_keeps_the_value_before_it(tmp_path: Path) -> None:
    text = 'bridge.kafka.bootstrap.servers = "k:9092"\nbridge.kafka.bootstrap.servers = ${?SERVERS}'
    assert '"k:9092"' in bridge(tmp_path, text)[0]
    assert '"other:1"' in bridge(tmp_path, text, SERVERS="other:1")[0]


def test_private_key_and_login_in_settings_of_java_are_masked(tmp_path: Path) -> None:
    text = 'bridge.kafka { ssl.keystore.key = "MII-secret", basic.auth.user.info = "ann:1-secret" }'
    shown = bridge(tmp_path, text)[1]
    assert "keystore.key" in shown
    assert "-secret" not in shown


def test_thousand_rules_are_imported(tmp_path: Path) -> None:
    rules = "".join(f"bridge.routing.topics += {{ match = t{number} }}\n" for number in range(1000))
    assert bridge(tmp_path, rules)[0].count("[[divert]]") == 1000
