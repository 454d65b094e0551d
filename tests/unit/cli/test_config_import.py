"""``bascule config import``: the written configuration and the report are those of tests/golden/imports.

``REWRITE=1 pytest tests/unit/cli/test_config_import.py`` writes these files.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import stat
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bascule.config.users_file import read
from tests.unit.cli.conftest import Bascule, Done

GOLDEN = Path(__file__).parents[2] / "golden" / "imports"
CASES: dict[str, Sequence[str]] = {
    "artemis-create": ("broker.xml", "--users", "artemis-users.properties", "--roles", "artemis-roles.properties"),
    "every-element": ("broker.xml", "--users", "artemis-users.properties", "--roles", "artemis-roles.properties"),
    "wildcards": ("broker.xml", "--property", "host=localhost"),
    "jms-bridge": ("jms-bridge.conf",),
}
#: All secrets of the sources end with this.
SECRET = "-secret"


def copied(case: str, to: Path) -> None:
    """Copy the sources of a case."""
    for each in (GOLDEN / case).iterdir():
        if each.name not in ("expected.toml", "report.csv"):
            shutil.copy(each, to)


def imported(case: str, directory: Path, bascule: Bascule, *more: str) -> Done:
    copied(case, directory)
    return bascule("config", "import", *CASES[case], *more)


def expected_rows(case: str) -> list[dict[str, str]]:
    return list(csv.DictReader((GOLDEN / case / "report.csv").read_text().splitlines()))


def rows_of(done: Done) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def write(directory: Path, core: str) -> Path:
    path = directory / "broker.xml"
    path.write_text(f"<configuration>\n<core>\n{core}\n</core>\n</configuration>\n")
    return path


def self_signed(directory: Path) -> str:
    """Write a certificate and its key into one PEM file, and return its name."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "server.pem").write_bytes(certificate.public_bytes(pem) + secret)
    return "server.pem"


@pytest.mark.parametrize("case", CASES)
def test_configuration_and_report_are_the_expected_ones(case: str, tmp_path: Path, bascule: Bascule) -> None:
    done = imported(case, tmp_path, bascule, "-o", "csv")
    assert done.returncode == 0, done.stderr
    if os.environ.get("REWRITE"):
        shutil.copyfile(tmp_path / "bascule.toml", GOLDEN / case / "expected.toml")
        (GOLDEN / case / "report.csv").write_text(done.stdout)
    assert (tmp_path / "bascule.toml").read_text() == (GOLDEN / case / "expected.toml").read_text()
    assert done.stdout == (GOLDEN / case / "report.csv").read_text()


@pytest.mark.parametrize("case", CASES)
def test_config_check_accepts_the_written_configuration(
    case: str, tmp_path: Path, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(case, tmp_path, bascule)
    if case == "jms-bridge":  # its report tells the administrator to set the password
        assert "sasl.username and sasl.password must be set" in bascule("config", "check", "--config", "bascule.toml").stderr
        monkeypatch.setenv("BASCULE_KAFKA__CLIENT__SASL_PASSWORD", "hush")
    checked = bascule("config", "check", "--config", "bascule.toml")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("case", ["every-element", "jms-bridge"])
def test_no_secret_of_a_source_is_written_or_reported(case: str) -> None:
    assert any(SECRET in path.read_text() for path in (GOLDEN / case).iterdir())
    for name in ("expected.toml", "report.csv"):  # the first test compares them with what the command writes
        assert SECRET not in (GOLDEN / case / name).read_text()


def test_every_element_of_the_schema_is_known() -> None:
    unknown = {row["element"] for row in expected_rows("every-element") if row["note"].startswith("not known")}
    assert unknown == {"no-such-element", "no-such-element@some", 'address-settings/address-setting["wrong"]/no-such-setting'}


@pytest.mark.parametrize("case", ["artemis-create", "every-element", "wildcards"])
def test_each_element_is_named_in_the_report(case: str) -> None:
    root = ElementTree.parse(GOLDEN / case / "broker.xml").getroot()
    names = {each.tag.rpartition("}")[2] for each in root.iter()} - {"configuration", "core"}
    report = " ".join(f"{row['element']} {row['note']}" for row in expected_rows(case))
    assert [name for name in sorted(names) if not re.search(rf"(?<![\w-]){name}(?![\w-])", report)] == []


def test_each_line_with_a_setting_has_a_row() -> None:
    reported = {int(row["place"].partition(":")[2]) for row in expected_rows("artemis-create") if row["place"].startswith("broker.xml")}
    lines = (GOLDEN / "artemis-create" / "broker.xml").read_text()
    without_comments = re.sub("<!--.*?-->", lambda found: "\n" * found[0].count("\n"), lines, flags=re.DOTALL).splitlines()
    settings = {number for number, line in enumerate(without_comments, start=1) if re.search(r"<([\w-]+).*(/>|</\1>)", line)}
    # The rows of the two tables for the management address cover their content.
    assert [number for number in settings - reported if not (181 < number < 190 or 194 < number < 204)] == []
    assert len(settings & reported) > 50


def test_written_files_are_private_and_users_have_verifiers(tmp_path: Path, bascule: Bascule) -> None:
    imported("every-element", tmp_path, bascule)
    for name in ("bascule.toml", "bascule.users"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    users = read(tmp_path / "bascule.users").users
    assert {name: bool(user.verifiers) for name, user in users.items()} == {"ann": True, "bob": False, "cyé": True, "empty": False}


def test_existing_file_is_kept_without_force(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text("[log]\n")
    done = imported("artemis-create", tmp_path, bascule)
    assert done.returncode == 2
    assert "bascule.toml exists; use --force" in done.stderr
    assert (tmp_path / "bascule.toml").read_text() == "[log]\n"
    assert not (tmp_path / "bascule.users").exists()


def test_force_replaces_the_configuration_and_keeps_users_that_exist(tmp_path: Path, bascule: Bascule) -> None:
    imported("every-element", tmp_path, bascule)
    before = read(tmp_path / "bascule.users").users["ann"]
    assert imported("every-element", tmp_path, bascule, "--force").returncode == 0
    assert read(tmp_path / "bascule.users").users["ann"] == before


def test_dry_run_writes_nothing(tmp_path: Path, bascule: Bascule) -> None:
    done = imported("artemis-create", tmp_path, bascule, "--dry-run")
    assert "nothing is written" in done.stderr
    assert not list(tmp_path.glob("bascule.*"))


def test_summary_counts_the_rows(tmp_path: Path, bascule: Bascule) -> None:
    done = imported("artemis-create", tmp_path, bascule, "-o", "csv")
    count = Counter(row["outcome"] for row in csv.DictReader(io.StringIO(done.stdout)))
    counts = f"{count['taken']} taken, {count['differs']} taken with a difference, {count['none']} without a counterpart"
    assert f"{counts}; written: bascule.toml, bascule.users\n" in done.stderr


def test_files_that_would_be_the_same_are_refused(tmp_path: Path, bascule: Bascule) -> None:
    done = imported("artemis-create", tmp_path, bascule, "--to", "my.users")
    assert (done.returncode, "choose another one" in done.stderr) == (2, True)


@pytest.mark.parametrize("option", [(), ("--allow-insecure",)])
def test_host_stays_on_this_machine_unless_the_risk_is_accepted(option: tuple[str, ...], tmp_path: Path, bascule: Bascule) -> None:
    imported("artemis-create", tmp_path, bascule, *option)
    broker = tomllib.loads((tmp_path / "bascule.toml").read_text())["broker"]
    expected = ("0.0.0.0", True) if option else ("127.0.0.1", None)
    assert (broker["host"], broker.get("allow_insecure")) == expected


ACCEPTOR = """
<acceptors><acceptor name="amqps">tcp://0.0.0.0:5671?sslEnabled=true;keyStorePath={store};keyStoreType={kind};trustStorePath=trust.jks;\
needClientAuth=true</acceptor></acceptors>
<security-settings><security-setting match="#"><permission type="send" roles="a"/></security-setting></security-settings>
"""


def test_pem_files_take_the_place_of_key_stores_and_let_the_host_stay(tmp_path: Path, bascule: Bascule) -> None:
    server = self_signed(tmp_path)
    write(tmp_path, ACCEPTOR.format(store="server.jks", kind="JKS"))
    rows = rows_of(bascule("config", "import", "broker.xml", "--certificate", server, "--client-ca", server, "-o", "json"))
    broker = tomllib.loads((tmp_path / "bascule.toml").read_text())["broker"]
    assert broker["host"] == "0.0.0.0"
    assert broker["tls"] == {"certificate": server, "client_ca": server, "client_certificate": "required"}
    assert {row["outcome"] for row in rows if "StorePath" in row["element"]} == {"differs"}
    assert bascule("config", "check", "--config", "bascule.toml").returncode == 0


def test_key_store_in_pem_is_taken_and_one_of_java_is_not(tmp_path: Path, bascule: Bascule) -> None:
    server = self_signed(tmp_path)
    write(tmp_path, ACCEPTOR.format(store=server, kind="PEM"))
    assert bascule("config", "import", "broker.xml").returncode == 0
    assert tomllib.loads((tmp_path / "bascule.toml").read_text())["broker"]["tls"] == {"certificate": server}
    write(tmp_path, ACCEPTOR.format(store=server, kind="JKS"))
    rows = rows_of(bascule("config", "import", "broker.xml", "--to", "other.toml", "-o", "json"))
    broker = tomllib.loads((tmp_path / "other.toml").read_text())["broker"]
    assert (broker["host"], "tls" in broker) == ("127.0.0.1", False)
    assert any("import again with --certificate certificate.pem" in row["note"] for row in rows)


def test_certificate_that_cannot_be_used_is_refused_and_nothing_is_written(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "server.pem").write_text("no certificate")
    write(tmp_path, ACCEPTOR.format(store="server.jks", kind="JKS"))
    done = bascule("config", "import", "broker.xml", "--certificate", "server.pem")
    assert (done.returncode, "broker.tls: certificate server.pem" in done.stderr) == (2, True)
    assert not (tmp_path / "bascule.toml").exists()


def test_property_without_a_value_is_named_with_its_line(tmp_path: Path, bascule: Bascule) -> None:
    write(tmp_path, "<name>${a}</name>\n<addresses/>\n<jmx-domain>${b} ${c:d}</jmx-domain><!-- ${e} -->")
    done = bascule("config", "import", "broker.xml")
    assert done.returncode == 2
    assert "broker.xml:3: property 'a' has no value; give it with --property a=VALUE" in done.stderr
    assert "broker.xml:5: property 'b'" in done.stderr
    assert "'c'" not in done.stderr
    assert "'e'" not in done.stderr
    assert not (tmp_path / "bascule.toml").exists()


def test_value_of_a_property_cannot_add_elements(tmp_path: Path, bascule: Bascule) -> None:
    write(tmp_path, '<addresses><address name="${a}"><anycast/></address></addresses>')
    rows = rows_of(bascule("config", "import", "broker.xml", "--property", 'a="/><address name="b', "-o", "json"))
    assert [row["setting"] for row in rows if "queue" in row["setting"]] == ['[[queue]] name = "\\"/><address name=\\"b"']


def test_property_must_have_a_name_and_a_value(bascule: Bascule, tmp_path: Path) -> None:
    write(tmp_path, "")
    assert "must be NAME=VALUE" in bascule("config", "import", "broker.xml", "--property", "a").stderr


def test_both_configurations_of_a_jms_bridge_become_one(tmp_path: Path, bascule: Bascule) -> None:
    copied("jms-bridge", tmp_path)
    write(tmp_path, '<security-enabled>false</security-enabled><addresses><address name="a"><anycast/></address></addresses>')
    assert bascule("config", "import", "jms-bridge.conf", "broker.xml").returncode == 0
    tree = tomllib.loads((tmp_path / "bascule.toml").read_text())
    assert tree["bridge"]["id"] == "orders-bridge"
    assert tree["queue"] == [{"name": "a"}]
    assert "give at most one" in bascule("config", "import", "broker.xml", "broker.xml").stderr


def test_properties_of_a_jms_bridge_mean_the_same_as_hocon(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "a.properties").write_text(
        "bridge.id=b\nbridge.kafka.bootstrap.servers=k:9092\nbridge.journals.topic.replication=1\n"
        "bridge.routing.topics.0.match=stock\nbridge.routing.topics.0.message.type=TEXT\n"
    )
    (tmp_path / "b.conf").write_text(
        'bridge { id = b, kafka.bootstrap.servers = "k:9092"\n journals.topic.replication = 1\n'
        " routing.topics = [{ match = stock, message.type = TEXT }] }\n"
    )
    assert bascule("config", "import", "a.properties", "--to", "a.toml").returncode == 0
    assert bascule("config", "import", "b.conf", "--to", "b.toml").returncode == 0
    trees = [tomllib.loads((tmp_path / name).read_text()) for name in ("a.toml", "b.toml")]
    assert trees[0] == trees[1]
    assert trees[0]["divert"][0]["from"] == "kafka.stock"


def test_file_of_another_kind_is_refused(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "beans.xml").write_text("<beans>\n</beans>")
    (tmp_path / "other.conf").write_text("a = 1")
    assert "beans.xml:1: <beans> is not a configuration of Artemis" in bascule("config", "import", "beans.xml").stderr
    assert "other.conf: not a configuration of the JMS Bridge" in bascule("config", "import", "other.conf").stderr
    assert "missing.xml: No such file" in bascule("config", "import", "missing.xml").stderr
