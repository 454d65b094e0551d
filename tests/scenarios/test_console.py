"""The console in a real Chromium, with a live broker and a real Kafka: tests/console/walk.mjs clicks through every page.

``PICTURES=docs/pictures pytest tests/scenarios/test_console.py`` also writes the pictures of the documentation.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from bascule.client import Acknowledge, ConnectionLost, Context, Message, Queue, Topic, connect
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import Appender
from bascule.kafka.control import ControlTopics
from bascule.pipelines.spec import PipelinesSpec
from bascule.server.pipelines import wall_ms
from bascule.writer.control import DRIVER_KEY, DriverReport, OffsetsWish, PipelineReport, PipelineState
from bascule.writer.position import MOVED, MovedMark, Position, position_key, position_partition
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.scenarios.test_redrive import bury
from tests.support.chromium import run_script
from tests.support.speed import SLOWNESS
from tests.support.system import WAIT_S, System, wait_for

#: Longest wait for one text on a page, in ms: shorter than the run of the script, which names the step that failed.
STEP_MS = 20_000 * SLOWNESS
#: The report of the driver is as young as this, so that it does not become old during the test.
LASTS_MS = 3_600_000
HOSTILE = "<img src=x onerror=window.hacked=1>"
SCRIPT = '"><script>window.hacked=1</script>'
CONFIG = """
[broker]
max_delivery_attempts = 1
users = { ann = "secret", eve = "secret", vic = "secret" }

[broker.roles]
operators = ["ann"]
editors = ["eve"]
viewers = ["vic"]

[journal]
snapshot_records = 100

[admin]
manage = ["operators"]
edit = ["editors"]
view = ["viewers"]

[[permission]]
match = "#"
send = ["operators", "editors"]
consume = ["operators", "editors"]
browse = ["operators", "editors"]
createAddress = ["operators", "editors"]
deleteAddress = ["operators"]
createDurableQueue = ["operators", "editors"]
deleteDurableQueue = ["operators"]
createNonDurableQueue = ["operators", "editors"]
deleteNonDurableQueue = ["operators", "editors"]
manage = ["operators"]

[[divert]]
name = "delayed"
from = "flights"
selector = "dep_delay > 30"
to = "kafka.${address}.delayed"

[[ingress]]
name = "airports"
topics = ["airports"]
to = "queue://airports"
routing = "anycast"

[[ingress]]
name = "weather"
topics = ["weather"]
to = "queue://weather"

[audit]
file = "AUDIT"
"""
FLIGHTS = (
    ("UA", 45, {"origin": "EWR", "dest": "IAH", "flight": 1545}), ("AA", 2, {"origin": "JFK", "dest": "MIA", "flight": 1141}),
    ("B6", 90, {"origin": "JFK", "dest": "Nantucket", "flight": 725}), ("DL", -6, {"origin": "LGA", "dest": "ATL", "flight": 461}),
    ("UA", 12, {"origin": "EWR", "dest": "ORD", "flight": 1696}),
)  # fmt: skip


def report_pipelines(system: System) -> None:
    """Report a pipeline as a driver does, and bury what it could not carry. No driver runs, so requests to it stay."""
    kafka, names = {"bootstrap.servers": system.bootstrap}, JournalTopics(system.prefix)
    own_topics.ensure(kafka, {
        names.dead_letters: own_topics.DEAD_LETTERS, names.control: own_topics.CONTROL, names.reports: own_topics.CONTROL,
        names.positions: own_topics.POSITIONS,
    })  # fmt: skip
    bury(PipelinesSpec(system.prefix, kafka, topics=names), "delayed", "first", "second")
    later_ms = wall_ms() + LASTS_MS
    report = PipelineReport(
        PipelineState.RUNNING, "host-1", later_ms, {"from": "flights"}, "", ((names.journal, 0, 3, 9),), 1, 6, 1.5, 0, "", 0,
        latency_p50_s=0.021, latency_p99_s=1.5,
    )  # fmt: skip
    with closing(ControlTopics(kafka, names)) as topics:
        # The ingress has taken two records of its topic.
        Topics(kafka).create("weather", 1, {})
        with closing(Appender(kafka)) as appender:
            for text in ("rain", "snow", "sun"):
                appender.append(Outgoing("weather", None, text.encode(), partition=0)).result(WAIT_S)
            key, taken = (
                position_key("ingress:weather", "weather", 0),
                Position("weather", Topics(kafka).id("weather"), 0, 2, owner="host-1"),
            )
            appender.append(Outgoing(names.positions, key.encode(), taken.encode(), partition=position_partition(key))).result(WAIT_S)
        for future in topics.report({"divert:delayed": report, DRIVER_KEY: DriverReport("host-1", later_ms, True)}):
            future.result(WAIT_S)
        for pipeline in ("divert:delayed", "ingress:airports", "ingress:weather"):
            topics.want(pipeline, OffsetsWish(f"move of {pipeline}", (), "bob", wall_ms()))
    # A driver has handled two of these requests, and moved one position.
    with closing(Appender(kafka)) as appender:
        for pipeline, moved, reason in (("ingress:airports", 0, "topic 'airports' was recreated"), ("ingress:weather", 1, "")):
            key, mark = f"{MOVED}{pipeline}", MovedMark(f"move of {pipeline}", moved, 1, reason)
            appender.append(Outgoing(names.positions, key.encode(), mark.position().encode(), partition=position_partition(key))).result(
                WAIT_S
            )


@pytest.fixture
def secured(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[System]:
    config = CONFIG.replace("AUDIT", str(tmp_path / "audit.log"))
    with System(kafka.bootstrap, tmp_path / "broker", prefix="console", config=config) as running:
        yield running


def fill(context: Context) -> None:
    for carrier, delay, flight in FLIGHTS:
        properties = {"carrier": carrier, "dep_delay": delay}
        context.send(Queue("flights"), Message(json.dumps(flight), type="flight", properties=properties, correlation_id=carrier))
    for number in range(75):
        context.consumer(Queue(f"orders.{number:03}")).close()
    context.send(Queue(HOSTILE), HOSTILE)
    for body in (SCRIPT + HOSTILE, SCRIPT.encode(), {SCRIPT: HOSTILE}, [SCRIPT, HOSTILE]):
        fields = {"type": SCRIPT + HOSTILE, "correlation_id": HOSTILE, "group_id": SCRIPT}
        context.send(Queue("hostile"), Message(body, properties={"note": SCRIPT + HOSTILE}, **fields))
    context.shared_durable_consumer(Topic("prices"), "billing").close()


def make_dead_letters(url: str) -> None:
    with connect(url, acknowledge=Acknowledge.TRANSACTED, user="ann", password="secret") as context:
        for _ in range(2):
            context.send(Queue("broken"), "cannot be processed")
        context.commit()
        consumer = context.consumer(Queue("broken"))
        for _ in range(2):
            assert consumer.receive(WAIT_S) is not None
            context.rollback()


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Send and receive messages meanwhile, so that the charts have something to show.

    If Kafka stores nothing for 15 s on a busy machine, the broker closes the connection, and the traffic continues on a new one.
    """
    over = threading.Event()

    def tick() -> None:
        with connect(url, user="ann", password="secret") as context:
            consumer, number = context.consumer(Queue("ticks")), 0
            while not over.wait(0.01 + 0.04 * (number % 40 > 20)):
                number += 1
                context.send(Queue("ticks"), str(number))
                consumer.receive(WAIT_S)

    def run() -> None:
        while not over.is_set():
            with suppress(ConnectionLost):
                tick()

    sending = threading.Thread(target=run)
    sending.start()
    try:
        yield
    finally:
        over.set()
        sending.join()


def test_every_page_of_the_console_works_in_a_browser(secured: System, tmp_path: Path) -> None:
    xid = branch(new_gtrid("shop", 0), "jms")
    pictures = os.environ.get("PICTURES", "")
    make_dead_letters(secured.url)
    report_pipelines(secured)
    login = {"user": "ann", "password": "secret"}
    with connect(secured.url, **login) as context, connect(secured.url, client_id="watcher", **login) as watcher:
        fill(context)
        watcher.consumer(Queue("watched"), selector="colour = 'red'", prefetch=10)
        with closing(JmsResource("jms", secured.url, timeout_s=WAIT_S, **login)) as resource:
            resource.start(xid, timeout_s=600).send(Queue("bills"), "bill")
            resource.end(xid, success=True)
            resource.prepare(xid)
        wait_for(lambda: secured.depth("DLQ") == 2, "two dead letters")
        with traffic(secured.url):
            run_script("walk.mjs", _empty(tmp_path / "browser"), {
                "ADMIN": f"http://127.0.0.1:{secured.admin_port}", "HOSTILE": HOSTILE, "XID": str(xid), "WAIT_MS": str(int(STEP_MS)),
                "PICTURES": str(Path(pictures).resolve()) if pictures else "",
            })  # fmt: skip
    with closing(ControlTopics({"bootstrap.servers": secured.bootstrap}, JournalTopics(secured.prefix))) as topics:
        wishes = topics.wishes(WAIT_S)
    moved = wishes.offsets["ingress:weather"]
    assert [(each.topic, each.partition, each.offset, each.to) for each in moved.moves] == [("weather", 0, 2, 0)]
    assert moved.by == "ann"
    said = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    done = {(each["who"], each["action"]) for each in said}
    actions = (
        "console login", "console logout", "queues/purge", "messages/send", "messages", "divert pause", "divert restart", "divert stop",
        "ingress offsets", "ingress create", "ingress delete", "redrive run", "redrive discard",
    )  # fmt: skip
    assert {("ann", action) for action in actions} <= done
    assert not any("the console" in json.dumps(each) for each in said), "the audit has no content of messages"


def _empty(directory: Path) -> Path:
    directory.mkdir()
    return directory
