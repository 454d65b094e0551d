"""Reload of the settings of a running broker: what takes effect, what needs a restart, and that an error changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from bascule.amqp.events import ConnectionClosed, Detached
from bascule.broker.policy_change import change_policy
from bascule.config import Configuration, load
from bascule.config.reload_effect import ReloadEffect
from bascule.core.access import AccessRule, AccessRules, CurrentPermissions
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.log import configure, configured
from bascule.core.permissions import AllowAll, Permission
from bascule.core.roles import UserRoles
from bascule.core.user_limits import UserResource
from bascule.embedded.service_manager import ServiceManager
from bascule.server.node import Node
from bascule.server.policies import FIELDS
from bascule.server.reload import ReloadSource, end_without_permission
from bascule.testing.broker import BrokerInMemory
from tests.support.service_manager import notify_socket
from tests.support.signer import Signer
from tests.support.speed import SLOWNESS
from tests.unit.config.test_reload_effects import KEYS
from tests.unit.server.served import Client, Served, run_async

SOON_S = 60.0 * SLOWNESS

Probe = Callable[[Node], Any]


class Case(NamedTuple):
    """A reloaded setting: the lines of two files, and what the node shows with each of them."""

    before: str
    after: str
    shows: Probe
    values: tuple[Any, Any]


def case(section: str, key: str, values: tuple[str, str], shows: Probe, shown: tuple[Any, Any]) -> Case:
    header = f"[{section}]\n"
    return Case(f"{header}{key} = {values[0]}\n", f"{header}{key} = {values[1]}\n", shows, shown)


def broker(key: str, one: Any, two: Any, shows: Probe) -> tuple[str, Case]:
    return f"broker.{key}", case("broker", key, (str(one), str(two)), shows, (one, two))


def engine_limit(node: Node) -> int:
    return node.engine.memory.limit_bytes


def limit_of(resource: UserResource) -> Probe:
    return lambda node: node.usage._limits.of_users.of("ann", resource).most


def decision(permission: str) -> Probe:
    return lambda node: node.permissions.now.decide("ann", Permission(permission), "a").allowed


def settings_of_queue(field: str) -> Probe:
    return lambda node: getattr(node.engine.queue("a").settings, field)


MIB = 1 << 20
LOGIN = '[broker]\nusers = {ann = "hush"}\nallow_anonymous = true\n'
#: Values of the settings of an address, by key, and the values of the engine.
ADDRESS = {
    "max_messages": (5, 6), "max_bytes": (500, 600), "when_full": ('"block"', '"reject"'), "max_delivery_attempts": (3, 4),
    "redelivery_delay_s": (1, 2), "redelivery_multiplier": (2, 3), "redelivery_delay_max_s": (60, 70), "expiry_s": (5, 6),
    "max_expiry_s": (50, 60), "dead_letter_address": ('"one"', '"two"'), "expiry_address": ('"one"', '"two"'),
    "duplicate_window_count": (50, 60), "duplicate_window_s": (50, 60), "prefetch": (5, 6), "exclusive": ("false", "true"),
    "auto_create": ("true", "false"), "auto_delete": ("true", "false"), "auto_delete_after_s": (5, 6), "subscription_expiry_s": (5, 6),
}  # fmt: skip


def address_cases(section: str, name: str) -> dict[str, Case]:
    found = {}
    for key, values in ADDRESS.items():
        field, turn = FIELDS[key]
        plain = tuple({"true": True, "false": False}.get(each, each.strip('"')) if isinstance(each, str) else each for each in values)
        text = tuple(f"{section}{key} = {value}\n" for value in values)
        found[f"{name}.{key}"] = Case(text[0], text[1], settings_of_queue(field), (turn(plain[0]), turn(plain[1])))
    return found


CASES: dict[str, Case] = {
    **dict([
        broker("allow_insecure", "false", "true", lambda node: str(node.settings.broker.allow_insecure).lower()),
        broker("handshake_timeout_s", 5.0, 6.0, lambda node: node.amqp_limits.handshake_timeout_s),
        broker("max_handshakes_per_address", 5, 6, lambda node: node.handshakes.limits.per_address_max),
        broker("max_handshakes", 5, 6, lambda node: node.handshakes.limits.connections_max),
        broker("idle_timeout_s", 5.0, 6.0, lambda node: node.idle_timeout_s),
        broker("transaction_timeout_s", 5, 6, lambda node: node.engine.local_transactions.ms_max // 1000),
        broker("memory_bytes", 5 * MIB, 6 * MIB, engine_limit),
        broker("spill_bytes", 5 * MIB, 6 * MIB, lambda node: node.spill.limit_bytes if node.spill else 0),
        broker("spill_free_bytes", 5, 6, lambda node: node.spill.free_min_bytes if node.spill else 0),
        broker("max_queues", 5, 6, lambda node: node.engine.policy.queues_max),
        broker("max_connections", 5, 6, lambda node: node.usage.connections._most),
        broker("max_connections_per_address", 5, 6, lambda node: node.usage._limits.connections_per_address),
    ]),
    **dict(
        broker(f"{resource.value}_per_user", 5, 6, limit_of(resource))
        for resource in UserResource if resource is not UserResource.MESSAGE_BYTES
    ),
    "broker.validated_user": case("broker", "validated_user", ('"off"', '"set"'), lambda node: node.validated_user, ("off", "set")),
    "broker.failover": case(
        "broker", "failover", ('["one:1"]', '["two:1"]'), lambda node: [each["hostname"] for each in node.failover], (["one"], ["two"])
    ),
    "broker.users": Case(
        LOGIN, LOGIN.replace("hush", "loud"), lambda node: [node.users.check("ann", each) for each in ("hush", "loud")],
        ([True, False], [False, True]),
    ),
    "broker.allow_anonymous": Case(
        LOGIN, LOGIN.replace("true", "false"), lambda node: "ANONYMOUS" in node._mechanisms(peer()), (True, False)
    ),
    "broker.roles": case("broker.roles", "sales", ('["ann"]', '["bob"]'), lambda node: sorted(node.users.roles.of("ann")), (["sales"], [])),
    "broker.websocket.origins": case(
        "broker.websocket", "origins", ("[]", '["https://shop.example"]'), lambda node: node.settings.broker.websocket.origins,
        ((), ("https://shop.example",)),
    ),
    "admin.masked_properties": case(
        "admin", "masked_properties", ("[]", '["card"]'), lambda node: node.settings.admin.masked_properties, ((), ("card",))
    ),
    "audit.messages": case("audit", "messages", ("false", "true"), lambda node: node.audit.messages, (False, True)),
    "audit.on_failure": case("audit", "on_failure", ('"continue"', '"refuse"'), lambda node: node.audit.required, (False, True)),
    "log.level": case("log", "level", ('"info"', '"error"'), lambda _: configured().level, ("info", "error")),  # type: ignore[union-attr]
    "log.format": case("log", "format", ('"text"', '"json"'), lambda _: configured().format, ("text", "json")),  # type: ignore[union-attr]
    "queue.name": Case("", '[[queue]]\nname = "orders"\n', lambda node: "orders" in node.engine.addresses.anycast, (False, True)),
    "topic.name": Case("", '[[topic]]\nname = "news"\n', lambda node: node.engine.policy.topics, ((), ("news",))),
    "address.match": Case(
        '[[address]]\nmatch = "b"\nprefetch = 3\n', '[[address]]\nmatch = "a"\nprefetch = 3\n', settings_of_queue("prefetch_max"), (0, 3)
    ),
    **address_cases("[broker]\n", "broker"),
    **address_cases('[[address]]\nmatch = "a"\n', "address"),
    "permission.match": Case(
        '[[permission]]\nmatch = "b"\nsend = ["*"]\n', '[[permission]]\nmatch = "a"\nsend = ["*"]\n', decision("send"), (False, True)
    ),
    **{
        f"permission.{each.value}": Case(
            '[[permission]]\nmatch = "a"\n', f'[[permission]]\nmatch = "a"\n{each.value} = ["*"]\n', decision(each.value), (False, True)
        )
        for each in Permission
    },
    "limit.users": Case(
        '[[limit]]\nusers = ["bob"]\nmax_links = 7\n', '[[limit]]\nusers = ["ann"]\nmax_links = 7\n', limit_of(UserResource.LINKS),
        (100_000, 7),
    ),
    "limit.roles": Case(
        '[broker.roles]\nr = ["ann"]\ns = ["bob"]\n[[limit]]\nroles = ["s"]\nmax_links = 7\n',
        '[broker.roles]\nr = ["ann"]\ns = ["bob"]\n[[limit]]\nroles = ["r"]\nmax_links = 7\n', limit_of(UserResource.LINKS), (100_000, 7),
    ),
    **{
        f"limit.{each.value}": Case(
            f'[[limit]]\nusers = ["ann"]\n{each.value} = 2000\n', f'[[limit]]\nusers = ["ann"]\n{each.value} = 3000\n', limit_of(each),
            (2000, 3000),
        )
        for each in UserResource
    },
}  # fmt: skip
#: Settings with tests of their own below, or of logins with tokens, certificates and administrators, which are replaced as a whole.
TOGETHER = ("broker.users_file", "audit.file", "broker.oidc.", "broker.tls.", "admin.")


def peer() -> Any:
    return SimpleNamespace(user=None, bindings={})


class Reloading:
    """A node with an engine in memory, whose file of settings changes."""

    def __init__(self, place: Path, text: str, *, named: bool = True) -> None:
        """Begin with a file that a flag names, or that the working directory has."""
        self.named = named
        self.file = place / "bascule.toml"
        self.place = place
        self.write(text)
        source = ReloadSource(self.read(), self.read)
        self.node = node = Node(source.configuration.settings, reload_source=source)
        memory = BrokerInMemory(policy=node._policy)
        memory.engine.memory.limit(int(node.settings.broker.memory_bytes))
        broker = node.settings.broker
        node.spill = SimpleNamespace(limit_bytes=int(broker.spill_bytes), free_min_bytes=int(broker.spill_free_bytes))  # type: ignore[assignment]
        epoch = SimpleNamespace(engine=memory.engine, loaded=True, ended=False, protocol=SimpleNamespace(awake=lambda: False))
        node._epoch = epoch  # type: ignore[assignment]
        self.memory = memory

    def read(self) -> Configuration:
        return load(self.file if self.named else None, flags={"embedded": {"data_dir": str(self.place)}})

    def write(self, text: str) -> None:
        self.file.write_text(text)

    async def reload(self, text: str) -> dict[str, Any]:
        self.write(text)
        assert self.node.reload is not None
        found = (await self.node.reload.reload("test")).as_object()
        while self.node.engine.pending:
            self.node.engine.go_on()
        return found


@pytest.fixture
def logging_configured() -> Any:
    before = configured()
    configure()
    yield
    if before is not None:
        configure(before)


def test_every_setting_that_is_reloaded_has_a_case() -> None:
    reloaded = {key for key, effect in KEYS.items() if effect is not ReloadEffect.RESTART}
    assert {key for key in reloaded - CASES.keys() if not key.startswith(TOGETHER)} == set()
    assert CASES.keys() - reloaded == set()


@pytest.mark.parametrize("group", range(6))
def test_reloaded_settings_take_effect(group: int, tmp_path: Path, logging_configured: None) -> None:
    async def run() -> None:
        wrong = {}
        for key, each in list(CASES.items())[group::6]:
            place = tmp_path / key.replace("*", "")
            place.mkdir()
            broker = Reloading(place, each.before)
            shown = [each.shows(broker.node)]
            answer = await broker.reload(each.after)
            shown.append(each.shows(broker.node))
            if shown != list(each.values) or not answer["applied"] or answer["needs_restart"]:
                wrong[key] = shown, answer["applied"], answer["needs_restart"]
        assert wrong == {}

    asyncio.run(run())


@run_async
async def test_settings_that_need_a_restart_stay_and_are_named_until_then(tmp_path: Path) -> None:
    broker = Reloading(tmp_path, "[broker]\nport = 1\nmax_queues = 5\n")
    changed = '[broker]\nport = 2\nmax_queues = 6\n[kafka.client]\n"sasl.password" = "hush"\n'
    for _ in range(2):
        answer = await broker.reload(changed)
        assert answer["needs_restart"] == [
            {"setting": "broker.port", "before": 1, "after": 2},
            {"setting": 'kafka.client."sasl.password"', "before": None, "after": "********"},
        ]
    assert answer["applied"] == []
    assert "broker.max_queues" in answer["unchanged"]
    settings = broker.node.settings
    assert (settings.broker.port, settings.broker.max_queues, settings.kafka.client) == (1, 6, {})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[broker]\nmax_queues = 6\nidle_timeout_s = -1\n", "broker.idle_timeout_s"),
        ('[broker]\nmax_queues = 6\nusers_file = "missing"\n', "missing: No such file"),
        ('[broker]\nmax_queues = 6\n[broker.tls]\ncertificate = "missing"\n', "broker.tls.certificate: missing"),
        ('[broker]\nmax_queues = 6\n[audit]\nfile = "missing/audit"\n', "audit.file"),
        ('[broker]\nmax_queues = 0\n', "broker.max_queues"),
        ("[broker]\nmax_queues = 6\ntransaction_timeout_s = inf\n", "broker.transaction_timeout_s"),
        ("[broker]\nmax_queues = 6\nidle_timeout_s = 1e7\n", "broker.idle_timeout_s"),
        ('[broker]\nmax_queues = 1\n[[queue]]\nname = "one"\n[[queue]]\nname = "two"\n', "[[queue]] names 2 new queues"),
    ],
)  # fmt: skip
def test_settings_with_an_error_change_nothing(text: str, error: str, tmp_path: Path) -> None:
    async def run() -> None:
        broker = Reloading(tmp_path, "[broker]\nmax_queues = 5\n")
        before = broker.node.settings
        with pytest.raises(BasculeError) as found:
            await broker.reload(text)
        assert error in str(found.value)
        assert broker.node.settings is before
        assert broker.node.engine.policy.queues_max == 5

    asyncio.run(run())


@run_async
async def test_settings_that_protect_only_after_a_restart_are_refused(tmp_path: Path) -> None:
    exposed = '[broker]\nhost = "0.0.0.0"\nallow_insecure = true\nallow_anonymous = true\n'
    broker = Reloading(tmp_path, exposed)
    with pytest.raises(InvalidInput, match=r"valid only after a restart.*broker\.host"):
        await broker.reload("# nothing\n")
    assert broker.node.settings.broker.allow_insecure


@run_async
async def test_new_file_of_users_and_new_path_of_the_audit_are_used(tmp_path: Path) -> None:
    broker = Reloading(tmp_path, f'[broker]\nusers = {{ann = "hush"}}\n[audit]\nfile = "{tmp_path}/one"\n')
    await broker.reload(f'[broker]\nusers = {{ann = "hush"}}\n[audit]\nfile = "{tmp_path}/two"\n')
    broker.node.audit.record("login", "", who="ann", peer="")
    assert [(tmp_path / each).read_text().count("login") for each in ("one", "two")] == [0, 1]
    await broker.reload('[broker]\nusers = {ann = "hush"}\n')
    broker.node.audit.record("login", "", who="ann", peer="")
    assert (tmp_path / "two").read_text().count("login") == 1
    last = [json.loads((tmp_path / each).read_text().splitlines()[-1]) for each in ("one", "two")]
    assert [(each["action"], each["who"], each["applied"], each["next_file"]) for each in last] == [
        ("config/reload", "test", "audit.file", f"{tmp_path}/two"), ("config/reload", "test", "audit.file", ""),
    ]  # fmt: skip


@run_async
async def test_new_connections_use_new_certificates_and_lose_tls_with_the_setting(tmp_path: Path) -> None:
    signer = Signer(tmp_path, "authority")
    one, two = signer.issue("one"), signer.issue("two")
    text = '[broker]\nallow_anonymous = true\n[broker.tls]\ncertificate = "{0.certificate}"\nkey = "{0.key}"\n'
    broker = Reloading(tmp_path, text.format(one))
    first = broker.node.tls.broker.context()
    assert isinstance(first, ssl.SSLContext)
    await broker.reload(text.format(two))
    assert broker.node.tls.broker.context() not in (None, first)
    assert broker.node.tls.broker.certificates[0].file == two.certificate
    broker.node.tls.close()
    await broker.reload("[broker]\nallow_anonymous = true\n")
    assert broker.node.tls.broker.context() is None


@run_async
async def test_sighup_reloads_and_reports_to_the_service_manager_unless_it_means_a_closed_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    broker = Reloading(tmp_path, "[broker]\nmax_queues = 5\n")
    reload = broker.node.reload
    assert reload is not None
    monkeypatch.setattr(os, "isatty", lambda _: True)
    reload.on_hangup()
    assert signal.getsignal(signal.SIGHUP) is before
    monkeypatch.setattr(os, "isatty", lambda _: False)
    with notify_socket(tmp_path / "notify") as manager:
        broker.node.service_manager = ServiceManager(manager.environ)
        reload.on_hangup()
        for text, queues in (("[broker]\nmax_queues = 6\n", 6), ("[broker]\nmax_queues = -1\n", 6)):
            broker.write(text)
            os.kill(os.getpid(), signal.SIGHUP)
            said: list[list[str]] = []
            async with asyncio.timeout(SOON_S):
                while ["READY=1"] not in said:
                    await asyncio.sleep(0.01)
                    said += manager.messages()
            assert said[0][0] == "RELOADING=1"
            assert said[0][1].startswith("MONOTONIC_USEC=")
            assert broker.node.settings.broker.max_queues == queues
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


# -- clients that are connected ------------------------------------------------------------------------------------------


@run_async
async def test_connection_ends_when_its_link_is_not_allowed_any_more() -> None:
    served = Served()
    permissions = CurrentPermissions(AllowAll())
    served.permissions = permissions
    keeps, loses = Client(served, "keeps"), Client(served, "loses")
    keeps.consumer("open")
    loses.producer("closed")
    permissions.now = AccessRules([AccessRule("open", {each: frozenset("*") for each in Permission})], UserRoles({}))
    served.client_turns.in_slices(end_without_permission(served.connections, permissions), served.dispatch)
    served.settle(keeps, loses)
    assert not keeps.events_of(ConnectionClosed)
    assert "no permission 'send' on address 'closed'" in str(loses.events_of(ConnectionClosed)[0])
    link = keeps.consumer("closed", name="later")
    assert [event.link for event in keeps.events_of(Detached)] == [link]


@run_async
async def test_producer_that_waits_for_room_goes_on_when_the_limit_of_the_queue_is_raised() -> None:
    served = Served()
    engine = served.engine
    served.fill("q", 3)
    policy = engine.policy
    change_policy(engine, _limited(policy, 3))
    client = Client(served)
    producer = client.producer("q")
    assert producer.credit == 0
    change_policy(engine, _limited(policy, 10))
    served.dispatch()
    served.settle(client)
    assert producer.credit == 7


@run_async
async def test_consumer_gets_more_messages_when_the_limit_of_prefetched_ones_is_raised() -> None:
    served = Served()
    engine = served.engine
    served.fill("q", 5)
    policy = engine.policy
    change_policy(engine, replace(policy, defaults=replace(policy.defaults, prefetch_max=2)))
    client = Client(served)
    consumer = client.consumer("q", 10)
    assert client.received(consumer) == 2
    change_policy(engine, replace(policy, defaults=replace(policy.defaults, prefetch_max=4)))
    served.dispatch()
    served.settle(client)
    assert client.received(consumer) == 4


def _limited(policy: Any, count: int) -> Any:
    return replace(policy, defaults=replace(policy.defaults, max_messages=count))
