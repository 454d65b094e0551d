"""The life of a broker process: it performs the effects of :mod:`bascule.broker.node` with asyncio, a listener and Kafka's election."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bascule.broker.node import ElectionOutcome, NodeProtocol
from bascule.broker.retention import OwnersRetention
from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log
from bascule.core.masking import PropertyMask
from bascule.embedded.process import PortInUse
from bascule.kafka.control import ControlTopics
from bascule.kafka.election import Election
from bascule.kafka.members import broker_members
from bascule.kafka.redriving import RedriveTopics
from bascule.server import topics
from bascule.server.admin import AdminServer
from bascule.server.admin_logins import admin_access
from bascule.server.administrator import Administrator
from bascule.server.broker_metrics import broker_metrics_export
from bascule.server.brokers import BrokerPages
from bascule.server.descriptors import RESERVED, RESERVED_FOR_ADMIN
from bascule.server.effects import LoopEffects
from bascule.server.epoch import Epoch, JournalPlace
from bascule.server.flow import NodeFlowEnds
from bascule.server.listener import Listener, Take, bind
from bascule.server.pipelines import PipelinePages, wall_ms
from bascule.server.reload_pages import ReloadPages
from bascule.server.stalls import StallWatch
from bascule.server.status_metrics import SendTimesCollector
from bascule.server.takeover import Takeover
from bascule.server.websocket import websocket_server
from bascule.threads.lasting import end_process, lasting_task
from bascule.threads.process_metrics import ProcessMetrics

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from bascule.config import Settings
    from bascule.server.node import Node
from bascule.server.pipeline_offsets import OffsetPlanning

log = get_log(__name__)

#: How often lines of the audit that could not be written are tried again.
AUDIT_POLL_S: Final = 0.5
#: What a listener is for, by its name.
_LISTENS_FOR: Final = {"amqp": "AMQP", "websocket": "AMQP over WebSocket"}


class BrokerLife(LoopEffects):
    """The effects of the life of a broker process. ``on_ready`` and ``on_standby`` receive its AMQP and admin port."""

    def __init__(self, node: Node, on_ready: Callable[[int, int], None], on_standby: Callable[[int, int], None]) -> None:
        super().__init__("broker-life")
        self.protocol = NodeProtocol(self)
        self._node = node
        self._on_ready = on_ready
        self._on_standby = on_standby
        self._stopping: asyncio.Future[BasculeError | None] = self._loop.create_future()
        self._elected = asyncio.Event()
        self._watch: topics.TopicWatch | None = None
        self._admin_port = 0
        self._port = node.settings.broker.port
        self._websocket_port = node.settings.broker.websocket.port
        self._election: Election | None = None
        self._takeover: Takeover | None = None
        # of the current epoch:
        self._listeners: list[Listener] = []
        self._epoch: Epoch | None = None
        self._ended: asyncio.Future[BasculeError] = self._loop.create_future()
        self._room: topics.JournalCapacity | None = None
        self._pipelines = ControlTopics(node.kafka, node.settings.journal_topics)

    @property
    def _settings(self) -> Settings:
        """Return the settings of this moment; those that the life of the process depends on stay until a restart."""
        return self._node.settings

    @property
    def topic_trouble(self) -> str:
        """Return why stored data is not safe; "" if it is."""
        return self._watch.trouble if self._watch is not None else ""

    @property
    def watches_elected(self) -> bool:
        """Return whether this broker is a standby with a connection to the elected broker."""
        return self._takeover is not None and self._takeover.watches_elected

    @property
    def refused_connections(self) -> int:
        """Return the number of connections that were refused because file descriptors were short."""
        return sum(listener.refused for listener in self._listeners)

    async def run(self) -> None:
        """Run until told to stop. Raises BasculeError."""
        self._node.uncaught.install(self._loop)
        reports = lasting_task(self._report(), "service-manager", on_failure=end_process)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, None)
        await self._loop.run_in_executor(None, self._ensure_topics)
        watch = self._watch = topics.TopicWatch(self._node.kafka, self._settings)
        polls = lasting_task(self._poll_audit(), "audit", on_failure=end_process)
        collectors = self._collectors()
        admin = self._node.admin = self._admin_server(collectors)
        admin.start()
        export = broker_metrics_export(Administrator(self._node), collectors)
        self._admin_port = admin.port
        takeover = self._takeover = self._watch_elected()
        election = self._election = self._stand_for_election()
        try:
            await self.protocol.run()
        finally:
            await self._loop.run_in_executor(None, partial(election.close, resign=True))
            crash.point("handover.resigned")
            if takeover is not None:
                await takeover.close()
            await admin.stop()
            if export is not None:
                await self._loop.run_in_executor(None, export.close)
            await self._loop.run_in_executor(None, self._pipelines.close)
            watch.close()
            self._node.close_spill()
            polls.cancel()
            reports.cancel()
            await self._loop.run_in_executor(None, self._node.audit.close)

    async def _poll_audit(self) -> None:
        while True:
            more = self._node.audit.poll()
            await asyncio.sleep(0 if more else AUDIT_POLL_S)

    async def _report(self) -> None:
        """Report to the service manager, as long as the loop makes progress."""
        manager = self._node.service_manager
        while manager.present:
            manager.alive(self._node.condition)
            await asyncio.sleep(manager.interval_s)

    def _stop(self, error: BasculeError | None) -> None:
        """Stop the process; only the first reason counts."""
        if not self._stopping.done():
            self._node.service_manager.stopping()
            self._stopping.set_result(error)

    def _ensure_topics(self) -> None:
        settings = self._settings
        for finding in topics.ensure(self._node.kafka, settings.journal_topics, settings.journal, int(settings.broker.max_message_bytes)):
            log.warning("weak topic setting", finding=finding)

    def _collectors(self) -> tuple[Collector, ...]:
        """Return the metrics that are not in the status of the broker."""
        stalls = StallWatch(loading=lambda: self._node.loaded_engine is None)
        stalls.start()
        return stalls, SendTimesCollector(self._node.send_times), self._node.tls, ProcessMetrics()

    def _admin_server(self, collectors: tuple[Collector, ...]) -> AdminServer:
        admin = self._settings.admin
        access = admin_access(self._settings, self._node.users, self._node.logins, self._node.audit)
        if not access.restricted:
            log.info("every process of this machine may use the admin server, because neither users nor admin.token are configured")
        names = self._settings.journal_topics
        pipelines = PipelinePages(
            self._pipelines, self._settings, self._node.audit, wall_ms, self._planning, self._redriving,
            lambda: PropertyMask(self._node.settings.admin.masked_properties), NodeFlowEnds(self._node),
            self._node.lists_user,
        )  # fmt: skip
        return AdminServer(
            Administrator(self._node),
            host=admin.host,
            port=admin.port,
            access=access,
            tls=self._node.tls.admin.context,
            collectors=collectors,
            pipelines=pipelines,
            reload=None if self._node.reload is None else ReloadPages(self._node.reload, self._node.audit),
            brokers=BrokerPages(partial(broker_members, self._node.kafka, names.brokers, names.journal), self._settings.instance),
        )

    def _planning(self) -> OffsetPlanning:
        # The pipelines are an extra of the package that a broker needs for nothing else.
        from bascule.pipelines.offset_plans import OffsetPlans

        return OffsetPlans(self._node.kafka, self._settings.journal_topics)

    def _redriving(self) -> RedriveTopics:
        return RedriveTopics(self._node.kafka, self._settings.journal_topics)

    # -- election ----------------------------------------------------------------------------------------------------

    def _stand_for_election(self) -> Election:
        names = self._settings.journal_topics
        return Election(
            self._node.kafka, names.brokers, names.journal, self._settings.instance, self._settings.broker.session_timeout_s,
            on_change=partial(self._on_loop, self._election_changed),
            on_doubt=partial(self._on_loop, self._election_in_doubt),
            on_error=partial(self._on_loop, self._stop),
        )  # fmt: skip

    def _watch_elected(self) -> Takeover | None:
        if not self._settings.broker.takeover_after_s:
            return None
        takeover = Takeover(self._node.kafka, self._settings, lambda: self._election.member if self._election is not None else "")
        takeover.start()
        return takeover

    def _on_loop(self, action: Callable[[Any], None], argument: Any) -> None:
        """Call an action on the loop. Called by the thread of the election."""
        with suppress(RuntimeError):  # the loop may be closed: an election that Kafka does not end in time outlives it
            self._loop.call_soon_threadsafe(action, argument)

    def _election_changed(self, elected: bool) -> None:
        if self._takeover is not None:
            self._takeover.election_changed(elected)
        if elected:
            crash.point("election.won")
            self._elected.set()
        else:
            self._elected.clear()
            self.protocol.election_lost()

    def _election_in_doubt(self, why: str) -> None:
        engine = self._node.loaded_engine
        self.protocol.election_in_doubt(why, engine is not None and engine.stalled is not None)

    # -- effects: see bascule.broker.node.NodeEffects ------------------------------------------------------------------

    def stopping(self) -> bool:
        """Return whether the process was told to stop. Raises BasculeError."""
        if not self._stopping.done():
            return False
        error = self._stopping.result()
        if error is not None:
            raise error
        return True

    async def listen(self) -> None:
        """Listen on the ports for clients. Raises PortInUse."""
        handshakes = self._node.handshakes
        amqp = await self._listen(self._port, handshakes.take, "amqp", "choose another with --amqp-port")
        self._port = amqp.port
        self._listeners = [amqp]
        if self._websocket_port is not None:
            take = partial(handshakes.take, serve=websocket_server(self._node))
            try:
                listener = await self._listen(self._websocket_port, take, "websocket", "choose another as broker.websocket.port")
            except PortInUse:
                amqp.close()
                raise
            self._listeners.append(listener)
            self._websocket_port = listener.port
            broker = self._settings.broker
            log.info(
                "listening for AMQP over WebSocket", url=f"{broker.url_scheme.replace('amqp', 'amqpws')}://{broker.host}:{listener.port}"
            )
        handshakes.on_room = self._room_for_another

    async def _listen(self, port: int, take: Take, name: str, otherwise: str) -> Listener:
        host = self._settings.broker.host
        try:
            sockets = await self._loop.run_in_executor(None, bind, host, port)
        except OSError as error:
            why = error.strerror
            raise PortInUse(f"port {port} for {_LISTENS_FOR[name]} on {host} cannot be used ({why}); {otherwise}") from error
        return Listener(sockets, take, name=name, reserved=RESERVED + RESERVED_FOR_ADMIN)

    def _room_for_another(self) -> None:
        for listener in self._listeners:
            listener.room()

    def stop_listening(self) -> None:
        """Accept no more clients."""
        for listener in self._listeners:
            listener.close()
        self._node.handshakes.abort_all()

    def begin_epoch(self) -> None:
        """Make the next epoch."""
        journal, ended = self._settings.journal, self._loop.create_future()
        place = JournalPlace(
            self._node.kafka,
            self._settings.journal_topics,
            bridge=self._settings.bridge.id,
            append_timeout_s=journal.append_timeout_s,
            snapshot_records=journal.snapshot_records,
            session_timeout_s=self._settings.broker.session_timeout_s,
            retention=OwnersRetention(journal.retention_s, journal.retention_bytes),
            pinned_bytes_max=int(journal.pinned_bytes),
            scratch_directory=Path(self._settings.embedded.data_dir),
            pipelines=frozenset(each.name for each in (*self._settings.divert, *self._settings.ingress)),
            replication_factor=journal.replication_factor,
            min_insync_replicas=journal.min_insync_replicas,
        )
        self._ended, self._room, self._epoch = ended, None, None
        self._epoch = self._node.begin(place, ended.set_result, self.protocol.stalled)

    @property
    def _present(self) -> Epoch:
        if self._epoch is None:
            raise Unavailable("no epoch has begun")
        return self._epoch

    async def close_epoch(self) -> None:
        """Release the epoch."""
        await self.stop_intake()
        await self._present.close()

    async def election(self, timeout_s: float | None) -> ElectionOutcome:
        """Wait for the first of the possible outcomes of the election."""
        elected, loader = asyncio.ensure_future(self._elected.wait()), self._present.following.loader
        waiting: list[asyncio.Future[Any]] = [elected, self._stopping, loader]
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            elected.cancel()
        if not done:
            return ElectionOutcome.TIMEOUT
        if self._stopping.done():
            return ElectionOutcome.STOPPING
        return ElectionOutcome.LOAD_ENDED if loader.done() else ElectionOutcome.ELECTED

    def is_elected(self) -> bool:
        """Return whether the broker is elected, as far as is known."""
        return self._elected.is_set()

    async def confirmed(self) -> bool:
        """Ask Kafka whether the broker is elected."""
        return self._election is not None and await self._loop.run_in_executor(None, self._election.confirm)

    async def load_ended(self) -> None:
        """Raise the error that ended the load, if any."""
        await self._present.following.loader

    async def start_epoch(self) -> None:
        """Start the epoch with the sizes for which the journal has room. Raises BasculeError."""
        wanted, topic = int(self._settings.broker.max_message_bytes), self._settings.journal_topics.journal
        room = self._room = await self._loop.run_in_executor(None, topics.room, self._node.kafka, topic, wanted)
        self._node.limit(room)
        await self._present.start()
        self._node.loaded(room)

    def lose_election(self) -> None:
        """End the epoch after a lost election."""
        self._present.lose_election()

    async def serve(self) -> None:
        """Accept clients."""
        self._node.interruptions.serving()
        for listener in self._listeners:
            listener.start()

    async def epoch_end(self) -> BasculeError | None:
        """Return why the epoch has ended, or None when told to stop."""
        waiting: list[asyncio.Future[Any]] = [self._stopping, self._ended]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return self._ended.result() if self._ended.done() else None

    def flush(self) -> None:
        """Append the gathered entries."""
        self._present.flush()

    async def stop_intake(self) -> None:
        """Read no more records from the ingress topic."""
        tail, self._node.tail = self._node.tail, None
        if tail is not None:
            await self._loop.run_in_executor(None, tail.close)

    def close_clients(self, error: BasculeError | None) -> None:
        """Close every connection."""
        self._node.close_clients(error)

    async def clients_left(self, timeout_s: float) -> None:
        """Wait until all that closed clients held is released. Raises TimeoutError."""
        await asyncio.wait_for(self._node.container_ids.nobody_leaves.wait(), timeout_s)

    async def hand_over(self, timeout_s: float) -> None:
        """Make a snapshot for the next broker. Raises TimeoutError."""
        housekeeping = self._present.housekeeping
        if housekeeping is not None:
            await asyncio.wait_for(housekeeping.hand_over(), timeout_s)

    def check_room(self) -> None:
        """Check that the records in flight fit into the journal. Raises UnsafeTopic."""
        if self._room is not None:
            self._room.check(batch.size_bytes for batch in self._present.engine.journaling.in_flight)

    async def pause(self, delay_s: float) -> None:
        """Wait; return early if told to stop."""
        await asyncio.wait([self._stopping], timeout=delay_s)

    def standing_by(self) -> None:
        """Report that the broker is a standby."""
        self._node.service_manager.ready(self._node.condition)
        self._on_standby(self._port, self._admin_port)

    def ready(self) -> None:
        """Report that the broker is ready."""
        self._node.service_manager.ready(self._node.condition)
        self._on_ready(self._port, self._admin_port)
