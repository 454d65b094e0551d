"""The programs and commands of the guides about transactions run as they are written, with PostgreSQL, Kafka and a broker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.embedded.process import Child
from tests.examples.pages import ROOT, Block, blocks, typed
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.jta_shop import SOURCES
from tests.support.client import all_in
from tests.support.java import JARS, SMALL_JVM, compiled_sources
from tests.support.speed import SLOWNESS
from tests.support.system import System, wait_for

GUIDES = ROOT / "docs" / "guides"
#: Ports, accounts, directories and topics of the guides, and what they are here. Other tests use topics of the same names.
CONNINFO, KAFKA, BROKER, LOG = "host=127.0.0.1 dbname=shop user=shop", "127.0.0.1:9092", "amqp://127.0.0.1:5672", "/var/lib/shop"
ENGINE = "postgresql+psycopg://shop@127.0.0.1/shop"
TOPICS = [(r'topics=\("(\w+)",\)', r'topics=("guide.\1",)'), (r'"receipts"', '"guide.receipts"'), (r'(group[= ]"?)shop\.', r"\1guide.")]
RUN_TIMEOUT_S = 90.0 * SLOWNESS
REFUSED = "refused"
SETTINGS = """
SERVER = {{"USER": "postgres", "HOST": "127.0.0.1", "PORT": {port}}}
DATABASES = {{"default": {{"ENGINE": "django.db.backends.postgresql", "NAME": "{name}", **SERVER}}}}
"""
MODELS = """
from django.db import models

class Payment(models.Model):
    order = models.BigIntegerField(primary_key=True)
    amount = models.BigIntegerField()

    class Meta:
        app_label = "shop"
"""
SITE = """
import asyncio, django
django.setup()
from django.db import connection
from django.test import RequestFactory
from shop.models import Payment
from shop.payments import pay
from shop.transactions import manager
from shop.views import payments
with connection.schema_editor() as editor:
    editor.create_model(Payment)
with manager:
    pay(1, 10)
    print(asyncio.run(payments(RequestFactory().post("/payments", {"order": 2, "amount": 20}))).status_code)
"""
JAVA = """
import bascule.xa.*;
import jakarta.jms.*;
import jakarta.transaction.TransactionManager;

class Guide {
    public static void main(String[] arguments) throws Exception {
        TransactionManager transactionManager = com.arjuna.ats.jta.TransactionManager.transactionManager();
%s
        System.out.println(((TextMessage) order).getText());
        connection.close();
        System.exit(0);
    }
}
"""
pytestmark = [pytest.mark.services, pytest.mark.timeout(280)]


def code(guide: str, language: str = "python") -> list[str]:
    """Return the programs or commands of a guide, in order."""
    return [block.text for block in blocks(GUIDES / guide, "run") if block.language == language]


class Reader:
    """Somebody who follows a guide in a directory of its own, with a database of its own."""

    def __init__(self, name: str, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, system: System, directory: Path) -> None:
        with psycopg.connect(postgres.conninfo, autocommit=True) as rows:
            rows.execute(f"CREATE DATABASE {name}")
        self.directory, self.system, self.kafka = directory, system, kafka.bootstrap
        self.children: list[Child] = []
        self.conninfo = postgres.conninfo.replace("dbname=postgres", f"dbname={name}")
        engine = f"{postgres.url.rpartition('/')[0]}/{name}"
        self._places = {CONNINFO: self.conninfo, ENGINE: engine, KAFKA: kafka.bootstrap, BROKER: system.url, LOG: str(directory)}
        for module, text in {"__init__": "", "settings": SETTINGS.format(name=name, port=postgres.port), "models": MODELS}.items():
            self.write(f"shop/{module}.py", text)

    def typed(self, text: str) -> str:
        for said, here in self._places.items():
            text = text.replace(said, here)
        for said, here in TOPICS:
            text = re.sub(said, here, text)
        return text

    def write(self, name: str, *texts: str) -> Path:
        file = self.directory / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.typed("\n".join(texts)))
        return file

    def module(self, text: str) -> None:
        """Write a program into the file that its first line names."""
        self.write(text.splitlines()[0].removeprefix("# "), text)

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.conninfo, autocommit=True) as rows:
            cursor = rows.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def run(self, *command: str | Path, **env: str) -> str:
        done = subprocess.run(
            [*map(str, command)], cwd=self.directory, env=os.environ | env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, *texts: str, **env: str) -> str:
        return self.run(sys.executable, self.write("program.py", *texts), **env)

    def shell(self, text: str) -> str:
        return typed(self.typed(text), self.directory, RUN_TIMEOUT_S)

    def child(self, *texts: str) -> Child:
        """Start a program that goes on until it is stopped."""
        started = Child([sys.executable, self.write("program.py", *texts)], log_file=self.directory / "program.log")
        self.children.append(started)
        started.start()
        return started


@pytest.fixture(scope="module")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("guides"), prefix="guides") as running:
        create(kafka.bootstrap, *(f"guide.{topic}" for topic in ("payments", "receipts", "orders", "refunds")), partitions=1)
        yield running


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, system: System, tmp_path: Path
) -> Iterator[Reader]:
    database = re.sub(r".*_of_the_(.*)_guide.*", r"guide_\1", request.node.name)
    reading = Reader(database, kafka, postgres, system, tmp_path)
    yield reading
    for child in reading.children:
        child.kill()


def has_received(reader: Reader, topic: str, *parts: str) -> None:
    """Return when a topic has a record with each of these parts in its value."""
    watcher = Watcher(reader.kafka, topic)
    wait_for(lambda: all(any(part in value for value in watcher.look()) for part in parts), f"{parts} in {topic}", RUN_TIMEOUT_S)
    watcher.close()


def ended(program: Child) -> None:
    """End a program with SIGTERM, and wait for its orderly end."""
    assert program.pid is not None
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait(RUN_TIMEOUT_S)
    assert program.returncode == 0, program.log_file.read_text()


def test_programs_and_commands_of_the_transactions_guide_have_their_effects(reader: Reader) -> None:
    resources, block, function, service, alchemy, aio = code("xa.md")
    look, _ = code("xa.md", "sh")
    with_broker = service.split("\n\nwith manager:")[0]
    entity = (
        "from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column",
        "class Base(DeclarativeBase): pass",
        "class Payment(Base):",
        "    __tablename__ = 'orders'",
        "    order: Mapped[int] = mapped_column(primary_key=True)",
    )
    reader.sql("CREATE TABLE payments (number text, amount text)")
    reader.sql('CREATE TABLE orders ("order" bigint PRIMARY KEY)')
    reader.module(resources)
    reader.python(resources, block, function, "with manager:\n    pay(4712, 91)")
    reader.python(resources, with_broker, *entity, alchemy, "with manager:\n    pay(4713)")
    reader.python(resources, with_broker, aio)
    assert reader.sql("SELECT * FROM payments") == [("4711", "90"), ("4712", "91"), ("4711", "90")]
    assert reader.sql("SELECT * FROM orders") == [(4713,)]
    has_received(reader, "guide.receipts", '{"payment": 4711}', "4712")
    program = reader.child(resources, service)
    with connect(reader.system.url) as context:
        context.send(Queue("orders"), "4714")
        assert all_in(context, Queue("confirmations"), 3) == ["paid: 4713", "paid: 4711", "paid: 4714"]
    program.kill()
    reader.python(resources, with_broker, "with manager:\n    pass")  # finish what the killed program has left
    assert reader.shell(look).splitlines() == ["shop: no unfinished transactions"] * 2
    assert [amount for _, amount in reader.sql("SELECT * FROM payments")][-1] == "4714"


def test_steps_of_the_adapter_guide_have_their_effects(reader: Reader) -> None:
    first, retries, resources, transacted, notify, pool, jms = code("adapter.md")
    (monitor,) = [each for each in code("adapter.md", "sh") if "bascule adapter" in each]
    head = first.split("\n\n\n@adapter")[0]
    charge = (
        "import psycopg",
        "def charge(key, value):",
        f"    with psycopg.connect({CONNINFO!r}) as rows:",
        "        rows.execute('INSERT INTO charges VALUES (%s, %s)', (key, value))",
    )
    orders = ("def take_order(record):", "    charge(record.key, None)", "refund = take_order")
    reader.sql(f"CREATE TABLE charges (payment bytea PRIMARY KEY, amount bytea CHECK (amount <> '{REFUSED}'))")

    def charged(*payments: str) -> None:
        wanted = {payment.encode() for payment in payments}
        wait_for(lambda: wanted <= {row[0] for row in reader.sql("SELECT payment FROM charges")}, f"{wanted} to be charged", RUN_TIMEOUT_S)

    produce(reader.kafka, "guide.payments", ["4711", REFUSED])
    program = reader.child(*charge, first)
    charged("4711")
    ended(program)
    sends = "with manager, manager.begin():\n    notify('5712')\n"
    program = reader.child(head, retries, resources, notify, sends, transacted)
    produce(reader.kafka, "guide.payments", ["4713"])
    charged("4713")
    has_received(reader, "guide.receipts", "4713", '"5712"')
    has_received(reader, "guide.payments.dead-letter", REFUSED)
    ended(program)
    reader.sql("ALTER TABLE charges ALTER amount TYPE boolean USING true, DROP CONSTRAINT charges_amount_check")
    program = reader.child(*charge, head, resources, *orders, pool, jms, "with manager:\n    adapter.run()")
    with connect(reader.system.url) as context:
        context.send(Queue("vouchers"), "a voucher")
        produce(reader.kafka, "guide.payments", ["4714"])
        produce(reader.kafka, "guide.orders", ["o1"])
        produce(reader.kafka, "guide.refunds", ["r1"])
        charged("4714", "o1", "r1")
        assert all_in(context, Queue("confirmations"), 1) == [b"4714"]
        assert list(context.browse(Queue("vouchers"))) == []
    ended(program)
    said = reader.shell(monitor)
    assert REFUSED in said


def test_site_of_the_django_guide_commits_rows_and_messages(reader: Reader) -> None:
    pytest.importorskip("django")
    for text in code("django.md"):
        reader.module(text)
    (look,) = code("django.md", "sh")
    assert reader.python(SITE, DJANGO_SETTINGS_MODULE="shop.settings") == "201\n"
    assert reader.sql("SELECT * FROM shop_payment") == [(1, 10), (2, 20)]
    with connect(reader.system.url) as context:
        assert all_in(context, Queue("confirmations"), 2) == ["1: 10", "2: 20"]
    assert reader.shell(look) == "shop: no unfinished transactions\n"


def test_programs_of_the_outbox_guide_send_each_message_once(reader: Reader) -> None:
    resources, pay, drain = code("outbox.md")
    for text in (resources, pay, drain):
        reader.module(text)
    reader.sql("CREATE TABLE payments (number bigint PRIMARY KEY, amount bigint)")
    reader.sql("CREATE TABLE outbox (id bigserial PRIMARY KEY, topic text, key text, value text)")
    reader.sql("INSERT INTO outbox (topic, key, value) SELECT 'guide.receipts', n::text, 'waited: ' || n FROM generate_series(1, 250) n")
    relay = (sys.executable, "-m", "shop.drain")
    for point in ("xa.prepare.after:1", "xa.decide.after:2"):  # nothing is decided; the second hundred is committed in the database
        killed = subprocess.run(relay, cwd=reader.directory, env=os.environ | {ARMED_VARIABLE: point}, check=False, timeout=RUN_TIMEOUT_S)
        assert killed.returncode == -signal.SIGKILL
    reader.run(*relay)
    paying = "from shop.pay import manager, pay\nwith manager:\n    pay(4711, 90)"
    reader.python(paying)
    assert (reader.sql("SELECT * FROM payments"), reader.sql("SELECT * FROM outbox")) == ([(4711, 90)], [])
    has_received(reader, "guide.receipts", "paid: 90")
    watcher = Watcher(reader.kafka, "guide.receipts")
    wait_for(lambda: "paid: 90" in watcher.look(), "the last message")
    watcher.close()
    assert [value for value in watcher.values if value.startswith("waited")] == [f"waited: {number}" for number in range(1, 251)]


def test_program_of_the_java_guide_commits_messages_in_a_transaction_of_narayana(reader: Reader) -> None:
    (text,) = code("xa-java.md", "java")
    path = [compiled_sources("payments", sorted(SOURCES), JARS, "narayana", "atomikos"), *classpath(JARS), *classpath("narayana")]
    with connect(reader.system.url) as context:
        context.send(Queue("orders"), "an order")
        file = reader.write("Guide.java", JAVA % text)
        assert reader.run(find_jdk().executable, *SMALL_JVM, "-cp", os.pathsep.join(map(str, path)), file).endswith("an order\n")
        assert all_in(context, Queue("bills"), 1) == ["bill"]
        assert list(context.browse(Queue("orders"))) == []


@pytest.mark.parametrize("guide", ["xa.md", "adapter.md", "django.md", "outbox.md", "xa-java.md"])
def test_each_program_of_a_transactions_guide_is_run(guide: str) -> None:
    def read_only(block: Block) -> bool:
        return block.language in ("python", "java", "sh") and block.purpose not in ("run", "serve")

    # The loop that loses payments, the program that is replaced, and the build, which tests/interop runs.
    known = {"adapter.md": ["unsafe"], "outbox.md": ["before"], "xa-java.md": ["build", "build"]}
    assert [block.purpose for block in blocks(GUIDES / guide) if read_only(block)] == known.get(guide, [])
