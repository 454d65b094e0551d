"""The OpenAPI document of the admin server, compared with the answers of a whole broker on Kafka in memory."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from bascule.client import ConnectionFactory, Queue, Topic
from bascule.client.message import Message
from bascule.config.defined import REFUSED
from bascule.config.pipeline import Ingress
from bascule.core.destination import Routing
from bascule.core.topics import JournalTopics
from bascule.kafka import own_topics
from bascule.kafka.control import ControlTopics
from bascule.pipelines.spec import PipelinesSpec
from bascule.server import looks
from bascule.server.admin_access import AdminRole
from bascule.server.openapi import document
from bascule.server.operations import OPERATIONS
from bascule.writer.control import PipelineReport, PipelineState
from bascule.writer.position import COMMON, Position, position_key, position_partition
from tests.scenarios.test_redrive import bury
from tests.support import api_page
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import PREFIX, SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import run_async
from tests.unit.server.test_admin import Broker as StatusOnly
from tests.unit.server.test_admin import served
from tests.unit.server.test_owned_branches import prepared
from tests.unit.server.test_pipelines import ACCESS, report
from tests.unit.server.test_reload_process import TEXT, source

__all__ = ["kafka"]
TOKEN = "owner"
SETTINGS = f"""{TEXT}
[admin]
port = 0
token = "{TOKEN}"
[broker.users]
ann = "a"
[[topic]]
name = "news"
[[divert]]
name = "orders"
from = "orders"
to = "target"
[[ingress]]
name = "stock"
topics = ["stock"]
to = "stock"
"""
JOURNAL, INGRESS, POSITIONS = f"{PREFIX}.journal", f"{PREFIX}.ingress", f"{PREFIX}.positions"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


class Operations:
    """Calls the operations of the document of a server, and compares each answer with the document."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.document = request(port, "GET", "/openapi.json", authorization=f"Bearer {TOKEN}").json
        self.called: dict[tuple[str, str], set[int]] = {}

    def ask(
        self, method: str, path: str, body: Any = None, *, status: int = 200, token: str = TOKEN, query: dict[str, Any] | None = None,
        **values: str,
    ) -> Any:  # fmt: skip
        """Call an operation; ``values`` fill its path. Return the answer."""
        operation = self.document["paths"][path][method.lower()]
        if status != 400:
            self.check_input(operation, body, query or {})
        target = path.format(**values) + (f"?{urllib.parse.urlencode(query, doseq=True)}" if query else "")
        answer = request(self.port, method, target, body, **({"authorization": f"Bearer {token}"} if token else {}))
        assert answer.status == status, (method, target, answer)
        self.check(operation, answer)
        self.called.setdefault((method, path), set()).add(status)
        return answer.json if answer.headers.get("content-type") == "application/json" else answer.body

    def check_input(self, operation: dict[str, Any], body: Any, query: dict[str, Any]) -> None:
        """Check that the document describes what the test sends."""
        schemas = {each["name"]: each["schema"] for each in operation.get("parameters", ()) if each["in"] == "query"}
        for name, value in query.items():
            assert isinstance(value, list) == (schemas[name].get("type") == "array"), name
        if body:
            self.validator(operation["requestBody"]["content"]["application/json"]["schema"]).validate(body)

    def check(self, operation: dict[str, Any], answer: Answer) -> None:
        described = operation["responses"][str(answer.status)]
        if "$ref" in described:
            described = self.document["components"]["responses"][described["$ref"].rpartition("/")[2]]
        kind = answer.headers.get("content-type", "").partition(";")[0]
        contents = described.get("content")
        if contents is None:
            assert not answer.body
            return
        assert kind in contents or "*/*" in contents, (kind, contents)
        if "schema" in contents.get(kind, {}):
            self.validator(contents[kind]["schema"]).validate(answer.json)

    def validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        return Draft202012Validator({**schema, "components": self.document["components"]})

    def good(self) -> dict[tuple[str, str], set[int]]:
        """Return the statuses of answers that are no errors, by operation."""
        return {
            (method.upper(), path): {int(status) for status in operation["responses"] if int(status) < 400}
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
        }


def look_at_everything(api: Operations, broker: Broker) -> None:
    for path in ("/livez", "/readyz", "/active"):
        api.ask("GET", path, token="")
    for path in (
        "/metrics",
        "/openapi.json",
        "/status",
        "/subscriptions",
        "/connections",
        "/overview",
        "/flow",
        "/brokers",
        "/settings",
        "/definitions",
        "/definitions/pipelines",
    ):
        api.ask("GET", path)
    assert [(each["elected"], each["this"]) for each in api.ask("GET", "/brokers")] == [(True, True)]
    api.ask("GET", "/queues")
    api.ask("GET", "/queues", query={"name": "orders"})
    api.ask("GET", "/queues", query={"name": "none"}, status=404)
    for kind in ("queues", "topics", "subscriptions", "connections", "branches"):
        part = api.ask("GET", f"/list/{kind}", query={"search": "", "order": "descending", "offset": 0, "limit": 10})
        assert part["entries"], kind
    peer = api.ask("GET", "/connections")[0]["id"]
    assert api.ask("GET", "/connections/links", query={"id": peer})["links"]
    api.ask("GET", "/permissions")
    assert api.ask("GET", "/permissions", query={"user": "ann", "permission": "send", "address": "orders"})["decision"]["allowed"]
    assert len(api.ask("GET", "/dead-letters", query={"count": 5})) == 1


def look_at_messages(api: Operations) -> None:
    found = api.ask("GET", "/messages", query={"queue": "orders", "mark": "true", "selector": "n = 1", "count": 10})["messages"]
    assert {each["body_kind"] for each in found} == {"text", "bytes", "map", "stream", "message"}
    for each in found:
        api.ask("GET", "/messages/show", query={"queue": "orders", "id": each["id"]})
        api.ask("GET", "/messages/body", query={"queue": "orders", "id": each["id"]})
    assert api.ask("GET", "/messages/life", query={"id": found[0]["message_id"]})["messages"]
    api.ask("GET", "/messages", query={"queue": "none"}, status=404)


def act_on_queues(api: Operations) -> None:
    assert api.ask("POST", "/queues/create", {"name": "new"}) == {"created": "new"}
    api.ask("POST", "/queues/create", {"name": "new"}, status=400)
    body = {"to": "new", "kind": "map", "body": "{}", "properties": {"n": {"type": "int", "value": "1"}, "s": "x"}, "ttl_ms": 100_000}
    api.ask("POST", "/messages/send", body)
    api.ask("POST", "/queues/delete", {"name": "new"}, status=409)
    api.ask("POST", "/queues/move", {"name": "new", "to": "newer"})
    (message,) = api.ask("GET", "/messages", query={"queue": "newer"})["messages"]
    assert api.ask("POST", "/queues/purge", {"name": "newer", "ids": message["id"]}) == {"purged": 1, "left": {}}
    api.ask("POST", "/queues/purge", {"name": "newer"})
    api.ask("POST", "/queues/delete", {"name": "newer", "force": True})
    api.ask("POST", "/dead-letters/return", {"queue": "DLQ"})
    subscription = {"name": "kept", "topic": "news", "client_id": "a.b", "selector": "n = 1", "no_local": True, "user": "ann"}
    assert api.ask("POST", "/subscriptions/create", subscription) == {"created": r"a\.b.kept"}
    api.ask("POST", "/subscriptions/create", subscription, status=400)
    (found,) = [each for each in api.ask("GET", "/definitions")["subscriptions"] if each["name"] == "kept"]
    assert found == {**subscription, "shared": False}
    api.ask("POST", "/subscriptions/delete", {"name": r"a\.b.kept"})
    peer = api.ask("GET", "/connections")[0]["id"]
    api.ask("POST", "/connections/close", {"id": peer})


def end_branches(api: Operations) -> None:
    one, other = [each["xid"] for each in api.ask("GET", "/status")["branches"]]
    api.ask("POST", "/branches/commit", {"xid": one})
    api.ask("POST", "/branches/rollback", {"xid": other})
    for xid in (one, other):
        api.ask("POST", "/branches/forget", {"xid": xid})
        api.ask("POST", "/branches/forget", {"xid": xid}, status=404)


def control_pipelines(api: Operations) -> None:
    for collection, name, positions in (("/diverts", "orders", 1), ("/ingresses", "stock", 1)):
        one = f"{collection}/{{name}}"
        assert [each["name"] for each in api.ask("GET", collection)] == [name]
        for path in (one, f"{one}/status"):
            api.ask("GET", path, name=name)
            api.ask("GET", path, name="none", status=404)
        api.ask("GET", f"{one}/config", name=name, status=404)
        api.ask("PATCH", f"{one}/offsets", {"to": "earliest"}, name=name, status=409)
        for verb in ("pause", "resume", "stop"):
            api.ask("PUT", f"{one}/{verb}", name=name, status=202)
        plan = api.ask("PATCH", f"{one}/offsets", {"to": "earliest"}, name=name)
        assert len(plan["moves"]) == positions
        api.ask("PATCH", f"{one}/offsets", {"token": plan["token"], "discard": True}, name=name, status=202)
        reset = api.ask("DELETE", f"{one}/offsets", name=name)
        if reset["token"] is None:
            reset["token"] = plan["token"]
        api.ask("DELETE", f"{one}/offsets", query={"token": reset["token"], "discard": "true"}, name=name, status=202)
        found = api.ask("GET", f"{one}/offsets", name=name)
        assert (len(found["offsets"]), found["request"]["state"]) == (positions, "pending")
        api.ask("POST", f"{one}/restart", name=name, status=202)


def define_ingress(api: Operations) -> None:
    one, config = "/ingresses/{name}", {"topics": ["prices"], "to": "prices", "routing": "anycast"}
    assert api.ask("POST", "/ingresses", {"name": "prices", "config": config}, status=202)["revision"] == 1
    api.ask("POST", "/ingresses", {"name": "prices", "config": config}, status=409)
    api.ask("POST", "/ingresses", {"name": "more", "config": {}}, status=400)
    found = api.ask("GET", one, name="prices")
    assert (found["origin"], found["config"], found["revision"]) == ("runtime", config, 1)
    assert api.ask("GET", f"{one}/config", name="prices") == config
    changed = {**config, "body": "bytes", "pattern": None, "tasks": 1}
    assert api.ask("PUT", f"{one}/config", changed, query={"revision": 1}, name="prices", status=202)["revision"] == 2
    api.ask("PUT", f"{one}/config", changed, query={"revision": 1}, name="prices", status=409)
    api.ask("PUT", f"{one}/config", {}, name="prices", status=400)
    api.ask("PATCH", f"{one}/config", {"tasks": None}, query={"revision": 1}, name="prices", status=409)
    api.ask("PATCH", f"{one}/config", {"tasks": None}, name="none", status=404)
    with closing(ControlTopics({"bootstrap.servers": "memory"}, JournalTopics(PREFIX))) as topics:
        report(topics, ingress_prices=PipelineReport(PipelineState.RUNNING, "host-1", 1, revision=1))
    (found,) = [each for each in api.ask("GET", "/ingresses") if each["name"] == "prices"]
    assert (found["revision"], found["reported_revision"]) == (2, 1)
    merged = api.ask("PATCH", f"{one}/config", {"tasks": None, "body": "text"}, query={"revision": 2}, name="prices", status=202)
    assert merged["revision"] == 3
    assert api.ask("GET", f"{one}/config", name="prices") == {**config, "body": "text", "pattern": None}
    api.ask("DELETE", one, name="prices", status=202)
    found = api.ask("GET", f"{one}/status", name="prices")
    assert (found["state"], found["wanted"], found["revision"]) == ("deleting", "deleted", None)
    expanded = api.ask("GET", "/ingresses", query={"expand": ["status", "info"]})
    assert expanded["prices"] == {"status": found, "info": api.ask("GET", one, name="prices")}
    assert api.ask("GET", one, name="prices")["config"] is None
    api.ask("DELETE", one, name="none", status=404)
    api.ask("DELETE", one, name="stock", status=409)


def define_divert(api: Operations, broker: Broker) -> None:
    one, config = "/diverts/{name}", {"from": "elsewhere", "to": "elsewhere"}
    assert not broker.node.engine.addresses.route("elsewhere", Routing.MULTICAST).diverted
    assert api.ask("POST", "/diverts", {"name": "late", "config": config}, status=202)["revision"] == 1
    assert api.ask("GET", f"{one}/config", name="late") == config
    assert broker.node.engine.addresses.route("elsewhere", Routing.MULTICAST).diverted
    api.ask("POST", "/diverts", {"name": "late", "config": config}, status=409)
    api.ask("POST", "/diverts", {"name": "more", "config": {**config, "from": ""}}, status=400)
    assert api.ask("PUT", f"{one}/config", {"from": "elsewhere.*"}, query={"revision": 1}, name="late", status=202)["revision"] == 2
    assert api.ask("PATCH", f"{one}/config", {"key": "none"}, name="late", status=202)["revision"] == 3
    assert api.ask("PATCH", f"{one}/config", {"key": None}, query={"revision": 3}, name="late", status=202)["revision"] == 4
    assert not broker.node.engine.addresses.route("elsewhere", Routing.MULTICAST).diverted
    found = api.ask("GET", f"{one}/status", name="late")
    assert 0 < found["covered_from"] <= broker.node.journal_offset
    assert api.ask("GET", "/definitions/pipelines")["diverts"] == [{"name": "late", "config": {"from": "elsewhere.*"}}]
    flow = api.ask("GET", "/flow")
    assert [(each["name"], each["origin"]) for each in flow["diverts"]] == [("orders", "file"), ("late", "runtime")]
    assert flow["addresses"]["orders"]["messages"] == 5, "the queue at the broker of the answer"
    api.ask("DELETE", one, name="late", status=202)
    api.ask("DELETE", one, name="nowhere", status=404)


def redrive_letters(api: Operations, bridge: str) -> None:
    names = JournalTopics(PREFIX)
    pipelines = PipelinesSpec(bridge, {"bootstrap.servers": "memory"}, topics=names)
    own_topics.ensure(pipelines.kafka, {names.redrive: own_topics.REDRIVE, names.dead_letters: own_topics.DEAD_LETTERS})
    bury(pipelines, "orders", "1", "2")
    assert api.ask("GET", "/redrive/letters", query={"header": ["no:1", "such:2"]})["letters"] == []
    found = api.ask("GET", "/redrive/letters", query={"pipeline": "divert:orders", "header": ["bascule.divert:orders"], "count": 10})
    assert [letter["place"] for letter in found["letters"]] == ["0:0", "0:1"]
    one = "/redrive/letters/{partition}/{offset}"
    assert api.ask("GET", one, partition="0", offset="0")["state"] == "waiting"
    api.ask("GET", one, partition="0", offset="9", status=404)
    api.ask("GET", one, partition="0", offset="-1", status=400)
    api.ask("GET", one, partition="0", offset="x", status=400)
    job = api.ask("POST", "/redrive/run", {"places": ["0:0"], "upto": found["upto"]}, status=202)["job"]
    api.ask("POST", "/redrive/discard", {"all": True, "confirm": True}, status=202)
    api.ask("POST", "/redrive/discard", {"all": True, "places": ["0:0"], "confirm": True}, status=400)
    assert [(each["job"] == job, each["state"]) for each in api.ask("GET", "/redrive/jobs")] == [(True, "pending"), (False, "pending")]


def use_console(api: Operations) -> None:
    api.ask("GET", "/", token="", status=307)
    api.ask("GET", "/console", token="", status=307)
    (parameter,) = api.document["paths"]["/console/{file}"]["get"]["parameters"]
    for file in parameter["schema"]["enum"]:
        api.ask("GET", "/console/{file}", token="", file=file)
    api.ask("GET", "/console/session", token="")
    api.ask("POST", "/console/login", status=401, token="wrong")
    api.ask("POST", "/console/logout", status=401, token="")
    login = request(api.port, "POST", "/console/login", authorization=f"Bearer {TOKEN}")
    cookie = login.headers["set-cookie"].partition(";")[0]
    logout = request(api.port, "POST", "/console/logout", cookie=cookie, **{"x-csrf-token": login.json["csrf"]})
    for path, answer in (("/console/login", login), ("/console/logout", logout)):
        assert answer.status == 200
        api.check(api.document["paths"][path]["post"], answer)
        api.called["POST", path] |= {200}


def position(kafka: KafkaInMemory, pipeline: str, topic: str, offset: int, members: tuple[str, ...] = ()) -> None:
    key = position_key(pipeline, topic, 0)
    value = Position(topic, kafka.topics[topic].id, 0, offset, members=members, owner="driver").encode()
    kafka.put(POSITIONS, value, key.encode(), partition=position_partition(key))


@contextmanager
def client_at_work(broker: Broker) -> Iterator[None]:
    """Keep messages of all kinds, a dead letter, subscriptions and a connection with links."""
    url = f"amqp://127.0.0.1:{broker.ready[-1]}"
    factory = ConnectionFactory(url, timeout_s=SOON_S, user="ann", password="a", client_id="ann")
    with factory.connect() as context:
        for body in ("text", b"bytes", {"a": 1}, ["a", 1.5], None):
            context.send(Queue("orders"), Message(body, properties={"n": 1, "s": "text"}, type="t", group_id="g"))
        context.durable_consumer(Topic("news"), "sub").close()
        context.send(Queue("DLQ"), "dead")
        with context.consumer(Queue("other")):
            yield


@run_async
async def test_every_operation_of_the_document_answers_as_it_describes(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create("stock")
    kafka.put("stock", b"{}")
    broker = Broker(kafka, tmp_path, reload_source=source(tmp_path / "data", SETTINGS))
    try:
        await broker.serves()
        kafka.create(POSITIONS, 16, cleanup_policy="compact")
        position(kafka, COMMON, JOURNAL, 3, ("orders",))
        position(kafka, "ingress:stock", "stock", 1)
        await called(use_everything, broker)
    finally:
        await broker.stop()


def use_everything(broker: Broker) -> None:
    assert broker.node.admin is not None
    api = Operations(broker.node.admin.port)
    for _ in range(2):
        prepared(broker, "ann")
    with client_at_work(broker):
        look_at_everything(api, broker)
        look_at_messages(api)
        end_branches(api)
        control_pipelines(api)
        define_ingress(api)
        define_divert(api, broker)
        redrive_letters(api, broker.settings.bridge.id)
        use_console(api)
        act_on_queues(api)
    assert api.ask("POST", "/config/reload")["applied"] == []
    assert "was not recreated" in api.ask("POST", "/ingress/reset", status=400)["error"]
    missing = {key: statuses - api.called.get(key, set()) for key, statuses in api.good().items()}
    assert {key: left for key, left in missing.items() if left} == {("POST", "/ingress/reset"): {200}}


# -- the document and the table ----------------------------------------------------------------------------------------


def test_document_is_valid() -> None:
    found = document(api_page.all_pages())
    validate(found)
    assert found["openapi"] == "3.1.0"


def test_pages_of_the_documentation_are_those_of_the_document() -> None:
    different = [path for path, text in api_page.pages().items() if path.read_text() != text]
    assert different == [], "run `python -m tests.support.api_page`"


def test_every_operation_has_words_and_no_words_are_left_over() -> None:
    pages = api_page.all_pages()
    assert {(page.method, page.listed_as or page.path) for page in pages} == set(OPERATIONS)
    ids = [each["operationId"] for operations in document(pages)["paths"].values() for each in operations.values()]
    assert len(set(ids)) == len(ids)


def parameters_of(found: dict[str, Any], path: str) -> set[str]:
    return {each["name"] for each in found["paths"][path]["get"].get("parameters", ())}


@run_async
async def test_document_has_all_parameters_that_a_look_knows(kafka: KafkaInMemory, tmp_path: Path) -> None:
    found = document(api_page.all_pages())
    async with serving(kafka, tmp_path) as broker:
        await broker.send(broker.settings.broker.dead_letter_address, "1")
        assert broker.node.admin is not None
        port = broker.node.admin.port
        for name in looks.LOOKS:
            answer = await called(request, port, "GET", f"/{name}?unknown=1&user=u")
            known = answer.json["error"].partition("known are ")[2]
            assert set(filter(None, known.split(", "))) == parameters_of(found, f"/{name}"), name


def test_settings_of_an_ingress_are_those_that_can_be_given_at_run_time() -> None:
    paths = document(api_page.all_pages())["paths"]
    create, change = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for operation in (paths["/ingresses"]["post"], paths["/ingresses/{name}/config"]["put"])
    ]
    assert create["properties"]["config"] == change
    assert set(change["properties"]) == set(Ingress.model_fields) - set(REFUSED)
    for path, method in (("/redrive/run", "post"), ("/redrive/discard", "post"), ("/diverts/{name}/offsets", "patch")):
        body = paths[path][method]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        assert body["required"], path
        assert not Draft202012Validator(schema).is_valid({}), path
    for given in ({"topics": 1}, {"body": "json"}, {"tasks": 0}, {"name": "n"}, {"other": "x"}):
        assert not Draft202012Validator(change).is_valid(given), given


def test_server_answers_what_is_in_the_document_and_nothing_else() -> None:
    found = document(api_page.all_pages())
    table = {page.path: {each.method for each in api_page.all_pages() if each.path == page.path} for page in api_page.all_pages()}

    def ask(port: int) -> None:
        for path, methods in table.items():
            target = path.replace("{name}", "n")
            for method in METHODS:
                answer = request(port, method, target)
                assert (answer.status == 405) == (method not in methods), (method, path, answer.status)
                if answer.status == 405:
                    assert answer.headers["allow"].split(", ") == sorted(methods | ({"HEAD"} if "GET" in methods else set())), path
                    assert answer.json.keys() == {"error"}
            answer = request(port, "GET", f"{target.rstrip('/')}/x/y/z")
            assert (answer.status, answer.json) == (404, {"error": "there is no such path"}), path

    served(StatusOnly(), ask, pipelines=api_page.PIPELINES, reload=api_page.RELOAD, brokers=api_page.BROKERS)
    routed = {(method, path) for path, methods in table.items() for method in methods}
    listed = {(method.upper(), path) for path, operations in found["paths"].items() for method in operations}
    files = found["paths"]["/console/{file}"]["get"]["parameters"][0]["schema"]["enum"]
    assert routed == (listed - {("GET", "/console/{file}")}) | {("GET", f"/console/{file}") for file in files}


def test_roles_of_the_document_are_those_that_the_server_asks_for() -> None:
    found = document(api_page.all_pages())
    wanted: dict[tuple[str, str, str], object] = {}
    asked: dict[tuple[str, str, str], object] = {}

    def ask(port: int) -> None:
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                if path == "/console/{file}":
                    continue
                needed = operation["security"][1]["bearer"][0] if operation["security"] else ""
                target = path.replace("{name}", "n")
                for role in AdminRole:
                    wanted[method, path, role.word] = bool(needed) and role < AdminRole[needed.upper()]
                    asked[method, path, role.word] = (
                        request(port, method.upper(), target, authorization=f"Bearer {role.word}").status == 403
                    )
                if needed:
                    wanted[method, path, ""], asked[method, path, ""] = 401, request(port, method.upper(), target).status

    served(StatusOnly(), ask, pipelines=api_page.PIPELINES, reload=api_page.RELOAD, brokers=api_page.BROKERS, access=ACCESS)
    assert asked == wanted
