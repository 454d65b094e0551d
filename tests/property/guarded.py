"""A broker in memory with users, tokens, permissions and an audit, for hostile peers without a login or without permissions."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bascule.amqp.sasl import ExternalClient, ExternalServer, SaslClient, SaslServer
from bascule.config import Settings
from bascule.config.audit import Audit
from bascule.core.access import AccessRule, AccessRules
from bascule.core.permissions import Permission
from bascule.core.roles import UserRoles
from bascule.server.audit import VALUE_LENGTH_MAX, audit_of
from bascule.server.listener_tls import TlsPeer
from bascule.server.logins import LoginChecks, sasl_mechanisms
from bascule.server.tokens import TOKEN_LIMITS
from bascule.server.user_directory import UserDirectory
from bascule.testing.broker import BrokerInMemory
from tests.support.provider import Provider, known_tokens
from tests.unit.server.served import Client, Served

CANARY: Final = "canary"
NOBODY: Final = "nobody"
#: The longest line of the audit: its fields are texts of peers, of which each character may be an escape of twelve.
LINE_LENGTH_MAX: Final = 8 * 12 * VALUE_LENGTH_MAX


def settings_of(provider: Provider, directory: Path) -> Settings:
    """Return settings with two users with passwords, of whom one has a role, and with tokens."""
    oidc = {"issuer": provider.issuer, "audience": ["bascule"], "roles_claim": "roles", "roles": ["may"]}
    broker = {"users": {CANARY: "song", NOBODY: "knows"}, "roles": {"may": [CANARY]}, "oidc": oidc}
    return Settings.model_validate({"broker": broker, "embedded": {"data_dir": directory}})


class Guarded(Served):
    """The broker. The next connection has a certificate of the user ``certified``, or none if it is None."""

    def __init__(self, provider: Provider, broker: BrokerInMemory | None = None) -> None:
        super().__init__(broker)
        self._directory = tempfile.TemporaryDirectory()
        self.lines = Path(self._directory.name) / "audit.jsonl"
        settings = settings_of(provider, Path(self._directory.name))
        self.tokens = known_tokens(provider, settings.broker.oidc)
        self._mechanisms = sasl_mechanisms(settings.broker, UserDirectory(settings), self.tokens)
        roles = UserRoles(settings.broker.roles)
        self.permissions = AccessRules([AccessRule("#", {each: frozenset({"may"}) for each in Permission})], roles)
        self.audit = audit_of(Audit(file=self.lines, messages=True), {})
        self.validated_user = "check"
        self.amqp_limits = dataclasses.replace(self.amqp_limits, **TOKEN_LIMITS)
        self.certified: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.audit.close()
        self._directory.cleanup()

    def sasl(self, tls: TlsPeer, peer: str) -> SaslServer:
        external = {} if self.certified is None else {"EXTERNAL": partial(ExternalServer, self.certified)}
        return SaslServer({**external, **self._mechanisms(tls)}, partial(self._refused, peer))

    def _refused(self, peer: str, user: str, mechanism: str, reason: str) -> None:
        self.audit.record("login", "", who=user, peer=peer, allowed=False, result=reason, mechanism=mechanism)

    def forget_failures(self) -> None:
        """Delay no login because of earlier ones: the tests fail thousands of times."""
        self.logins = LoginChecks(self.tokens)

    def canary(self) -> Client:
        """Return a client that may do everything."""
        self.certified = CANARY
        client = Client(self, CANARY, sasl=SaslClient([ExternalClient()]))
        self.certified = None
        return client

    def check_audit(self) -> int:
        """Check that each line of the audit is JSON of limited size in ASCII. Return the number of lines, and delete them."""
        lines = self.lines.read_text(encoding="ascii").splitlines()
        for line in lines:
            assert isinstance(json.loads(line)["who"], str)
            assert len(line) <= LINE_LENGTH_MAX, line[:300]
        self.lines.unlink()
        return len(lines)

    def state(self) -> tuple[object, ...]:
        """Return what only a client with permissions may change."""
        addresses = self.engine.addresses
        held = {queue.name: queue.held_messages for queue in addresses.queues.values()}
        return held, set(addresses.temporary), +addresses.producers, len(self.broker.log.records), len(self.engine.transactions)
