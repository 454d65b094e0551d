"""The processes of a soak. Each is restarted after its end, whatever the cause, and resumed after its suspension."""

from __future__ import annotations

import http.client
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

from bascule.core.errors import BasculeError, Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Topics
from tests.soak.plan import DIVERTS, INGRESSES, Plan
from tests.support.system import FAILOVER, PYTHON_FAILOVER, Command, Late, System, descendants, wait_for

#: Time after which a part that ended by itself is restarted.
AGAIN_S = 0.5
TICK_S = 0.05
#: Interval between checks, each of which costs the brokers an answer.
LOOK_S = 0.25
#: A broker answers in milliseconds, unless it is starting or suspended.
LOOK_TIMEOUT_S = 1.0
HEAL_S = 600.0
#: For a Java client that loses its connection again while it recovers (docs/guides/jms-clients.md): longer than any fault makes all brokers
#: unavailable, because a request that waits longer fails.
REQUEST_TIMEOUT_MS: Final = 180_000
#: Errors that end a broker or driver by design.
NO_KAFKA: Final = "Kafka was away while it started"


class OwnEnd(NamedTuple):
    """A part that ended without being killed: when (s since the epoch), the end of its log, and an excuse if it has one."""

    at_s: float
    part: str
    last_words: str
    excuse: str = ""

    def __str__(self) -> str:
        return f"{self.part} ended by itself: {self.last_words}"


class Process(Protocol):
    """A part that is started and ended."""

    @property
    def running(self) -> bool:
        """Return whether it runs."""

    def launch(self) -> None:
        """Start it. Raises BasculeError."""

    def kill(self) -> None:
        """End it by SIGKILL."""


class KafkaProcess(EmbeddedKafka):
    """Kafka, with the interface of the other parts."""

    def launch(self) -> None:
        """Start it, and return when it serves. Raises BasculeError."""
        self.start()


@dataclass(slots=True)
class Part:
    """A process, and the pending actions on it."""

    name: str
    process: Process
    pid: Callable[[], int | None]
    due_s: float | None = None  # when it is to be restarted
    expected: bool = False  # an end was requested
    down_s: float = 0.0  # after an expected end
    launched_s: float = field(default_factory=time.monotonic)

    def expect_end(self, down_s: float) -> None:
        """Note that it will end, unless it has ended before."""
        self.expected = self.process.running
        self.down_s = down_s

    def tend(self, now_s: float) -> bool:
        """Restart it when that is due. Return whether it has just ended by itself."""
        if self.process.running:
            self.due_s = None
            return False
        if self.due_s is None:
            alone, self.expected = not self.expected, False
            self.due_s = now_s + (AGAIN_S if alone else self.down_s)
            return alone
        if now_s >= self.due_s:
            self.due_s, self.launched_s = None, now_s
            try:
                self.process.launch()
            except BasculeError:
                self.due_s = now_s + AGAIN_S
        return False


@dataclass(slots=True)
class Pause:
    """Processes that are suspended until a time."""

    part: str
    pids: list[int]
    until_s: float

    def end(self) -> None:
        """Resume the processes that still exist."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@dataclass
class Site:
    """Kafka, the brokers and the driver of one bridge, in a directory of their own. Enter it in a thread that stays alive."""

    plan: Plan
    directory: Path
    parts: dict[str, Part] = field(default_factory=dict)
    pauses: list[Pause] = field(default_factory=list)
    own_ends: list[OwnEnd] = field(default_factory=list)
    without_kafka_s: float = float("-inf")  # when Kafka was last unavailable

    def __enter__(self) -> Self:
        """Start everything. Raises BasculeError."""
        with ExitStack() as stack:
            self.kafka = KafkaProcess(self.directory / "kafka")
            stack.callback(self.kafka.stop)
            self.kafka.start()
            topics = Topics({"bootstrap.servers": self.kafka.bootstrap})
            for name in (*DIVERTS, *INGRESSES.values()):
                # Kafka's timestamp is the time when a record was stored, whenever its message was sent.
                topics.create(self.plan.topic(name), 1, {"message.timestamp.type": "LogAppendTime"})
            self.systems = [
                System(self.kafka.bootstrap, self.directory / f"broker-{number}", prefix=self.plan.prefix, config=self.plan.config)
                for number in range(self.plan.brokers)
            ]
            self._add("kafka", self.kafka, lambda: self.kafka.pid)
            for number, system in enumerate(self.systems):
                stack.callback(system.broker.stop)
                self._add(f"broker-{number}", system.broker, lambda system=system: _pid(system.broker))  # type: ignore[misc]
                system.broker.launch()
            self.driver = self.systems[0].pipelines
            stack.callback(self.driver.stop)
            self._add("driver", self.driver, lambda: _pid(self.driver))
            self.driver.launch()
            wait_for(self._started, "brokers and driver to serve", HEAL_S)
            stack.callback(self.resume)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self._stack.close()

    def _add(self, name: str, process: Process, pid: Callable[[], int | None]) -> None:
        self.parts[name] = Part(name, process, pid)

    @property
    def bootstrap(self) -> str:
        """Return the address of Kafka."""
        return self.kafka.bootstrap

    @property
    def url(self) -> str:
        """Return the failover URL of all brokers for Qpid JMS."""
        return f"{FAILOVER.format(self._urls)}&jms.requestTimeout={REQUEST_TIMEOUT_MS}"

    @property
    def python_url(self) -> str:
        """Return the failover URL of all brokers for the Python client."""
        return PYTHON_FAILOVER.format(self._urls)

    @property
    def _urls(self) -> str:
        return ",".join(system.url for system in self.systems)

    # -- how it stands -----------------------------------------------------------------------------------------------------------------

    def paused(self, part: str) -> bool:
        """Return whether a part is suspended."""
        return any(pause.part == part for pause in self.pauses)

    def up(self, part: str) -> bool:
        """Return whether a part runs and is not suspended."""
        return self.parts[part].process.running and not self.paused(part)

    def active(self) -> str | None:
        """Return the serving broker."""
        return next((name for name, system in self._brokers() if system.serves(LOOK_TIMEOUT_S)), None)

    def standby(self) -> str | None:
        """Return a standby broker."""
        return next((name for name, system in self._brokers() if system.stands_by(LOOK_TIMEOUT_S)), None)

    def depths(self) -> dict[str, int] | None:
        """Return the messages in each queue (waiting, delivered or delayed) from the serving broker; None while no broker serves."""
        for _, system in self._brokers():
            try:
                status = system.status(LOOK_TIMEOUT_S)
            except (OSError, http.client.HTTPException):
                continue
            if status["serving"]:
                return {queue["name"]: queue["messages"] + queue["delivering"] + queue["delayed"] for queue in status["queues"]}
        return None

    def connections(self) -> dict[str, Any]:
        """Return the clients of each broker that answers."""
        found: dict[str, Any] = {}
        for name, system in self._brokers():
            with suppress(OSError, http.client.HTTPException):
                found[name] = system.ask("connections")
        return found

    def metrics(self) -> Iterator[tuple[str, str]]:
        """Return the metrics of each broker that answers."""
        for name, system in self._brokers():
            with suppress(OSError, http.client.HTTPException):
                yield name, system.metrics(LOOK_TIMEOUT_S)

    def _brokers(self) -> Iterator[tuple[str, System]]:
        return ((name, system) for number, system in enumerate(self.systems) if self.up(name := f"broker-{number}"))

    def driver_ready(self) -> bool:
        """Return whether the pipelines run."""
        return self.up("driver") and "ready pipelines=" in self.driver.said()

    def workers(self) -> list[int]:
        """Return the process ids of Spark's Python workers that are not suspended."""
        driver = self.parts["driver"].pid()
        if driver is None or not self.up("driver"):
            return []
        still = {pid for pause in self.pauses for pid in pause.pids}
        found = descendants(driver).items()
        return sorted(pid for pid, command in found if "pyspark" in command and "java" not in command and pid not in still)

    def driver_pids(self) -> list[int]:
        """Return the process ids of the driver and its JVM."""
        pid = self.parts["driver"].pid() or 0
        return [pid, *(child for child, command in descendants(pid).items() if "java" in command)] if pid else []

    def well(self) -> bool:
        """Return whether all parts work."""
        if self.pauses or not all(part.process.running and not part.expected for part in self.parts.values()):
            return False
        return self.active() is not None and (len(self.systems) == 1 or self.standby() is not None) and self.driver_ready()

    def _started(self) -> bool:
        """Return whether all parts work for the first time. Raises Unavailable if a part has ended instead."""
        for name, part in self.parts.items():
            if not part.process.running:
                raise Unavailable(f"{name} ended at its start; its log is in {self.directory}")
        return self.well()

    # -- what is done to it ------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do the due actions."""
        now_s = time.monotonic()
        for pause in [pause for pause in self.pauses if now_s >= pause.until_s]:
            self.pauses.remove(pause)
            pause.end()
        if not self.up("kafka"):
            self.without_kafka_s = now_s
        for part in self.parts.values():
            if part.tend(now_s):
                self.own_ends.append(self._own_end(part))

    def _own_end(self, part: Part) -> OwnEnd:
        """Return how a part ended.

        A part that has not served yet may end because Kafka is unavailable; a part that has served must survive it.
        """
        said = part.process.said().strip().splitlines() if isinstance(part.process, Command) else []
        words = next((line for line in reversed(said) if line.startswith("error: ")), said[-1] if said else "")
        starting = part.name != "kafka" and not any(line.startswith("ready ") for line in said)
        return OwnEnd(time.time(), part.name, words, NO_KAFKA if starting and self.without_kafka_s >= part.launched_s else "")

    def wait(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Return whether a condition became true in time. Meanwhile, do the due actions."""
        begun_s = time.monotonic()
        looked_s = float("-inf")
        while True:
            self.tick()
            now_s = time.monotonic()
            if now_s - looked_s >= LOOK_S:
                if condition():
                    return True
                looked_s = now_s
            if now_s - begun_s > timeout_s:
                return False
            time.sleep(TICK_S)

    def kill(self, name: str, down_s: float) -> None:
        """End a part by SIGKILL; it is restarted after a while."""
        part = self.parts[name]
        part.expect_end(down_s)
        part.process.kill()

    def terminate(self, name: str, down_s: float) -> None:
        """Ask a part to end in order."""
        part = self.parts[name]
        part.expect_end(down_s)
        if (pid := part.pid()) is not None:
            os.kill(pid, signal.SIGTERM)

    def pause(self, part: str, pids: list[int], duration_s: float) -> None:
        """Suspend processes."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self.pauses.append(Pause(part, pids, time.monotonic() + duration_s))

    def resume(self) -> None:
        """Resume all suspended processes."""
        while self.pauses:
            self.pauses.pop().end()

    def heal(self) -> None:
        """Inject no more faults, and return when all parts work. Raises Late."""
        self.resume()
        if not self.wait(self.well, HEAL_S):
            raise Late(f"not well after {HEAL_S:g} s: active {self.active()}, standby {self.standby()}, driver ready {self.driver_ready()}")


def _pid(command: Command) -> int | None:
    return command.pid if command.running else None


def log_uniform(chance: random.Random, low: float, high: float) -> float:
    """Return a number between two, of each order of magnitude with equal probability."""
    return float(low * (high / low) ** chance.random())
