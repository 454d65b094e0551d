"""Broker, pipelines and programs with exactly the Kafka ACLs of docs/reference/kafka-acls.md: nothing is denied, and each right is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bascule.adapter.inbound import Activation, ActivationSpec, Backoff
from bascule.adapter.inbound.dead_letters import DeadLetters
from bascule.adapter.outbound import KafkaConnectionFactory, KafkaTransactions
from bascule.client import Queue, connect
from bascule.core.destination import Routing
from bascule.kafka.admin import Topics
from bascule.pipelines.spec import IngressSpec
from bascule.testing.xa import DurableBranches, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from tests.scenarios.authorized import AuthorizedKafka
from tests.scenarios.inbound_endpoints import Seen
from tests.scenarios.sparkless import Bridge, without_spark
from tests.scenarios.topics import Reader, create, produce
from tests.support.client import SOON_S
from tests.support.rights_page import BROKER, ENDPOINT, PIPELINES, RETURNS, SENDER, TRANSACTIONS, VERIFY, WHY, Process
from tests.support.system import System, wait_for
from tests.unit.cli.conftest import Bascule, Done, bascule  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(600)

PREFIX = "closed"
NAMES = {
    "PREFIX": PREFIX, "BRIDGE": PREFIX, "DEAD-LETTERS": f"{PREFIX}.dead-letter", "AUDIT": "audit.lines", "XA": "closed.xa",
    "FACTORY": "closed.factory", "GROUP": "closed.group",
}  # fmt: skip
BRIDGE = {**NAMES, "TARGET": "acl.out", "SOURCE": "acl.in"}
PROGRAM = {**NAMES, "TARGET": "acl.sent", "SOURCE": "acl.read"}
USERS = ("broker", "pipelines", "verify", "why", "xa", "endpoint", "returns", "sender", "sparkless")
#: Rights that a process uses only after a long time, with much data, after a failure, or if it starts before the broker: it deletes old
#: records, moves messages out of the journal, counts dead letters, creates topics, reads earlier reports, and finishes the branches of
#: other processes.
LATER = {
    "broker": {
        "DELETE TOPIC closed.journal", "DELETE TOPIC closed.ingress", "WRITE TOPIC closed.store", "READ TOPIC closed.positions",
        "WRITE TOPIC closed.positions", "DESCRIBE GROUP closed.closed.",
    },
    "pipelines": {
        "CREATE TOPIC closed.ingress", "CREATE TOPIC closed.control", "CREATE TOPIC closed.pipelines", "CREATE TOPIC closed.redrive",
        "WRITE TOPIC closed.dead-letter", "READ TOPIC closed.pipelines", "DELETE GROUP closed.closed.",
    },
    "verify": {"READ TOPIC closed.dead-letter"},
    "why": {"READ TOPIC closed.dead-letter", "READ TOPIC closed.store"},
    "xa": {"DELETE TOPIC closed.xa.side", "READ TOPIC closed.xa.side"},
    "endpoint": {"DELETE TOPIC closed.group.inbound", "READ TOPIC closed.group.dead-letter"},
}  # fmt: skip
CONFIG = """
[audit]
topic = "audit.lines"
[pipelines]
master = "local[2]"
[[divert]]
name = "out"
from = "orders"
to = "acl.out"
start = "earliest"
[[ingress]]
name = "in"
topics = ["acl.in"]
to = "payments"
routing = "anycast"
unbound = "keep"
"""


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuthorizedKafka]:
    with AuthorizedKafka(tmp_path_factory.mktemp("authorized") / "kafka", USERS) as running:
        yield running


def system_of(kafka: AuthorizedKafka, user: str, directory: Path) -> System:
    """Return broker and pipelines as one user of Kafka."""
    login = {"BASCULE_KAFKA__CLIENT": json.dumps(kafka.login(user))}
    return System(kafka.secured, directory / user, prefix=PREFIX, config=CONFIG, env=login)


def as_user(kafka: AuthorizedKafka, user: str, process: Process) -> dict[str, str]:
    """Give a user the rights of a program, and return the settings of its clients."""
    kafka.grant(user, process, PROGRAM)
    return {**kafka.login(user), "bootstrap.servers": kafka.secured}


def left(kafka: AuthorizedKafka, user: str, process: Process, names: dict[str, str]) -> set[str]:
    return kafka.unused(user, process, names) - LATER.get(user, set())


def check(kafka: AuthorizedKafka, user: str, process: Process, names: dict[str, str]) -> None:
    assert kafka.denied(user) == set()
    assert left(kafka, user, process, names) == set()


def run_command(kafka: AuthorizedKafka, bascule: Bascule, file: Path, command: str, *arguments: str) -> Done:  # noqa: F811
    """Run a command as its user, which has its name."""
    login = "".join(f'"{name}" = "{value}"\n' for name, value in kafka.login(command).items())
    head = f"""bridge.id = "{PREFIX}"\njournal.prefix = "{PREFIX}"\nkafka.bootstrap_servers = "{kafka.secured}"\n[kafka.client]\n{login}"""
    file.write_text(head + CONFIG)
    return bascule(command, *arguments, "--config", str(file))


@pytest.mark.slow
def test_broker_and_pipelines_need_their_rights_and_no_others(kafka: AuthorizedKafka, bascule: Bascule, tmp_path: Path) -> None:  # noqa: F811
    create(kafka.bootstrap, "acl.in", "audit.lines")
    kafka.grant("broker", BROKER, BRIDGE)
    kafka.grant("pipelines", PIPELINES, BRIDGE)
    kafka.grant("verify", VERIFY, BRIDGE)
    kafka.grant("why", WHY, BRIDGE)
    with system_of(kafka, "broker", tmp_path) as system, connect(system.url) as client:
        order = client.producer(Queue("orders")).send("an order")
        produce(kafka.bootstrap, "acl.in", ["a payment"])
        pipelines = system_of(kafka, "pipelines", tmp_path).pipelines
        try:
            pipelines.start()
            Topics({"bootstrap.servers": kafka.bootstrap}).await_visible(["acl.out"])  # the divert creates it
            with closing(Reader(kafka.bootstrap, "acl.out")) as out:
                assert out.read_until("an order") == ["an order"]
            payment = client.consumer(Queue("payments")).receive(SOON_S)
            assert payment is not None
            assert payment.body == "a payment"
            verified = run_command(kafka, bascule, tmp_path / "verify.toml", "verify")
            assert (verified.returncode, verified.stderr) == (0, "")
            story = run_command(kafka, bascule, tmp_path / "why.toml", "why", str(order.message_id), "--format", "json")
            assert (story.returncode, story.stderr) == (0, "")
            assert json.loads(story.stdout)["messages"][0]["diverts"][0]["state"] == "written"
            paused = bascule("divert", "pause", "out", "--admin", f"http://127.0.0.1:{system.admin_port}")
            assert paused.returncode == 0, paused.stderr
            made = bascule(
                "ingress", "create", "made", "topics=acl.in", "to=queue://made", "--wait-s", "0", "--admin",
                f"http://127.0.0.1:{system.admin_port}",
            )  # fmt: skip
            assert made.returncode == 0, made.stderr
            redriven = bascule("redrive", "run", "--all", "--admin", f"http://127.0.0.1:{system.admin_port}")
            assert redriven.returncode == 0, redriven.stderr
            wait_for(lambda: left(kafka, "broker", BROKER, BRIDGE) == set(), lambda: str(left(kafka, "broker", BROKER, BRIDGE)))
        finally:
            pipelines.stop()
    check(kafka, "broker", BROKER, BRIDGE)
    check(kafka, "pipelines", PIPELINES, BRIDGE)
    check(kafka, "verify", VERIFY, BRIDGE)
    check(kafka, "why", WHY, BRIDGE)


def test_pipelines_without_spark_are_denied_nothing_with_their_rights(kafka: AuthorizedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    without_spark(monkeypatch)
    prefix = "sparkless"
    names = {"PREFIX": prefix, "BRIDGE": prefix, "DEAD-LETTERS": f"{prefix}.dead", "TARGET": f"{prefix}.out", "SOURCE": "acl.in"}
    kafka.grant("sparkless", PIPELINES, names)
    create(kafka.bootstrap, "acl.in")
    bridge = Bridge(kafka, prefix)  # writes the journal, which in this test nobody else creates
    bridge.pipelines = replace(bridge.pipelines, kafka={**kafka.login("sparkless"), "bootstrap.servers": kafka.secured})
    ingress = IngressSpec("in", "payments", ("acl.in",), None, Routing.ANYCAST)
    with bridge.running(bridge.divert("out"), ingresses=(ingress,)) as running:
        bridge.journal.start_epoch()
        bridge.send("an order")
        running.batch("diverts")
        running.driver.poll()
    with closing(Reader(kafka.bootstrap, f"{prefix}.out")) as out:
        assert out.read_until("an order") == ["an order"]
    assert kafka.denied("sparkless") == set()


def test_transaction_manager_needs_its_rights_and_no_others(kafka: AuthorizedKafka) -> None:
    create(kafka.bootstrap, "acl.sent")
    settings = as_user(kafka, "xa", TRANSACTIONS)
    rows = ModelResource("db", DurableBranches())
    resource = KafkaResource("kafka", settings, prefix=NAMES["XA"])
    with TransactionManager("shop", KafkaLog(settings), [rows, resource]) as manager:
        with manager.begin(timeout_s=60) as transaction:
            transaction.enlist(rows).append("a row")
            transaction.enlist(resource).send("acl.sent", b"a record")
        with closing(Reader(kafka.bootstrap, "acl.sent")) as sent:
            assert sent.read_until("a record") == ["a record"]
    check(kafka, "xa", TRANSACTIONS, PROGRAM)


def test_endpoint_and_return_of_dead_letters_need_their_rights_and_no_others(kafka: AuthorizedKafka) -> None:
    create(kafka.bootstrap, "acl.read")
    produce(kafka.bootstrap, "acl.read", ["a record"])
    settings, group = as_user(kafka, "endpoint", ENDPOINT), NAMES["GROUP"]
    failing = [True]

    def work(_: object) -> None:
        if failing:
            raise ValueError("not yet")

    seen = Seen(work)
    activation = Activation(settings, ActivationSpec(topics=("acl.read",), group=group, retries=1, backoff=Backoff(0.05, 2.0, 0.2)), seen)
    activation.start()
    try:
        letters = DeadLetters(as_user(kafka, "returns", RETURNS), group)
        wait_for(lambda: letters.waiting(), "a dead letter", 90)
        failing.clear()
        assert letters.send_back() == 1
        assert seen.wait(1) == ["a record"]
    finally:
        activation.stop(5.0)
    check(kafka, "endpoint", ENDPOINT, PROGRAM)
    assert kafka.denied("returns") == set()


def test_connection_with_transactions_needs_its_rights_and_no_others(kafka: AuthorizedKafka) -> None:
    create(kafka.bootstrap, "acl.sent")
    factory = KafkaConnectionFactory(as_user(kafka, "sender", SENDER), transacted=KafkaTransactions(NAMES["FACTORY"]))
    with factory.connection() as connection, connection.transaction():
        connection.send("acl.sent", b"another record")
    factory.close()
    check(kafka, "sender", SENDER, PROGRAM)
