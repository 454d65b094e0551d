"""A broker with users, roles of the admin server and an audit: Qpid JMS, the commands, curl's form of HTTP, and real Kafka."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from tests.interop.conftest import Connect
from tests.support.qpid import JmsError
from tests.support.system import System, wait_for

TOPIC = "audited-lines"
CONFIG = """
[broker]
users = {{ ann = "a", bob = "b", olga = "o" }}

[broker.roles]
sales = ["ann"]
operators = ["olga"]

[admin]
manage = ["operators"]
view_token = "look"

[audit]
file = "{file}"
topic = "{topic}"

[[permission]]
match = "audited.#"
send = ["sales"]
consume = ["sales"]
createAddress = ["sales"]
createDurableQueue = ["sales"]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def audited(kafka: EmbeddedKafka, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    admin = clients.admin({"bootstrap.servers": kafka.bootstrap})
    for made in admin.create_topics([NewTopic(TOPIC, 1, 1)]).values():
        made.result()
    config = CONFIG.format(file=file, topic=TOPIC)
    with System(kafka.bootstrap, tmp_path_factory.mktemp("audited"), prefix="audited", config=config) as running:
        yield running


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def has(file: Path, **fields: Any) -> bool:
    return any(all(line.get(name) == value for name, value in fields.items()) for line in lines(file))


def test_logins_creations_and_refusals_of_jms_clients_are_audited(audited: System, file: Path, connect_to: Connect) -> None:
    with pytest.raises(JmsError, match="JMSSecurity"):
        connect_to(audited.url, user="ann", password="wrong")
    ann = connect_to(f"{audited.url}?jms.clientID=desk", user="ann", password="a").session()
    ann.producer("queue:audited.orders").send("secret body")
    bob = connect_to(audited.url, user="bob", password="b").session()
    with pytest.raises(JmsError, match="JMSSecurity"):
        bob.consumer("queue:audited.orders")
    assert has(file, action="login", who="ann", allowed=False)
    assert has(file, action="login", who="ann", on="desk", allowed=True, mechanism="SCRAM-SHA-512")
    assert has(file, action="create queue", who="ann", on="audited.orders")
    assert has(file, action="consume", who="bob", on="audited.orders", allowed=False)
    assert "secret" not in file.read_text()


def bascule(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bascule.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120)


def test_commands_log_in_as_a_user_or_as_the_owner_of_the_broker(audited: System, file: Path) -> None:
    server = f"127.0.0.1:{audited.admin_port}"
    data_dir = str(audited.data_dir)
    assert bascule("queue", "create", "audited.made", "--admin", f"http://olga@{server}", BASCULE_PASSWORD="o").returncode == 0
    owner = bascule("queue", "delete", "audited.made", "--admin", f"http://{server}", BASCULE_EMBEDDED__DATA_DIR=data_dir)
    assert owner.returncode == 0, owner.stderr
    refused = bascule("queue", "create", "audited.made", "--admin", f"http://bob@{server}", BASCULE_PASSWORD="b")
    assert (refused.returncode, "has no role for the admin server" in refused.stderr) == (2, True)
    looks = bascule("queue", "list", "--admin", f"http://{server}", BASCULE_ADMIN__VIEW_TOKEN="look")
    assert looks.returncode == 0, looks.stderr
    lacks = bascule("queue", "create", "audited.made", "--admin", f"http://{server}", BASCULE_ADMIN__VIEW_TOKEN="look")
    assert (lacks.returncode, "this request needs edit" in lacks.stderr) == (2, True)
    assert has(file, action="queues/create", who="olga", on="audited.made", allowed=True)
    assert has(file, action="queues/delete", who="owner", on="audited.made", allowed=True)
    assert has(file, action="administration", on="POST /queues/create", allowed=False)


def test_every_path_needs_credentials_except_health_checks(audited: System) -> None:
    codes = {}
    for path in ("livez", "readyz", "metrics", "status"):
        for login in ("", "Basic " + base64.b64encode(b"olga:o").decode()):
            request = urllib.request.Request(
                f"http://127.0.0.1:{audited.admin_port}/{path}", headers={"authorization": login} if login else {}
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    codes[path, bool(login)] = answer.status
            except urllib.error.HTTPError as error:
                with error:
                    codes[path, bool(login)] = error.code
    assert codes == {
        ("livez", False): 200, ("livez", True): 200, ("readyz", False): 200, ("readyz", True): 200,
        ("metrics", False): 401, ("metrics", True): 200, ("status", False): 401, ("status", True): 200,
    }  # fmt: skip


def test_topic_has_the_lines_of_the_file(audited: System, kafka: EmbeddedKafka, file: Path, connect_to: Connect) -> None:
    connect_to(f"{audited.url}?jms.clientID=last-line", user="ann", password="a").close()
    wanted = [line for line in file.read_text().splitlines() if '"last-line"' in line]
    assert wanted
    consumer = clients.consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "audit-reader", "auto.offset.reset": "earliest"})
    consumer.subscribe([TOPIC])
    found: list[str] = []

    def arrived() -> bool:
        record = consumer.poll(0.1)
        if record is not None and record.error() is None:
            found.append(record.value().decode())
        return found[-len(wanted) :] == wanted

    try:
        wait_for(arrived, "the last line in the topic")
    finally:
        consumer.close()
    assert set(found) <= set(file.read_text().splitlines())
