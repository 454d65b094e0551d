"""The Java, Python and Kafka clients of a soak: started at the beginning, and ended when everything has arrived."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from bascule.client import Message, connect
from bascule.core.errors import BasculeError, Unavailable
from tests.soak.clients import CALL_S, ID, Client, Guarded, Recorder, destination, failures_of, python_clients
from tests.soak.plan import DIVERTS, INGRESSES, JAVA_CLIENTS
from tests.soak.records import Application, Record, Topic, produce
from tests.soak.site import Site
from tests.support.history import Divert, Operation, read_history
from tests.support.storm import Storm

#: Within this time everything must arrive in an undisturbed system. A Java client that the last fault interrupts during its recovery is
#: blocked for REQUEST_TIMEOUT_MS, and then reconnects.
ARRIVAL_S = 480.0
OPEN_S = 120.0
CLOSE_S = 10.0
THE_END = "the-end"
#: Errors from which failover protects a Java client, as Storm.java names them.
FAILED: Final = frozenset({"failed", "session-closed", "consumer-closed", "producer-closed", "reopen"})
#: Properties of a last message: each selector of a divert matches it.
END_PROPERTIES: Final[Mapping[str, Mapping[str, Any]]] = {"parts": {"n": 9}, "regional": {"n": 0, "region": "EU"}}


class Load:
    """All clients. Enter it in a thread that stays alive."""

    def __init__(self, site: Site, directory: Path) -> None:
        self._site = site
        self._directory = directory
        self._recorder = Recorder(directory / "python.history")
        self._clients = python_clients(site.plan, site.python_url, self._recorder)
        self._application = Application(site.bootstrap, site.plan)
        self._threads: list[Guarded] = [*self._clients.values(), self._application]
        self._storm: Storm | None = None
        self._standing: list[str] = []
        #: Where messages were left at the end, and which.
        self.left: dict[str, list[str]] = {}
        self.topics = {name: Topic(site.bootstrap, site.plan.topic(name)) for name in (*DIVERTS, *INGRESSES.values())}

    def __enter__(self) -> Self:
        """Start the clients, receivers first, so that subscriptions exist before the messages; except a receiver that must not get all."""
        with ExitStack() as stack:
            stack.callback(self._abandon)
            clients = self._clients.values()
            self._start([client for client in clients if not client.sends and not client.late])
            plan = self._site.plan
            self._storm = stack.enter_context(
                Storm(self._site.url, self._directory, *JAVA_CLIENTS, rate=plan.rate, batch=plan.batch, quiet_s=plan.quiet_s)
            )
            self._start([client for client in clients if client.sends])
            self._start([client for client in clients if client.late])
            self._application.start()
            stack.callback(self._application.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the clients that are still running."""
        self._stack.close()

    @staticmethod
    def _start(clients: list[Client]) -> None:
        for client in clients:
            client.start()
        for client in clients:
            if not client.open.wait(OPEN_S):
                raise Unavailable(f"client {client.name} is not connected after {OPEN_S:g} s")

    def _abandon(self) -> None:
        for client in self._clients.values():
            client.stop()
        for client in self._clients.values():
            if client.is_alive():
                client.join(CLOSE_S)
        self._recorder.close()

    @property
    def failures(self) -> list[str]:
        """Return errors that no client should ever see."""
        return [*failures_of(self._threads), *self._standing, *(failures_in(self._storm.history_file) if self._storm else ())]

    # -- the end -----------------------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Stop the senders, let everything arrive, and stop the receivers.

        What does not arrive in time is in ``left``. A receiver must not decide by itself that no more messages will come: a broker may be
        suspended for longer than any receiver should wait.
        """
        site = self._site
        self._application.stop()
        ends = {to: f"{name}-end" for to, name in INGRESSES.items()}
        for to, name in INGRESSES.items():
            produce(site.bootstrap, site.plan.topic(name), [ends[to]])
        assert self._storm is not None
        files = (self._storm.history_file, self._recorder.file)
        for to, id in ends.items():
            self._await(lambda id=id: any(f'"{id}"'.encode() in file.read_bytes() for file in files), f"the ingress to {to}", id)  # type: ignore[misc]
        self._end_clients(sends=True)
        if self._ends(self._storm.stop_senders, "the Java clients that send"):
            self._end_queues()
            self._ends(self._storm.stop, "the Java clients that receive")
        self._end_clients(sends=False)
        self._end_queues()
        self._end_diverts()

    def _ends(self, stop: Callable[[], object], which: str) -> bool:
        """Stop Java clients; kill all of them if they do not end."""
        assert self._storm is not None
        ending = Guarded(name="java", target=stop, daemon=True)
        self._threads.append(ending)
        ending.start()
        ended = self._await(lambda: not ending.is_alive(), which, "?")
        if not ended:
            self._standing.append(f"{which} have not ended: {self._storm.standing()}\n{self._site.connections()}")
            self._storm.kill()
        return ended

    def _await(self, condition: Callable[[], object], where: str, id: str) -> bool:
        came = self._site.wait(condition, ARRIVAL_S)
        if not came:
            self.left[where] = [id]
        return came

    def _end_clients(self, *, sends: bool) -> None:
        ending = [client for client in self._clients.values() if client.sends == sends]
        for client in ending:
            client.stop()
        self._await(lambda: not any(client.is_alive() for client in ending), f"clients that {'send' if sends else 'receive'}", "?")

    def _end_queues(self) -> None:
        """Report each message that is left in a queue as stuck."""
        if self._site.wait(lambda: self._filled() == {}, ARRIVAL_S):
            return
        filled = self._filled()
        if filled is None:
            self.left["the queues"] = ["?"]
        for queue, depth in (filled or {}).items():
            self.left[queue] = [f"message {number}" for number in range(1, depth + 1)]

    def _filled(self) -> dict[str, int] | None:
        """Return queues that are not empty; None while no broker answers."""
        depths = self._site.depths()
        return None if depths is None else {name: depth for name, depth in depths.items() if depth}

    def _end_diverts(self) -> None:
        """Return whether a last message has come through each divert.

        Records keep their order, so everything before it has arrived, too.
        """
        try:
            with connect(self._site.python_url, timeout_s=CALL_S) as context:
                for name, divert in DIVERTS.items():
                    properties = {ID: THE_END, **END_PROPERTIES.get(name, {})}
                    context.send(destination(divert.source), Message(THE_END, properties=properties))
        except BasculeError as error:
            self.left["all"] = [f"{THE_END}: {error}"]
            return
        for name in DIVERTS:
            topic = self.topics[name]
            self._await(lambda topic=topic: topic.has(THE_END), f"the divert to {topic.name}", THE_END)  # type: ignore[misc]
        for name in INGRESSES.values():
            self.topics[name].read()

    # -- what was seen -----------------------------------------------------------------------------------------------------------------

    def operations(self) -> list[Operation]:
        """Return what the clients did."""
        assert self._storm is not None
        return read_history(self._storm.history_file, self._recorder.file)

    def records(self, name: str) -> list[Record]:
        """Return the records of a topic, without the last one."""
        return [record for record in self.topics[name].records if record.id != THE_END]

    def diverted(self) -> Mapping[str, Divert]:
        """Return what the diverts wrote."""
        plan = self._site.plan
        return {plan.topic(name): divert._replace(ids=[record.id for record in self.records(name)]) for name, divert in DIVERTS.items()}

    def ingested(self) -> Mapping[str, list[str]]:
        """Return the committed records that the ingresses had to carry, by destination."""
        return {to: [record.id for record in self.records(name)] for to, name in INGRESSES.items()}


def failures_in(history: Path) -> list[str]:
    """Return the errors that reached the clients of a history, by name."""
    lines = map(json.loads, history.read_text().splitlines())
    return [f"{line['client']}: {line['event']}: {line.get('error', '')}" for line in lines if line.get("event") in FAILED]
