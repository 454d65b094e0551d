"""Reload of the settings of a running broker: all of them are checked first, and take effect together or not at all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.broker.errors import ResourceLimit
from bascule.broker.policy_change import check_policy
from bascule.config import Configuration, Settings
from bascule.config.reloading import ReloadPlan, SettingsComparison, plan_reload, report
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.log import get_log
from bascule.core.permissions import MANAGEMENT_ADDRESS, AllowAll, Permission, Permissions, Unauthorized
from bascule.server.admin_access import AdminAccess
from bascule.server.admin_logins import admin_access
from bascule.server.audit import check_audit_file
from bascule.server.key_source import KeySource, key_source
from bascule.server.links import BrowserLink, ConsumerLink, ProducerLink
from bascule.server.policies import permissions_of, policy_of
from bascule.server.tls_watch import LoadedTls
from bascule.server.tokens import TokenLogins
from bascule.server.user_directory import NextUsers
from bascule.threads.background import in_background
from bascule.threads.hangup import hangup_reloads, take_held

if TYPE_CHECKING:
    from bascule.broker.policy import Policy
    from bascule.config.oidc import Oidc
    from bascule.core.access import AccessRules
    from bascule.core.roles import UserRoles
    from bascule.server.connection import ClientConnection
    from bascule.server.node import Node

log = get_log(__name__)

T = TypeVar("T")

#: The name of a reload in the audit.
ACTION: Final = "config/reload"


class ReloadSource(NamedTuple):
    """The settings with which the process has started, and the function that reads them again. It may raise BasculeError."""

    configuration: Configuration
    load: Callable[[], Configuration]


class OwnersRules(NamedTuple):
    """The rules of the settings with their indexes, which take half a second for 5,000 rules of each kind: made in another thread."""

    policy: Policy
    permissions: AllowAll | AccessRules

    @classmethod
    def of(cls, settings: Settings, roles: UserRoles) -> OwnersRules:
        """Return the rules that the settings describe. ``roles`` may change at any time."""
        policy = policy_of(settings, roles)
        policy.make_index()
        return cls(policy, permissions_of(settings, roles))


class NextSettings(NamedTuple):
    """Settings that are checked, with what was made of them and could have failed."""

    settings: Settings
    broker_tls: LoadedTls
    admin_tls: LoadedTls
    policy: Policy
    permissions: AllowAll | AccessRules
    tokens: TokenLogins | None
    key_source: KeySource | None  # of these tokens, if they are as before; its files may have changed
    access: AdminAccess | None  # None: as before

    def read_keys_again(self) -> None:
        """Read the key set of tokens again whose settings are as before."""
        if self.tokens is not None and self.key_source is not None:
            self.tokens.keys.read_from(self.key_source)

    def token_rules_differ(self, before: Oidc) -> bool:
        """Return whether a client whose token was accepted before must show it again."""
        return _token_rules(before) != _token_rules(self.settings.broker.oidc)


class SettingsReload:
    """Reloads the settings of one broker process, one reload at a time."""

    def __init__(self, node: Node, source: ReloadSource) -> None:
        self._node = node
        self._running = source.configuration
        self._load = source.load
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def on_hangup(self) -> None:
        """Reload when the process gets SIGHUP, unless SIGHUP means that the terminal of the process was closed."""
        if hangup_reloads():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._ask)
            if take_held():
                self._ask()

    def _ask(self) -> None:
        self._keep(asyncio.get_running_loop().create_task(self._reported(), name="reload-on-hangup"))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until its end, since the event loop has only a weak reference to it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self) -> None:
        """Reload for the service manager, which waits for the end. The log has the result."""
        manager = self._node.service_manager
        manager.reloading()
        result = "ok"
        try:
            await self.reload("SIGHUP")
        except Exception as error:  # ``reload`` has logged it
            result = f"{type(error).__name__}: {error}"
        finally:
            self._node.audit.record(ACTION, "", who="SIGHUP", peer="", result=result)
            manager.reloaded()

    async def reload(self, why: str) -> SettingsComparison:
        """Read the settings again and follow them. Raises BasculeError, and changes nothing, if they cannot be used.

        If the caller is cancelled, because its client has gone, the reload continues: half of the settings must not take effect.
        """
        task = asyncio.get_running_loop().create_task(self._reload(why), name="reload")
        self._keep(task)
        return await asyncio.shield(task)

    async def _reload(self, why: str) -> SettingsComparison:
        async with self._lock:
            try:
                given = await self._beside(self._load)
                planned = await self._beside(partial(plan_reload, self._running, given))
                settings = planned.configuration.settings
                users = await self._beside(partial(NextUsers.read, settings))
                rules = await self._beside(partial(OwnersRules.of, settings, self._node.users.roles))
                following = prepare(self._node, settings, rules)
            except BasculeError as error:
                log.error("settings not reloaded, the settings before stay", by=why, reason=str(error))
                raise
            except Exception as error:
                log.error("settings not reloaded, the settings before stay", by=why, reason=repr(error), exc_info=error)
                raise
            self._record_in_file_before(planned, why)
            ended = await self._beside(partial(self._node.users.adopt, users))  # compares all users
            self._node.follow(following, ended)
            self._running = planned.configuration
            report(planned.compared, why)
            return planned.compared

    def _record_in_file_before(self, planned: ReloadPlan, why: str) -> None:
        """Let the last line of an audit file say who has set another file or none; the result goes there, or nowhere."""
        after = planned.configuration.settings.audit.file
        if after != self._node.settings.audit.file:
            applied = ", ".join(each.key for each in planned.compared.applied)
            self._node.audit.record(ACTION, "", who=why, peer="", applied=applied, next_file=str(after or ""))

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(in_background(work, "reload"))


def prepare(node: Node, settings: Settings, rules: OwnersRules) -> NextSettings:
    """Make everything of new settings that can fail. Raises BasculeError; nothing has changed then."""
    before, broker = node.settings, settings.broker
    if node.loaded_engine is not None:
        check_policy(node.loaded_engine, rules.policy)
    broker_tls, admin_tls = LoadedTls.of_broker(broker.tls), LoadedTls.of_admin(settings.admin.tls)
    check_audit_file(settings.audit)
    tokens, source = node.tokens, None
    if (broker.oidc, broker.handshake_timeout_s) != (before.broker.oidc, before.broker.handshake_timeout_s):
        tokens = TokenLogins(broker.oidc, broker.handshake_timeout_s) if broker.oidc.enabled else None
    elif tokens is not None:
        source = key_source(broker.oidc)
    access = None
    try:
        if node.admin is not None and _admits_differently(before, settings):  # writes a file, so it is the last step
            access = admin_access(settings, node.users, node.logins, node.audit, node.admin.access)
    except OSError as error:
        raise InvalidInput(f"{error.filename}: {error.strerror}; embedded.data_dir must be a directory that the broker can use") from error
    return NextSettings(settings, broker_tls, admin_tls, rules.policy, rules.permissions, tokens, source, access)


def report_refused_queue(name: str, error: ResourceLimit) -> None:
    """Log that a queue of reloaded settings cannot be created."""
    log.error("queue of the settings not created", queue=name, reason=str(error))


def _admits_differently(before: Settings, after: Settings) -> bool:
    """Return whether the admin server admits its users by other rules."""

    def rules(settings: Settings) -> tuple[object, ...]:
        return settings.admin, settings.broker.has_logins, settings.broker.oidc, settings.broker.allow_insecure

    return rules(before) != rules(after)


def _token_rules(oidc: Oidc) -> tuple[object, ...]:
    return (
        oidc.issuer, oidc.audience, oidc.user_claim, oidc.roles_claim, oidc.roles, tuple(sorted(oidc.required_claims.items())),
        oidc.algorithms,
    )  # fmt: skip


def end_token_logins(connections: dict[ClientConnection, None]) -> Iterator[None]:
    """End the connections that have logged in with a token, because other tokens are accepted now."""
    for connection in list(connections):
        if connection.sasl.identity is not None and not connection.client.ended:
            _end(connection, "the settings of logins with tokens were changed; log in again")
        yield


def end_without_permission(connections: dict[ClientConnection, None], permissions: Permissions) -> Iterator[None]:
    """End the connections with a link that its client could not open any more."""
    for connection in list(connections):
        if not connection.client.ended:
            lost = _lost(connection, permissions.with_roles(connection.sasl.token_roles))
            if lost is not None:
                _end(connection, str(lost))
        yield


def _lost(connection: ClientConnection, permissions: Permissions) -> Unauthorized | None:
    """Return the first permission that a client needs for a link and does not have."""
    client = connection.client
    try:
        for link in client.links:
            for permission, address in _needed(link.context):
                permissions.authorize(client.user, permission, address)
    except Unauthorized as error:
        return error
    return None


def _needed(context: object) -> Iterator[tuple[Permission, str]]:
    """Yield the permission that a link needs as long as it lives."""
    if isinstance(context, ProducerLink) and context.address is not None:
        yield Permission.MANAGE if context.address == MANAGEMENT_ADDRESS else Permission.SEND, context.address
    elif isinstance(context, ConsumerLink) and context.consumer is not None:
        yield Permission.CONSUME, context.consumer.queue.address
    elif isinstance(context, BrowserLink):
        yield Permission.BROWSE, context.queue.address


def _end(connection: ClientConnection, reason: str) -> None:
    log.info("connection closed", peer=connection.peer, container=connection.client.container, error=reason)
    connection.end(AmqpError(CONNECTION_FORCED, reason))
