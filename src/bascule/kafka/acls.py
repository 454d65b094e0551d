"""The ACLs of the embedded Kafka: clients without a login may use everything except Bascule's own topics, groups and transactional ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from bascule.core.errors import Scope, Unavailable
from bascule.core.topics import JournalTopics
from bascule.kafka import clients
from bascule.kafka.errors import words
from bascule.kafka.retrying import ask_until

#: The principal of a client without a login.
ANONYMOUS: Final = "User:ANONYMOUS"
ANY_HOST: Final = "*"
#: Kafka's minimum. More iterations protect a password that can be guessed; this one has 256 random bits.
SCRAM_ITERATIONS: Final = 4096
#: A node that has just started answers in milliseconds. A loaded machine gets plenty of time.
PROTECT_TIMEOUT_S: Final = 30.0

_CHANGES: Final = (AclOperation.WRITE, AclOperation.CREATE, AclOperation.DELETE, AclOperation.ALTER, AclOperation.ALTER_CONFIGS)
#: Kafka's own topics. A client that calls itself `__admin_client` could otherwise write to them.
_KAFKA_TOPICS: Final = ("__consumer_offsets", "__transaction_state", "__share_group_state")


class NotProtected(Unavailable):
    """Kafka did not store the ACLs or the user of Bascule."""

    scope = Scope.PROCESS


@dataclass(frozen=True, slots=True)
class OwnNames:
    """Topics, groups and transactional ids of one bridge. Everybody may describe them, and read the ``shown`` topics."""

    hidden: frozenset[str]
    shown: frozenset[str]
    groups: frozenset[str]
    #: Prefix of groups and transactional ids.
    prefix: str


def own_names(topics: JournalTopics, bridge_id: str) -> OwnNames:
    """Return the names of a bridge. Topics that users' programs write (XA, the adapter) are not among them."""
    return OwnNames(
        hidden=topics.own | ({topics.audit_topic} if topics.audit_topic else set()),
        shown=frozenset({topics.dead_letters}),
        groups=frozenset({topics.brokers}),
        prefix=topics.transactional_id(bridge_id, ""),
    )


def protect(kafka: Mapping[str, Any], names: OwnNames, user: str, password: str) -> None:
    """Store the ACLs and the password of Bascule's user, whether or not they are there. Raises NotProtected.

    ``kafka`` are the settings of a client with all rights. Without these ACLs, a client without a login has no right at all. The first
    request denies the own names, and only the second one allows the rest.
    """
    deadline_s = time.monotonic() + PROTECT_TIMEOUT_S
    admin = clients.admin(kafka)
    scram = UserScramCredentialUpsertion(user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, SCRAM_ITERATIONS), password.encode())
    _done(deadline_s, lambda: admin.alter_user_scram_credentials([scram], request_timeout=PROTECT_TIMEOUT_S).values())
    for bindings in (list(denied(names)), list(allowed())):
        _done(deadline_s, lambda some=bindings: admin.create_acls(some, request_timeout=PROTECT_TIMEOUT_S).values())  # type: ignore[misc]


def denied(names: OwnNames) -> Iterator[AclBinding]:
    """Yield what a client without a login may not do."""
    for topic in sorted(names.hidden):
        yield from _deny(ResourceType.TOPIC, topic, AclOperation.READ, *_CHANGES)
    for topic in sorted({*names.shown, *_KAFKA_TOPICS}):
        yield from _deny(ResourceType.TOPIC, topic, *_CHANGES)
    use = (AclOperation.READ, AclOperation.DELETE, AclOperation.ALTER_CONFIGS)
    for group in sorted(names.groups):
        yield from _deny(ResourceType.GROUP, group, *use)
    yield from _deny(ResourceType.GROUP, names.prefix, *use, pattern=ResourcePatternType.PREFIXED)
    yield from _deny(ResourceType.TRANSACTIONAL_ID, names.prefix, AclOperation.WRITE, pattern=ResourcePatternType.PREFIXED)


def allowed() -> Iterator[AclBinding]:
    """Yield what a client without a login may do with all other names, and may ask about the cluster."""
    for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID):
        yield _binding(kind, "*", ResourcePatternType.LITERAL, AclOperation.ALL, AclPermissionType.ALLOW)
    for operation in (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS):
        yield _binding(ResourceType.BROKER, "kafka-cluster", ResourcePatternType.LITERAL, operation, AclPermissionType.ALLOW)


def _deny(
    kind: ResourceType, name: str, *operations: AclOperation, pattern: ResourcePatternType = ResourcePatternType.LITERAL
) -> Iterator[AclBinding]:
    for operation in operations:
        yield _binding(kind, name, pattern, operation, AclPermissionType.DENY)


def _binding(
    kind: ResourceType, name: str, pattern: ResourcePatternType, operation: AclOperation, permission: AclPermissionType
) -> AclBinding:
    return AclBinding(kind, name, pattern, ANONYMOUS, ANY_HOST, operation, permission)


def _done(deadline_s: float, ask: Callable[[], Iterable[Future[None]]]) -> None:
    try:
        ask_until(deadline_s, lambda: [each.result() for each in ask()])
    except KafkaException as error:
        raise NotProtected(f"the ACLs and the user of Bascule could not be stored in the embedded Kafka: {words(error)}") from error
