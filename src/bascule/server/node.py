"""A broker process: topics, epochs, listener, admin server, and the clients in between."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.sasl import SaslServer
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.counters import Counters
from bascule.broker.engine import Engine
from bascule.broker.node import STANDING_BY
from bascule.broker.policy_change import change_policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.send_times import SendTimes
from bascule.broker.states import NodeState
from bascule.config import Settings
from bascule.config.pipeline_checks import ANONYMOUS_USER
from bascule.config.settings import Broker as BrokerSettings
from bascule.core.access import CurrentPermissions
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import configure, configured, get_log
from bascule.core.roles import UserRoles
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.embedded.service_manager import NO_SERVICE_MANAGER, ServiceManager
from bascule.server import descriptors, topics
from bascule.server.admin import AdminServer
from bascule.server.audit import REFUSE, audit_of
from bascule.server.client_turns import ClientTurns, ConnectionOutput
from bascule.server.connection import ClientConnection
from bascule.server.containers import ContainerIds
from bascule.server.divert_users import DivertUsers
from bascule.server.epoch import Epoch, JournalPlace, is_congested
from bascule.server.garbage import GarbageCollection
from bascule.server.handshakes import HandshakeLimits, Handshakes
from bascule.server.housekeeping import Housekeeping
from bascule.server.ingress import IngressTail
from bascule.server.ingress_refusals import IngressRefusals
from bascule.server.interruptions import Interruptions
from bascule.server.life import BrokerLife
from bascule.server.listener_tls import TlsPeer
from bascule.server.logins import LoginChecks, sasl_mechanisms
from bascule.server.memory import MemoryWatch, PeerCaches, partial_budget
from bascule.server.pieces import DELIVERIES_PER_PIECE, FRAMES_PER_PIECE_BYTES, INPUT_STEPS_PER_PIECE
from bascule.server.policies import diverts_of, permissions_of, policy_of, user_limits_of
from bascule.server.reload import NextSettings, ReloadSource, SettingsReload, end_token_logins, end_without_permission, report_refused_queue
from bascule.server.spill import SpillFiles
from bascule.server.status import BrokerRole, sum_of
from bascule.server.tls_watch import TlsWatch
from bascule.server.tokens import TOKEN_LIMITS, TokenLogins
from bascule.server.uncaught import ErrorLog, UncaughtErrorHandler
from bascule.server.usage import CONNECTIONS, Usage, UsageLimits
from bascule.server.user_directory import EndedLogins, UserDirectory
from bascule.server.users_watch import UsersWatch, end_connections
from bascule.tracing.provider import process_tracing

log = get_log(__name__)

#: The loop and other threads, such as the tail of an ingress, pass the interpreter to each other; the default of 5 ms would be too slow.
SWITCH_INTERVAL_S = 0.0002
#: What clients are told when the broker stops; a failover client connects to another broker.
GOING_DOWN = AmqpError(CONNECTION_FORCED, "the broker is shutting down")


def kafka_client(settings: Settings) -> dict[str, Any]:
    """Return the settings of every Kafka client of this process."""
    return {"bootstrap.servers": settings.kafka.bootstrap_servers, **settings.kafka.client}


class Node:
    """One broker: its epochs, one after the other, and the clients of the current epoch."""

    def __init__(
        self, settings: Settings, service_manager: ServiceManager = NO_SERVICE_MANAGER, reload_source: ReloadSource | None = None
    ) -> None:
        self.settings = settings
        self.service_manager = service_manager
        self.reload = None if reload_source is None else SettingsReload(self, reload_source)
        self.admin: AdminServer | None = None
        self._users_watch: UsersWatch | None = None
        self.container_id = f"bascule-{settings.bridge.id}-{uuid.uuid4().hex[:8]}"
        self.max_message_bytes = int(settings.broker.max_message_bytes)  # limited in each epoch by the size that the journal accepts
        self.connections: dict[ClientConnection, None] = {}
        self.container_ids = ContainerIds()
        self.output = ConnectionOutput()
        self.client_turns = ClientTurns()
        self.held_back: dict[ClientConnection, None] = {}  # connections that are not read while the broker is congested
        self.interruptions = Interruptions()
        self.uncaught = UncaughtErrorHandler()
        self.errors = ErrorContainment(ErrorLog().write)
        self.users = UserDirectory(settings)
        self.permissions = CurrentPermissions(permissions_of(settings, self.users.roles))
        if not settings.permission:
            log.info("every client may do everything, because no permission is configured")
        self.kafka = kafka_client(settings)
        self.audit = audit_of(settings.audit, self.kafka)
        self._ingress_refusals = IngressRefusals(self.audit)
        self._divert_users = DivertUsers(settings.divert, self.permissions, self.audit)
        self.tracing = process_tracing("bascule-broker")
        self._diverts = diverts_of(settings)
        self._policy = policy_of(settings, self.users.roles)
        self.tls = TlsWatch(settings)
        self.spill: SpillFiles | None = None
        #: Who the holder of a token is; None if no tokens are accepted.
        self.tokens = TokenLogins(settings.broker.oidc, settings.broker.handshake_timeout_s) if settings.broker.oidc.enabled else None
        self.logins = LoginChecks(self.tokens)
        self.usage = Usage(usage_limits(settings, self.users.roles), self.users.roles)
        self.usage.room.account = lambda: None if (engine := self.loaded_engine) is None else engine.memory
        self._prepare_connections()
        self.handshakes = Handshakes(handshake_limits(settings.broker), self.tls.broker.context, partial(ClientConnection, self))
        self.handshakes.audit = self.audit
        self._life: BrokerLife | None = None
        self._epoch: Epoch | None = None
        self.partials = partial_budget(int(settings.broker.memory_bytes))
        self._memory_watch: MemoryWatch | None = None
        self.garbage = GarbageCollection()
        self.peer_caches = PeerCaches(lambda: self.loaded_engine, self._clients_gone)
        self._earlier = Counters()  # of ended epochs
        self.send_times = SendTimes(time.monotonic)
        self.tail: IngressTail | None = None

    def _prepare_connections(self) -> None:
        """Set what new connections take from the settings."""
        broker = self.settings.broker
        self.validated_user = broker.validated_user
        self.idle_timeout_s = broker.idle_timeout_s
        self.failover = _failover_list(broker.failover, broker.url_scheme)
        self._mechanisms = sasl_mechanisms(broker, self.users, self.tokens)
        self.amqp_limits = ConnectionLimits(
            handshake_timeout_s=broker.handshake_timeout_s,
            input_steps_per_piece=INPUT_STEPS_PER_PIECE,
            deliveries_per_piece=DELIVERIES_PER_PIECE,
            frames_per_piece_bytes=FRAMES_PER_PIECE_BYTES,
            **({} if self.tokens is None else TOKEN_LIMITS),
        )

    # -- for connections ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Return the engine of the current epoch."""
        if self._epoch is None:
            raise Unavailable("the broker is starting")
        return self._epoch.engine

    @property
    def reason(self) -> str:
        """Return why clients are not served; "" if they are."""
        return "starting" if self._life is None else self._life.protocol.reason or self.audit.blocked

    @property
    def congested(self) -> bool:
        """Return whether so much data is in flight to the journal, or waits for it, that the broker reads nothing from clients."""
        return (epoch := self._epoch) is not None and is_congested(epoch.protocol.engine)

    def lists_user(self, user: str) -> bool:
        """Return whether a pipeline may act as a user: one with a password or a role, or anybody if there are no permissions."""
        return not self.settings.permission or user == ANONYMOUS_USER or self.users.knows(user)

    def awake(self) -> bool:
        """Return whether the current epoch may continue: see Epoch."""
        epoch = self._epoch
        return epoch is not None and epoch.protocol.awake()

    def sasl(self, tls: TlsPeer, peer: str) -> SaslServer:
        """Return a new exchange with a client."""
        return SaslServer(self._mechanisms(tls), partial(self.audit.login_refused, peer))

    def end_epoch(self, error: BasculeError) -> None:
        """End the current epoch because of a failure. The next epoch loads its state from the journal."""
        if self._epoch is not None:
            self._epoch.end(error)

    def dispatch(self) -> None:
        """Deliver available messages to consumers, if this broker may still serve."""
        epoch = self._epoch
        if epoch is not None and epoch.protocol.awake():
            epoch.protocol.engine.dispatch()
        self.output.write()

    def send_output(self) -> None:
        """Write the output of the connections that got something; the next turns write for those for which this turn has no time."""
        self.output.write()

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[int, int], None], on_standby: Callable[[int, int], None]) -> None:
        """Stand by, and serve while elected, until SIGTERM or SIGINT. Raises BasculeError if the broker cannot start or must stop."""
        self._life = BrokerLife(self, on_ready, on_standby)
        self._watch_users(None)
        if self.tokens is not None:
            self.tokens.keys.start()
        self.tls.start()
        try:
            if self.reload is not None:
                self.reload.on_hangup()
            await self._life.run()
        finally:
            self.tls.close()
            if self._users_watch is not None:
                self._users_watch.close()
            if self.tokens is not None:
                await self.tokens.keys.stop()

    def _watch_users(self, before: Path | None) -> None:
        """Watch the file of users, and no other one that was watched before."""
        path, watch = self.settings.broker.users_file, self._users_watch
        if watch is not None and path != before:
            watch.close()
            watch = None
        if watch is not None:
            watch.ask()  # it may have changed since the settings were read
        elif path is not None:
            watch = UsersWatch(self.users, path, self._users_changed)
        self._users_watch = None if path is None else watch

    def follow(self, following: NextSettings, ended: Mapping[str, EndedLogins]) -> None:
        """Follow other settings from now on. Raises nothing: all that could fail is done. ``ended`` has the users who lost a login."""
        before, self.settings = self.settings, following.settings
        settings = following.settings
        if settings.log != before.log and configured() is not None:
            configure(settings.log.values)
        self._follow_logins(before, following, ended)
        self.tls.broker.change(following.broker_tls)
        self.tls.admin.change(following.admin_tls)
        self.tls.start()
        if settings.audit.file != before.audit.file:
            self.audit.write_to(settings.audit.file)
        self.audit.messages, self.audit.required = settings.audit.messages, settings.audit.on_failure == REFUSE
        self.partials.bytes_max = partial_budget(int(settings.broker.memory_bytes)).bytes_max
        if self.spill is not None:
            self.spill.limit_bytes, self.spill.free_min_bytes = int(settings.broker.spill_bytes), int(settings.broker.spill_free_bytes)
            self.spill.memory_bytes = int(settings.broker.memory_bytes)
        self._policy = following.policy
        self._follow_policy()
        self.handshakes.limits = handshake_limits(settings.broker)
        self.usage.change(usage_limits(settings, self.users.roles))
        self.client_turns.in_slices(self.usage.refresh(), self.dispatch)
        self._prepare_connections()
        if self.admin is not None and following.access is not None:
            self.admin.admit_by(following.access)
        self.dispatch()

    def _follow_logins(self, before: Settings, following: NextSettings, ended: Mapping[str, EndedLogins]) -> None:
        """Follow users, permissions and tokens, and end the connections that could not be opened any more."""
        self.client_turns.in_slices(end_connections(self.connections, ended), self.dispatch)
        self._watch_users(before.broker.users_file)
        if self.settings.permission != before.permission:
            self.permissions.now = following.permissions
            self.client_turns.in_slices(end_without_permission(self.connections, self.permissions), self.dispatch)
        following.read_keys_again()
        if (tokens := self.tokens) is not following.tokens:
            self.tokens = self.logins.tokens = following.tokens
            if tokens is not None:
                tokens.keys.end()
            if self.tokens is not None:
                self.tokens.keys.start()
        if following.token_rules_differ(before.broker.oidc):
            self.client_turns.in_slices(end_token_logins(self.connections), self.dispatch)

    def _follow_policy(self) -> None:
        """Let the engine follow the settings of addresses and memory, once its state is loaded."""
        if (engine := self.loaded_engine) is not None:
            engine.memory.limit(int(self.settings.broker.memory_bytes))
            if engine.policy is not self._policy:
                change_policy(engine, self._policy, report_refused_queue)

    def _users_changed(self, ended: Mapping[str, EndedLogins]) -> None:
        self.audit.record("users/read", str(self.settings.broker.users_file), who="", peer="", ended=len(ended))
        self.client_turns.in_slices(self.usage.refresh(), self.dispatch)
        self.client_turns.in_slices(end_connections(self.connections, ended), self.dispatch)

    def begin(self, place: JournalPlace, on_ended: Callable[[BasculeError], None], on_stalled: Callable[[BasculeError], None]) -> Epoch:
        """Make the next epoch, which follows the journal from now on."""
        self._earlier = self.counters
        if self.loaded_engine is not None:
            self._epoch = None
            self.garbage.thaw()  # the engine of an epoch refers to itself
        self.close_spill()
        broker = self.settings.broker
        limits = map(int, (broker.spill_bytes, broker.spill_free_bytes, broker.memory_bytes))
        self.spill = SpillFiles(Path(self.settings.embedded.data_dir) / "spill", *limits)
        self._epoch = Epoch(
            place, self._policy, self._diverts, self.spill, int(self.settings.broker.memory_bytes),
            on_ended=on_ended, on_confirmed=self._confirmed, on_ticked=self._ticked, on_stalled=on_stalled,
            errors=self.errors, send_times=self.send_times, users=self._divert_users,
        )  # fmt: skip
        return self._epoch

    def limit(self, room: topics.JournalCapacity) -> None:
        """Tell clients the sizes for which the journal has room in this epoch."""
        self.max_message_bytes = min(int(self.settings.broker.max_message_bytes), room.content_bytes)
        if room.shortage is not None:
            log.error(
                "large messages refused, correct the topic and restart the broker",
                reason=room.shortage,
                message_bytes_max=self.max_message_bytes,
            )

    def loaded(self, room: topics.JournalCapacity) -> None:
        """Start to read the ingress topic after the state of the epoch was loaded."""
        largest = min(self._policy.transaction_bytes_max, room.content_bytes)
        self.engine.local_transactions.bytes_max = largest
        self.engine.destinations.on_change = self._queue_changed
        access = self.engine.intake.access
        access.permissions, access.on_refused = self.permissions, self._ingress_refusals.record
        self._follow_policy()  # the settings may have changed since the load began
        self.engine.journaling.record_bytes_max = min(RECORD_BYTES_MAX, room.record_bytes)
        # Loaded objects live long: the collector need not examine them repeatedly.
        gc.freeze()
        _return_memory()
        if self.spill is not None:
            self._memory_watch = MemoryWatch(self.engine, self.spill, self.partials, self.connections, self.dispatch)
            self._memory_watch.start()
        names = self.settings.journal_topics
        self.tail = IngressTail(self.kafka, names.ingress, names.partition, self.engine, asyncio.get_running_loop())

    def _queue_changed(self, action: str, queue: BrokerQueue) -> None:
        self.audit.record_change(action, queue.name, address=queue.address, owner=queue.user)

    def close_clients(self, error: BasculeError | None) -> None:
        """Close every connection; None means an orderly shutdown."""
        for connection in list(self.connections):
            connection.end(GOING_DOWN if error is None else AmqpError(CONNECTION_FORCED, str(error)))

    def close_spill(self) -> None:
        """Delete the spill files."""
        if self._memory_watch is not None:
            self._memory_watch.stop()
            self._memory_watch = None
        if self.spill is not None:
            self.spill.close()

    def _confirmed(self) -> None:
        if self._life is not None:
            self._life.protocol.confirmed()
        self._ticked()

    def _ticked(self) -> None:
        if self.held_back and not self.congested:
            held_back, self.held_back = self.held_back, {}
            for connection in held_back:
                self.errors.run(ErrorKind.CONNECTION, connection.read_on)
        self.send_output()

    # -- for the admin server ----------------------------------------------------------------------------------------

    @property
    def loaded_engine(self) -> Engine | None:
        """Return the engine of the current epoch, if its state is loaded."""
        return self._epoch.engine if self._epoch is not None and self._epoch.loaded else None

    @property
    def serving(self) -> bool:
        """Return whether clients are served."""
        epoch = self._epoch
        return epoch is not None and epoch.loaded and not epoch.ended and epoch.engine.stalled is None and self.reason == ""

    @property
    def role(self) -> BrokerRole | None:
        """Return whether this broker serves or is ready to take over; None if neither."""
        if self.serving:
            return BrokerRole.ACTIVE
        protocol = self._life.protocol if self._life is not None else None
        waits = protocol is not None and protocol.state is NodeState.STANDING_BY and protocol.reason == STANDING_BY
        return BrokerRole.STANDBY if waits else None

    @property
    def condition(self) -> str:
        """Return the role and the trouble in one line."""
        role = self.role or "waiting"
        return role if role is BrokerRole.STANDBY or not self.trouble else f"{role}: {self.trouble}"

    @property
    def trouble(self) -> str:
        """Return why clients are not served, ingresses are not read, or stored data is not safe; "" if all is well."""
        return self.reason or (self.tail.failure if self.tail else "") or (self._life.topic_trouble if self._life else "")

    @property
    def counters(self) -> Counters:
        """Return the counters of the process over all epochs."""
        engine = self.loaded_engine
        return self._earlier if engine is None else sum_of(self._earlier, engine.counters)

    @property
    def refused_connections(self) -> int:
        """Return the number of connections refused because of a limit or a shortage of file descriptors."""
        return self.usage.refused + (self._life.refused_connections if self._life else 0)

    @property
    def watches_elected(self) -> bool:
        """Return whether this broker is a standby with a connection to the elected broker."""
        return self._life is not None and self._life.watches_elected

    @property
    def housekeeping(self) -> Housekeeping | None:
        """Return the housekeeping of the current epoch; None before the epoch starts."""
        return self._epoch.housekeeping if self._epoch is not None else None

    @property
    def journal_offset(self) -> int:
        """Return the offset up to which the journal is read, or written."""
        return self._epoch.journal_offset if self._epoch is not None else 0

    @property
    def foreign_records(self) -> int:
        """Return the number of foreign records in the part of the journal that was read."""
        return self._epoch.foreign_records if self._epoch is not None else 0

    def _clients_gone(self, count: int) -> None:
        engine = self.loaded_engine
        self.garbage.clients_gone(count, 0 if engine is None else engine.memory.messages)

    @property
    def ingress_foreign_records(self) -> int:
        """Return the number of records of the ingress topic that were skipped in the current epoch."""
        return self.tail.foreign if self.tail is not None else 0


def _return_memory() -> None:
    """Return memory of a load to the system: a quarter of a broker with 100,000 messages. Only glibc can do this."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def usage_limits(settings: Settings, roles: UserRoles) -> UsageLimits:
    """Return the limits of clients, by the settings and the available file descriptors."""
    broker = settings.broker
    connections, setting = broker.max_connections, CONNECTIONS
    room = descriptors.client_share(broker.max_handshakes)
    if not connections or room < connections:
        tell = log.warning if "max_connections" in broker.model_fields_set and connections else log.info
        tell("connections limited by file descriptors", connections=room, limit=descriptors.limit(), max_connections=connections)
        connections, setting = room, f"limit on file descriptors of the broker: {descriptors.limit()}"
    return UsageLimits(connections, broker.max_connections_per_address, setting, user_limits_of(settings, roles))


def handshake_limits(broker: BrokerSettings) -> HandshakeLimits:
    """Return the limits of connections before their login."""
    return HandshakeLimits(
        descriptors.handshake_share(broker.max_handshakes), broker.max_handshakes_per_address, broker.handshake_timeout_s
    )


def _failover_list(addresses: Iterable[str], scheme: str) -> list[dict[Any, Any]]:
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        found.append({"network-host": host, "hostname": host, "port": int(port), "scheme": scheme})
    return found


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Lock a data directory for one broker: it holds spill files, and the broker's name in elections depends on it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "broker.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"another broker uses the data directory {directory}; give each broker its own directory with embedded.data_dir"
            ) from None
        yield


def run_broker(
    settings: Settings, *, on_ready: Callable[[int, int], None], on_standby: Callable[[int, int], None],
    service_manager: ServiceManager = NO_SERVICE_MANAGER, reload_source: ReloadSource | None = None,
) -> None:  # fmt: skip
    """Run a broker until it is told to stop; report its AMQP and admin port when it serves or is a standby. Raises BasculeError.

    Without ``reload_source``, the settings are never read again.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    descriptors.raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _alone_in(Path(settings.embedded.data_dir)):
        node = Node(settings, service_manager, reload_source)
        node.garbage.start()
        try:
            runner.run(node.run(on_ready, on_standby))
        finally:
            node.garbage.stop()
