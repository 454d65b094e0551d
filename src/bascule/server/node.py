"""A broker process: topics, epochs, listener, admin server, and the clients in between."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.sasl import ExternalServer, SaslServer
from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.administration import dead_letter
from bascule.broker.delivery import Counters
from bascule.broker.engine import Engine
from bascule.broker.matching import wants
from bascule.config import Settings
from bascule.core.errors import BasculeError, Unavailable
from bascule.embedded.process import PortInUse
from bascule.jms.selector import compile_selector
from bascule.kafka.admin import Topics
from bascule.server.actions import act, queue_named
from bascule.server.admin import AdminServer
from bascule.server.connection import GOING_DOWN, ClientConnection
from bascule.server.epoch import IN_FLIGHT_BYTES_MAX, Epoch, JournalPlace, SteppedDown
from bascule.server.ingress import IngressTail
from bascule.server.logins import sasl_mechanisms
from bascule.server.policies import policy_of
from bascule.server.spill import SpillFiles
from bascule.server.status import (
    ConnectionStatus,
    QueueDetail,
    Status,
    SubscriptionStatus,
    connection_status,
    queue_detail,
    status_of,
    subscription_status,
    sum_of,
)
from bascule.server.tls import amqp_tls, server_context

log = logging.getLogger(__name__)

#: The loop and the Kafka client's thread hand the interpreter to each other for every record: the default of 5 ms would be felt.
SWITCH_INTERVAL_S = 0.0002
#: Messages that wait are many objects without cycles: looking through them every 700 allocations would cost a tenth of the time.
GC_THRESHOLDS = (50_000, 20, 50)
#: Between two tries to start an epoch while Kafka is away.
RETRY_S = 1.0
#: A record holds a whole transaction, and its largest message.
JOURNAL_RECORD_BYTES = 70 << 20
PARTITION = 0

_FOREVER = {"retention.ms": "-1", "retention.bytes": "-1"}
_SAFE = {"unclean.leader.election.enable": "false", "max.message.bytes": str(JOURNAL_RECORD_BYTES)}
#: Settings of Bascule's own topics that its promises rest on.
TOPIC_SETTINGS: dict[str, dict[str, str]] = {
    "journal": {"cleanup.policy": "delete", **_FOREVER, **_SAFE},
    "ingress": {"cleanup.policy": "delete", **_FOREVER, **_SAFE},
    "snapshots": {"cleanup.policy": "compact", **_SAFE},
}


def kafka_client(settings: Settings) -> dict[str, Any]:
    """The settings of every Kafka client of this process."""
    return {"bootstrap.servers": settings.kafka.bootstrap_servers, **settings.kafka.client}


def diverts_of(settings: Settings) -> Diverts:
    """What the broker must know of the configured diverts."""
    enabled = [divert for divert in settings.divert if divert.enabled]
    exclusive = tuple(
        ExclusiveDivert(divert.name, divert.from_address, partial(wants, compile_selector(divert.selector)), divert.from_kafka)
        for divert in enabled
        if divert.exclusive
    )
    return Diverts(exclusive, tuple(divert.from_address for divert in enabled), settings.journal.replayable)


class Node:
    """One broker: an epoch after another, and the clients of the present one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.container_id = f"bascule-{settings.bridge.id}-{uuid.uuid4().hex[:8]}"
        self.max_message_bytes = int(settings.broker.max_message_bytes)
        self.idle_timeout_s = settings.broker.idle_timeout_s
        self.failover = _failover_list(settings.broker.failover, settings.broker.url_scheme)
        self.connections: dict[ClientConnection, None] = {}
        self.touched: dict[ClientConnection, None] = {}
        self.held_back: dict[ClientConnection, None] = {}  # not read from while the broker is congested
        self.reason = "starting"
        self._kafka = kafka_client(settings)
        self._diverts = diverts_of(settings)
        self._policy = policy_of(settings)
        self._tls = amqp_tls(settings.broker.tls)
        self._spill: SpillFiles | None = None
        self._mechanisms = sasl_mechanisms(settings.broker)
        self._ended: asyncio.Future[Any] | None = None
        self._epoch: Epoch | None = None
        self._earlier = Counters()  # of epochs that have ended
        self._tail: IngressTail | None = None

    # -- what connections need ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the present epoch."""
        assert self._epoch is not None
        return self._epoch.engine

    @property
    def congested(self) -> bool:
        """So much is on its way into the journal that nothing more is read from clients."""
        return self.engine.journaling.in_flight_bytes > IN_FLIGHT_BYTES_MAX

    def sasl(self, certified: str | None) -> SaslServer:
        """A fresh exchange with a client whose certificate names it, if it has shown one."""
        if certified is None:
            return SaslServer(self._mechanisms)
        return SaslServer({"EXTERNAL": partial(ExternalServer, certified), **self._mechanisms})

    def send_output(self) -> None:
        """Write what all connections have to say."""
        while self.touched:
            connection, _ = self.touched.popitem()
            connection.send_output()

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[int, int], None]) -> None:
        """Serve until SIGTERM or SIGINT. Raises BasculeError when it cannot start, or must not go on."""
        loop = asyncio.get_running_loop()
        stopping: asyncio.Future[Any] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _resolve, stopping, None)
        await loop.run_in_executor(None, self._ensure_topics)
        admin = self._admin_server()
        listener: asyncio.Server | None = None
        try:
            while not stopping.done():
                try:
                    await self._start_epoch()
                except Unavailable as error:
                    if listener is None:
                        raise
                    self.reason = str(error)
                    await self._close_epoch()
                    await asyncio.wait([stopping], timeout=RETRY_S)
                    continue
                if listener is None:
                    listener = await self._listen()
                    admin.start()
                    on_ready(listener.sockets[0].getsockname()[1], admin.port)
                assert self._ended is not None
                self.reason = ""
                await asyncio.wait([stopping, self._ended], return_when=asyncio.FIRST_COMPLETED)
                await self._leave_epoch(self._ended.result() if self._ended.done() else None)
        finally:
            if listener is not None:
                listener.close()
            await admin.stop()
            if self._spill is not None:
                self._spill.close()

    def _admin_server(self) -> AdminServer:
        admin = self.settings.admin
        token = admin.token.get_secret_value() if admin.token is not None else None
        return AdminServer(self, host=admin.host, port=admin.port, token=token, tls=server_context(admin.tls, "admin.tls"))

    def _ensure_topics(self) -> None:
        topics = Topics(self._kafka)
        topics.reach()
        journal = self.settings.journal
        for name, config in TOPIC_SETTINGS.items():
            topics.create(
                journal.topic(name),  # type: ignore[arg-type]
                1,
                {**config, "min.insync.replicas": str(journal.min_insync_replicas)},
                replication_factor=journal.replication_factor,
            )

    async def _listen(self) -> asyncio.Server:
        host, port = self.settings.broker.host, self.settings.broker.port
        try:
            return await asyncio.get_running_loop().create_server(partial(ClientConnection, self), host, port, ssl=self._tls, backlog=1024)
        except OSError as error:
            raise PortInUse(f"port {port} for AMQP on {host} cannot be used ({error.strerror}); choose another by --amqp-port") from error

    async def _start_epoch(self) -> None:
        journal = self.settings.journal
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()
        self._ended = ended
        place = JournalPlace(
            self._kafka, journal.topic("journal"), journal.topic("snapshots"), PARTITION, journal.append_timeout_s, journal.snapshot_records
        )
        self._earlier = self.counters
        if self._spill is not None:
            self._spill.close()
        self._spill = SpillFiles(Path(self.settings.embedded.data_dir) / "spill")
        epoch = self._epoch = Epoch(
            place, self._policy, self._diverts, self._spill, int(self.settings.broker.memory_bytes),
            on_ended=partial(_resolve, ended),
            on_confirmed=self._confirmed, on_stalled=self._stalled,
        )  # fmt: skip
        # What a load leaves behind lives long: the collector need not look at it again and again.
        gc.disable()
        try:
            await epoch.start()
        finally:
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            gc.enable()
            _return_memory()
        self._tail = IngressTail(self._kafka, journal.topic("ingress"), PARTITION, epoch.engine, loop)

    async def _leave_epoch(self, error: BasculeError | None) -> None:
        self.reason = str(error) if error is not None else "stopping"
        if error is not None:
            log.error("the epoch ends: %s", error)
        if self._tail is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._tail.close)
        for connection in list(self.connections):
            connection.close(GOING_DOWN if error is None else AmqpError(CONNECTION_FORCED, str(error)))
        assert self._epoch is not None
        if error is None:
            self._epoch.flush()
            await self._epoch.snapshot()
        await self._close_epoch()
        if isinstance(error, SteppedDown):
            raise error

    async def _close_epoch(self) -> None:
        if self._epoch is not None:
            await self._epoch.close()

    def _confirmed(self) -> None:
        self.reason = ""
        if self.held_back and not self.congested:
            held_back, self.held_back = self.held_back, {}
            for connection in held_back:
                connection.read_on()
        self.send_output()

    def _stalled(self, error: BasculeError) -> None:
        """Kafka does not answer: nobody must hang on us. A failover client comes back, and its repeated sends are recognised."""
        self.reason = str(error)
        log.error("%s", error)
        for connection in list(self.connections):
            connection.close(AmqpError(CONNECTION_FORCED, str(error)))

    # -- for the admin server ----------------------------------------------------------------------------------------

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine of the present epoch, if there is one; it may be loading."""
        return None if self._epoch is None else self._epoch.engine

    @property
    def serving(self) -> bool:
        """Whether clients are served."""
        epoch = self._epoch
        return epoch is not None and not epoch.ended and epoch.engine.stalled is None and self.reason == ""

    @property
    def trouble(self) -> str:
        """Why clients are not served, or ingresses are not read; "" while all is well."""
        return self.reason or (self._tail.failure if self._tail is not None else "")

    @property
    def counters(self) -> Counters:
        """What has happened since the process started, over all epochs."""
        engine = self.loaded_engine
        return self._earlier if engine is None else sum_of(self._earlier, engine.counters)

    def status(self) -> Status:
        """How the broker stands now."""
        return status_of(self)

    def queue(self, name: str) -> QueueDetail:
        """One queue. Raises UnknownAddress, Unavailable."""
        return queue_detail(queue_named(self._administered(), name))

    def subscriptions(self) -> list[SubscriptionStatus]:
        """The subscriptions of topics."""
        engine = self.loaded_engine
        return [] if engine is None else [subscription_status(queue) for queue in engine.addresses.subscriptions.values()]

    def clients(self) -> list[ConnectionStatus]:
        """The client connections."""
        return [connection_status(connection) for connection in self.connections]

    def dead_letters(self, queue: str, count: int) -> list[dict[str, Any]]:
        """The first so many of a queue, "" for the configured one. Raises UnknownAddress, Unavailable."""
        engine = self._administered()
        found = queue_named(engine, queue or self.settings.broker.dead_letter_address)
        return [dead_letter(engine, message) for message in islice(found.waiting(), count)]

    async def act(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do one of ACTIONS. Raises BasculeError."""
        return await act(self, action, arguments)

    def _administered(self) -> Engine:
        engine = self.loaded_engine
        if engine is None or not self.serving:
            raise Unavailable(self.trouble or "the broker is starting")
        return engine


def _return_memory() -> None:
    """Give the system back what a load used in passing: a quarter of a broker with 100,000 messages. Only glibc can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    """The first result counts."""
    if not future.done():
        future.set_result(result)


def _failover_list(addresses: Iterable[str], scheme: str) -> list[dict[Any, Any]]:
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        found.append({"network-host": host, "hostname": host, "port": int(port), "scheme": scheme})
    return found


def run_broker(settings: Settings, *, on_ready: Callable[[int, int], None]) -> None:
    """Run a broker until it is told to stop. ``on_ready(amqp_port, admin_port)`` is called once. Raises BasculeError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True)
    node = Node(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(node.run(on_ready))
