"""Hostile peers over TCP, WebSocket and HTTP to a real broker: another client is served all the time, and nothing is left behind.

`make slow` runs more seeds. BASCULE_HOSTILE_SEEDS is their number for each class, BASCULE_HOSTILE_FIRST the first of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bascule.core.log import get_log
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import free_port
from tests.scenarios.hostile_sockets import ATTACKS, REQUESTS, attack, http, request
from tests.support.canary import Canary, canary
from tests.support.speed import SLOWNESS
from tests.support.stalls import LONGEST_S_MAX, longest_turn_s
from tests.support.system import System, wait_for
from tests.support.usage import main_thread_cpu_s, memory_mib

log = get_log(__name__)

#: Processor time of the broker in one round trip of the canary. It stands for a gap of at most one second on a dedicated machine.
GAP_BROKER_S: Final = 1.0 * SLOWNESS
#: Time of a round trip by the clock, on a machine that also runs other tests.
GAP_S: Final = 20.0 * SLOWNESS
#: Memory that the second half of the attacks may leave behind: what the first half needs once is not counted.
LEFT_MIB_MAX: Final = 24
HTTP_REQUESTS: Final = 60


class Attacked:
    """A broker with a listener for each kind of attack, and a canary."""

    def __init__(self, system: System, websocket_port: int, bird: Canary) -> None:
        self.system = system
        self.websocket_port = websocket_port
        self.bird = bird
        self.costs_s: dict[str, float] = {}

    def attack(self, name: str, seed: int, *, websocket: bool) -> None:
        """Attack once, and note what it has cost the broker."""
        port = self.websocket_port if websocket else self.system.port
        self.measure(f"{name}{' over WebSocket' if websocket else ''}", lambda: asyncio.run(attack(name, port, seed, websocket=websocket)))

    def measure(self, name: str, act: object) -> None:
        before_s = main_thread_cpu_s(self.system.broker.pid)
        assert callable(act)
        act()
        self.costs_s[name] = max(self.costs_s.get(name, 0.0), main_thread_cpu_s(self.system.broker.pid) - before_s)

    def ask_all(self, seed: int) -> None:
        """Send requests to the admin server and to the listener for WebSockets."""
        for number in range(seed, seed + HTTP_REQUESTS):
            self.measure("http", lambda number=number: asyncio.run(request(self.system.admin_port, http(number))))
        for data in REQUESTS:
            self.measure("upgrade", lambda data=data: asyncio.run(request(self.websocket_port, data)))

    def clean(self) -> None:
        """Wait until all attackers are gone, and delete the queues that they have made."""
        wait_for(lambda: self.system.status()["gauges"]["connections"] <= 1, "the attackers to be gone")
        for queue in self.system.status()["queues"]:
            if queue["name"] != self.system.prefix:
                self.system.act("queues/delete", name=queue["name"], force=True)


@contextmanager
def attacked(kafka: EmbeddedKafka, directory: Path, prefix: str) -> Iterator[Attacked]:
    """Yield a broker to attack. Check at the end that the canary has seen no gap and the broker no fault."""
    websocket_port = free_port()
    config = f"[broker]\nsession_timeout_s = 60\n[broker.websocket]\nport = {websocket_port}\n"
    with System(kafka.bootstrap, directory, prefix=prefix, config=config) as system, canary(system, prefix) as bird:
        epoch, before = system.status()["gauges"]["epoch"], system.metrics()
        there = Attacked(system, websocket_port, bird)
        yield there
        round_trips = bird.look()
        wait_for(lambda: bird.look() > round_trips + 5, "the canary after the attacks")
        status, turn_s = system.status(), longest_turn_s(system.metrics(), before)
        log.info(
            "attacked", costs_s={name: round(cost_s, 2) for name, cost_s in there.costs_s.items()}, turn_s=turn_s, gap_s=max(bird.times_s)
        )
        assert status["gauges"]["epoch"] == epoch
        assert {name: count for name, count in status["counters"].items() if name.endswith("_errors") and count} == {}
        assert "Traceback" not in system.broker.said()
        assert max(bird.broker_s) < GAP_BROKER_S
        assert max(bird.times_s) < GAP_S
        assert 0 < turn_s <= LONGEST_S_MAX


def test_hostile_peers_over_sockets_disturb_no_other_client(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    with attacked(kafka, tmp_path, topic_prefix) as there:
        for name in ATTACKS:
            for websocket in (False, True):
                there.attack(name, 1, websocket=websocket)
        there.ask_all(0)
        there.clean()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_hostile_peers_over_sockets_disturb_no_other_client_and_leave_nothing_behind(
    kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str
) -> None:
    first, seeds = int(os.environ.get("BASCULE_HOSTILE_FIRST", "2")), int(os.environ.get("BASCULE_HOSTILE_SEEDS", "40"))
    held_mib: list[float] = []
    with attacked(kafka, tmp_path, topic_prefix) as there:
        for half in range(2):
            for seed in range(first + half * seeds // 2, first + (half + 1) * seeds // 2):
                for name in ATTACKS:
                    there.attack(name, seed, websocket=bool(seed % 2))
                there.ask_all(seed * HTTP_REQUESTS)
            there.clean()
            held_mib.append(memory_mib(there.system.broker.pid))
        log.info("left", mib=held_mib)
        assert held_mib[1] - held_mib[0] < LEFT_MIB_MAX
