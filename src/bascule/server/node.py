"""A broker process: topics, epochs, listener, admin server, and the clients in between."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.sasl import ExternalServer, SaslServer
from bascule.broker.delivery import Counters
from bascule.broker.engine import Engine
from bascule.broker.errors import JournalUnavailable
from bascule.config import Settings
from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log
from bascule.core.permissions import Permissions, Unrestricted
from bascule.embedded.process import PortInUse
from bascule.kafka.election import Election
from bascule.server import topics
from bascule.server.admin import AdminServer
from bascule.server.administrator import Administrator
from bascule.server.connection import GOING_DOWN, ClientConnection
from bascule.server.epoch import IN_FLIGHT_BYTES_MAX, AppendOffsetUnknown, Epoch, JournalPlace, SteppedDown
from bascule.server.ingress import IngressTail
from bascule.server.interruptions import Interruptions
from bascule.server.logins import sasl_mechanisms
from bascule.server.pins import Pin
from bascule.server.policies import diverts_of, policy_of
from bascule.server.spill import SpillFiles
from bascule.server.status import (
    sum_of,
)
from bascule.server.tls import amqp_tls, server_context
from bascule.server.uncaught import Uncaught

log = get_log(__name__)

#: The loop and the Kafka client's thread hand the interpreter to each other for every record: the default of 5 ms would be felt.
SWITCH_INTERVAL_S = 0.0002
#: Messages that wait are many objects without cycles: looking through them every 700 allocations would cost a tenth of the time.
GC_THRESHOLDS = (50_000, 20, 50)
#: Between two tries to start an epoch while Kafka is away.
RETRY_S = 1.0
#: Without an election for so long a broker says that it stands by: one that is alone is elected sooner.
STANDBY_AFTER_S = 4.0
#: A hand-over waits so long for its snapshot. One of a million messages takes a few seconds to store.
HANDOVER_SNAPSHOT_S = 6.0


def kafka_client(settings: Settings) -> dict[str, Any]:
    """The settings of every Kafka client of this process."""
    return {"bootstrap.servers": settings.kafka.bootstrap_servers, **settings.kafka.client}


class Node:
    """One broker: an epoch after another, and the clients of the present one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.container_id = f"bascule-{settings.bridge.id}-{uuid.uuid4().hex[:8]}"
        self.max_message_bytes = int(settings.broker.max_message_bytes)  # and no more than the journal has room for, in each epoch
        self.idle_timeout_s = settings.broker.idle_timeout_s
        self.failover = _failover_list(settings.broker.failover, settings.broker.url_scheme)
        self.connections: dict[ClientConnection, None] = {}
        self.touched: dict[ClientConnection, None] = {}
        self.held_back: dict[ClientConnection, None] = {}  # not read from while the broker is congested
        self.interruptions = Interruptions()
        self.permissions: Permissions = Unrestricted()
        self.reason = "starting"
        self._kafka = kafka_client(settings)
        self._diverts = diverts_of(settings)
        self._policy = policy_of(settings)
        self._tls = amqp_tls(settings.broker.tls)
        self._spill: SpillFiles | None = None
        self._mechanisms = sasl_mechanisms(settings.broker)
        self._elected = asyncio.Event()
        self._has_served = False
        self._stopping: asyncio.Future[Any]
        self._election: Election
        self._ended: asyncio.Future[Any] | None = None
        self._epoch: Epoch | None = None
        self._earlier = Counters()  # of epochs that have ended
        self.tail: IngressTail | None = None
        self._watch: topics.Watch | None = None

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

    def awake(self) -> bool:
        """Whether the present epoch may go on: see Epoch."""
        return self._epoch is not None and self._epoch.awake()

    def sasl(self, certified: str | None) -> SaslServer:
        """A fresh exchange with a client whose certificate names it, if it has shown one."""
        if certified is None:
            return SaslServer(self._mechanisms)
        return SaslServer({"EXTERNAL": partial(ExternalServer, certified), **self._mechanisms})

    def dispatch(self) -> None:
        """Messages that have become free go to whoever may have them, if this broker may still give them."""
        if self.awake():
            self.engine.dispatch()
        self.send_output()

    def send_output(self) -> None:
        """Write what all connections have to say."""
        while self.touched:
            connection, _ = self.touched.popitem()
            connection.send_output()

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[int, int], None], on_standby: Callable[[int, int], None]) -> None:
        """Stand by, and serve while elected, until SIGTERM or SIGINT. Raises BasculeError when it cannot start, or must not go on."""
        loop = asyncio.get_running_loop()
        Uncaught().install(loop)
        self._stopping = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _resolve, self._stopping, None)
        await loop.run_in_executor(None, self._ensure_topics)
        watch = self._watch = topics.Watch(self._kafka, self.settings)
        port = self.settings.broker.port
        admin = self._admin_server()
        admin.start()
        self._election = self._stand_for_election()
        try:
            while not self._stopping.done():
                # The port is this broker's from now on; clients are refused until it serves, and turn to another.
                listener = await self._bind(port)
                port = listener.sockets[0].getsockname()[1]
                try:
                    await self._one_epoch(listener, partial(on_ready, port, admin.port), partial(on_standby, port, admin.port))
                finally:
                    listener.close()
        finally:
            await loop.run_in_executor(None, partial(self._election.close, resign=True))
            crash.point("handover.resigned")
            await admin.stop()
            watch.close()
            if self._spill is not None:
                self._spill.close()

    async def _one_epoch(self, listener: asyncio.Server, on_ready: Callable[[], None], on_standby: Callable[[], None]) -> None:
        """Follow the journal until elected, then serve until the epoch ends or another broker is elected."""
        epoch = self._next_epoch()
        try:
            if not await self._wait_for_election(epoch, on_standby) or not await self._confirmed_by_kafka():
                return
            crash.point("election.confirmed")
            try:
                room = await self._start_epoch(epoch)
            except (Unavailable, JournalUnavailable) as error:
                if not self._has_served and not isinstance(error, AppendOffsetUnknown):
                    raise
                log.error("no epoch can be started: %s", error)
                self.reason = str(error)
                await asyncio.wait([self._stopping], timeout=RETRY_S)
                return
            self.interruptions.serving()
            await listener.start_serving()
            self.reason = ""
            self._has_served = True
            if not self._elected.is_set():  # lost while it was loading; that is told once only
                epoch.end(SteppedDown("another broker has been elected"))
            on_ready()
            assert self._ended is not None
            await asyncio.wait([self._stopping, self._ended], return_when=asyncio.FIRST_COMPLETED)
            listener.close()
            why = self._ended.result() if self._ended.done() else None
            await self._leave_epoch(why)
            if why is not None:
                room.check(batch.size_bytes for batch in epoch.engine.journaling.in_flight)
        finally:
            await self._close_epoch()

    def _stand_for_election(self) -> Election:
        loop = asyncio.get_running_loop()
        names = self.settings.journal_topics

        def changed(elected: bool) -> None:
            loop.call_soon_threadsafe(self._election_changed, elected)

        def doubted(why: str) -> None:
            loop.call_soon_threadsafe(self._election_in_doubt, why)

        def failed(error: BasculeError) -> None:
            loop.call_soon_threadsafe(_resolve, self._stopping, error)

        return Election(
            self._kafka, names.brokers, names.journal, self.settings.instance,
            self.settings.broker.session_timeout_s, on_change=changed, on_doubt=doubted, on_error=failed,
        )  # fmt: skip

    def _election_changed(self, elected: bool) -> None:
        if elected:
            crash.point("election.won")
            self._elected.set()
            return
        self._elected.clear()
        if self._epoch is not None and self._has_served:
            self._epoch.end(SteppedDown("another broker has been elected"))

    def _election_in_doubt(self, why: str) -> None:
        """Another broker may serve, and nothing must be delivered twice; "" when that is over."""
        if self.loaded_engine is None:
            return
        if why:
            self._stalled(Unavailable(why))
        elif self.loaded_engine.stalled is None:
            self.reason = ""

    async def _wait_for_election(self, epoch: Epoch, on_standby: Callable[[], None]) -> bool:
        """Whether this broker is to serve; not when it is told to stop, or cannot follow any more. Raises BasculeError."""
        elected = asyncio.ensure_future(self._elected.wait())
        waiting = [elected, self._stopping, epoch.following.loader]
        try:
            done, _ = await asyncio.wait(waiting, timeout=STANDBY_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.reason = "standing by"
                on_standby()
                log.info("standing by: another broker serves, or Kafka has not decided yet")
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            elected.cancel()
        if self._stopping.done():
            error = self._stopping.result()
            if error is not None:
                raise error
            return False
        if epoch.following.loader.done():
            await self._cannot_follow(epoch)
            return False
        return True

    async def _cannot_follow(self, epoch: Epoch) -> None:
        try:
            await epoch.following.loader
        except Unavailable as error:
            if not self._has_served:
                raise
            self.reason = str(error)
            await asyncio.wait([self._stopping], timeout=RETRY_S)

    async def _confirmed_by_kafka(self) -> bool:
        """Whether Kafka says now that this broker is elected: what was so before a pause may be so no more."""
        confirmed = await asyncio.get_running_loop().run_in_executor(None, self._election.confirm)
        if not confirmed:
            await asyncio.wait([self._stopping], timeout=RETRY_S)
        return confirmed

    def _admin_server(self) -> AdminServer:
        admin = self.settings.admin
        token = admin.token.get_secret_value() if admin.token is not None else None
        return AdminServer(Administrator(self), host=admin.host, port=admin.port, token=token, tls=server_context(admin.tls, "admin.tls"))

    def _ensure_topics(self) -> None:
        settings = self.settings
        for finding in topics.ensure(self._kafka, settings.journal_topics, settings.journal, int(settings.broker.max_message_bytes)):
            log.warning("%s", finding)

    async def _bind(self, port: int) -> asyncio.Server:
        host = self.settings.broker.host
        try:
            return await asyncio.get_running_loop().create_server(
                partial(ClientConnection, self), host, port, ssl=self._tls, backlog=1024, start_serving=False
            )
        except OSError as error:
            raise PortInUse(f"port {port} for AMQP on {host} cannot be used ({error.strerror}); choose another by --amqp-port") from error

    def _next_epoch(self) -> Epoch:
        journal = self.settings.journal
        self._ended = asyncio.get_running_loop().create_future()
        place = JournalPlace(
            self._kafka,
            self.settings.journal_topics,
            bridge=self.settings.bridge.id,
            append_timeout_s=journal.append_timeout_s,
            snapshot_records=journal.snapshot_records,
            session_timeout_s=self.settings.broker.session_timeout_s,
            retention_s=journal.retention_s,
            pinned_bytes_max=int(journal.pinned_bytes),
        )
        self._earlier = self.counters
        if self._spill is not None:
            self._spill.close()
        self._spill = SpillFiles(Path(self.settings.embedded.data_dir) / "spill")
        self._epoch = Epoch(
            place, self._policy, self._diverts, self._spill, int(self.settings.broker.memory_bytes),
            on_ended=partial(_resolve, self._ended),
            on_confirmed=self._confirmed, on_ticked=self.send_output, on_stalled=self._stalled,
        )  # fmt: skip
        return self._epoch

    async def _start_epoch(self, epoch: Epoch) -> topics.Room:
        """Returns what the journal has room for: what clients are told holds for this epoch."""
        loop = asyncio.get_running_loop()
        wanted = int(self.settings.broker.max_message_bytes)
        room = await loop.run_in_executor(None, topics.room, self._kafka, self.settings.journal_topics.journal, wanted)
        self.max_message_bytes = min(wanted, room.content_bytes)
        if room.shortage is not None:
            log.error("%s, and start anew: until then messages of more than %d bytes are refused", room.shortage, self.max_message_bytes)
        await epoch.start()
        largest = min(self._policy.transaction_bytes_max, room.content_bytes)
        epoch.engine.local_transactions.bytes_max = largest
        # What a load leaves behind lives long: the collector need not look at it again and again.
        gc.freeze()
        _return_memory()
        names = self.settings.journal_topics
        self.tail = IngressTail(self._kafka, names.ingress, names.partition, epoch.engine, loop)
        return room

    async def _leave_epoch(self, error: BasculeError | None) -> None:
        self.reason = str(error) if error is not None else "stopping"
        if error is not None:
            log.error("the epoch ends: %s", error)
        if self.tail is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.tail.close)
            self.tail = None
        for connection in list(self.connections):
            connection.close(GOING_DOWN if error is None else AmqpError(CONNECTION_FORCED, str(error)))
        assert self._epoch is not None
        if error is None:
            self._epoch.flush()
            assert self._epoch.housekeeping is not None
            crash.point("handover.before")
            try:
                await asyncio.wait_for(self._epoch.housekeeping.hand_over(), HANDOVER_SNAPSHOT_S)
            except TimeoutError:
                log.warning("no snapshot for the next broker, which has more of the journal to read: Kafka has not stored it in time")
            crash.point("handover.snapshot")

    async def _close_epoch(self) -> None:
        if self._epoch is not None:
            await self._epoch.close()

    def _confirmed(self) -> None:
        if self.loaded_engine is not None:
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
        """The engine of the present epoch, if there is one and its state is whole."""
        return self._epoch.engine if self._epoch is not None and self._epoch.loaded else None

    @property
    def serving(self) -> bool:
        """Whether clients are served."""
        epoch = self._epoch
        return epoch is not None and epoch.loaded and not epoch.ended and epoch.engine.stalled is None and self.reason == ""

    @property
    def trouble(self) -> str:
        """Why clients are not served, ingresses are not read, or what is stored is not safe; "" while all is well."""
        return self.reason or (self.tail.failure if self.tail else "") or (self._watch.trouble if self._watch else "")

    @property
    def counters(self) -> Counters:
        """What has happened since the process started, over all epochs."""
        engine = self.loaded_engine
        return self._earlier if engine is None else sum_of(self._earlier, engine.counters)

    @property
    def pins(self) -> list[Pin]:
        """What the journal is kept for, as of the last snapshot."""
        housekeeping = self._epoch.housekeeping if self._epoch is not None else None
        return housekeeping.pins if housekeeping is not None else []

    @property
    def journal_offset(self) -> int:
        """How far the journal is read, or written."""
        return self._epoch.journal_offset if self._epoch is not None else 0

    @property
    def foreign_records(self) -> int:
        """Records that somebody else wrote into the journal, as far as it was read."""
        return self._epoch.following.foreign if self._epoch is not None else 0


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


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One broker at a time uses a data directory: its spill files are there, and its name in elections comes from it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "broker.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"another broker uses the data directory {directory}; give each its own by embedded.data_dir") from None
        yield


def run_broker(settings: Settings, *, on_ready: Callable[[int, int], None], on_standby: Callable[[int, int], None]) -> None:
    """Run a broker until it is told to stop; tells its AMQP and admin port when it serves, and when it stands by. Raises BasculeError."""
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _alone_in(Path(settings.embedded.data_dir)):
        runner.run(Node(settings).run(on_ready, on_standby))
