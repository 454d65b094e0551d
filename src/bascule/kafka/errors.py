"""One table for the product with the meaning of each error code of Kafka and of its client: retriable or fatal, and for what.

The client itself retries many errors. If it reports an error that ``RETRIABLE`` contains, the request is retried with a pause, up to the
deadline of the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException


class Verdict(enum.Enum):
    """The meaning of an error for the operation that failed."""

    RETRIABLE = "retriable: the same request may succeed later"
    RECORD = "fatal for the operation: Kafka refuses this record, and would accept another one"
    DENIED = "fatal for the operation: ACLs or a policy of the cluster do not allow it"
    OPERATION = "fatal for the operation: a retry fails again"
    FENCED = "fatal for the client: another client has its transactional id or its place in the group; a new client may continue"
    NONE = "no error: the caller handles it"
    PROCESS = "fatal for the process: its settings, its credentials or its name must change"


class Rule(NamedTuple):
    """A verdict and its reason."""

    verdict: Verdict
    reason: str


def _rules(*groups: tuple[Verdict, str, tuple[str, ...]]) -> dict[int, Rule]:
    """Return the rules by the names of codes; codes that the installed client does not know are left out."""
    return {
        code: Rule(verdict, reason)
        for verdict, reason, names in groups
        for name in names
        if (code := getattr(KafkaError, name, None)) is not None
    }


RULES: Final[Mapping[int, Rule]] = _rules(
    # -- retriable ---------------------------------------------------------------------------------------------------
    (
        Verdict.RETRIABLE, "the leader of the partition changes, or the client does not know the new leader",
        ("LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "REPLICA_NOT_AVAILABLE", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH",
         "PREFERRED_LEADER_NOT_AVAILABLE", "ELIGIBLE_LEADERS_NOT_AVAILABLE", "_NOENT"),
    ),
    (
        Verdict.RETRIABLE, "a new leader does not know the high watermark yet",
        ("OFFSET_NOT_AVAILABLE",),
    ),
    (
        Verdict.RETRIABLE, "a node does not know a topic that was just created, or is starting and knows no topic yet",
        ("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"),
    ),
    (
        Verdict.RETRIABLE, "too few replicas are in sync at the moment",
        ("NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "_ISR_INSUFF"),
    ),
    (
        Verdict.RETRIABLE, "a node cannot write to a disk; its partitions move to other nodes",
        ("KAFKA_STORAGE_ERROR", "LOG_DIR_NOT_FOUND"),
    ),
    (
        Verdict.RETRIABLE, "no answer in time, no connection, or a node that starts or stops",
        ("REQUEST_TIMED_OUT", "BROKER_NOT_AVAILABLE", "NETWORK_EXCEPTION", "_TRANSPORT", "_RESOLVE", "_TIMED_OUT", "_TIMED_OUT_QUEUE",
         "_MSG_TIMED_OUT", "_ALL_BROKERS_DOWN", "_DESTROY_BROKER", "_NODE_UPDATE", "_UNKNOWN_BROKER", "REBOOTSTRAP_REQUIRED",
         "STALE_BROKER_EPOCH"),
    ),
    (
        Verdict.RETRIABLE, "the coordinator of a group or of transactions moves, starts, or still processes the last request",
        ("COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "_WAIT_COORD", "CONCURRENT_TRANSACTIONS",
         "TRANSACTION_COORDINATOR_FENCED", "UNSTABLE_OFFSET_COMMIT", "_WAIT_CACHE", "_PREV_IN_PROGRESS", "_IN_PROGRESS"),
    ),
    (
        Verdict.RETRIABLE, "the controller moves, or still processes a change of the partitions",
        ("NOT_CONTROLLER", "STALE_CTRL_EPOCH", "UNKNOWN_CONTROLLER_ID", "REASSIGNMENT_IN_PROGRESS", "OPERATION_NOT_ATTEMPTED"),
    ),
    (
        Verdict.RETRIABLE, "the group rebalances, or has rebalanced without this member, which rejoins",
        ("REBALANCE_IN_PROGRESS", "ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "MEMBER_ID_REQUIRED", "STALE_MEMBER_EPOCH",
         "FENCED_MEMBER_EPOCH", "UNRELEASED_INSTANCE_ID", "_ASSIGNMENT_LOST", "_ASSIGN_PARTITIONS", "_REVOKE_PARTITIONS",
         "_MAX_POLL_EXCEEDED"),
    ),
    (
        Verdict.RETRIABLE, "a fetch session has ended; the client starts another one",
        ("FETCH_SESSION_ID_NOT_FOUND", "INVALID_FETCH_SESSION_EPOCH", "SHARE_SESSION_NOT_FOUND", "INVALID_SHARE_SESSION_EPOCH",
         "SHARE_SESSION_LIMIT_REACHED"),
    ),
    (
        Verdict.RETRIABLE, "a quota is used up at the moment, or a buffer of the client is full",
        ("THROTTLING_QUOTA_EXCEEDED", "_QUEUE_FULL"),
    ),
    (
        Verdict.RETRIABLE, "the client itself reports that a retry may succeed",
        ("_RETRY", "_INTR", "_NOOP"),
    ),
    (
        Verdict.NONE, "nothing was wrong, or a reader has reached the end of a partition",
        ("NO_ERROR", "_PARTITION_EOF"),
    ),
    # -- fatal for the operation -------------------------------------------------------------------------------------
    (
        Verdict.RECORD, "the record, or its batch, is too large",
        ("MSG_SIZE_TOO_LARGE", "INVALID_MSG_SIZE", "RECORD_LIST_TOO_LARGE"),
    ),
    (
        Verdict.RECORD, "the record breaks a rule of its topic: its timestamp, its compression, or a missing key",
        ("INVALID_TIMESTAMP", "INVALID_RECORD", "UNSUPPORTED_COMPRESSION_TYPE", "_INVALID_DIFFERENT_RECORD"),
    ),
    (
        Verdict.DENIED, "an ACL is missing, or a policy of the cluster forbids the operation",
        ("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED",
         "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "DELEGATION_TOKEN_AUTHORIZATION_FAILED", "POLICY_VIOLATION", "SECURITY_DISABLED"),
    ),
    (
        Verdict.RECORD, "the batch is invalid",
        ("INVALID_MSG",),
    ),
    (
        Verdict.OPERATION, "a reader received damaged data; the client continues behind it, so the record would be skipped",
        ("_BAD_MSG", "_BAD_COMPRESSION", "_UNDERFLOW", "_PARTIAL"),
    ),
    (
        Verdict.OPERATION, "the offset is not in the log",
        ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET", "_LOG_TRUNCATION", "_NO_OFFSET"),
    ),
    (
        Verdict.OPERATION, "the sequence of an idempotent producer is broken; its client ends, and a new one continues",
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", "DUPLICATE_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID", "INVALID_PRODUCER_ID_MAPPING",
         "_GAPLESS_GUARANTEE", "_INCONSISTENT"),
    ),
    (
        Verdict.OPERATION, "the transaction cannot be committed; it is aborted and repeated",
        ("INVALID_TXN_STATE", "TRANSACTION_ABORTABLE", "_STATE", "_PURGE_QUEUE", "_PURGE_INFLIGHT"),
    ),
    (
        Verdict.OPERATION, "Kafka does not carry out such a request",
        ("INVALID_REQUEST", "TOPIC_EXCEPTION", "TOPIC_ALREADY_EXISTS", "INVALID_PARTITIONS", "INVALID_REPLICATION_FACTOR",
         "INVALID_REPLICA_ASSIGNMENT", "INVALID_CONFIG", "INVALID_REQUIRED_ACKS", "INVALID_COMMIT_OFFSET_SIZE",
         "OFFSET_METADATA_TOO_LARGE", "UNSUPPORTED_FOR_MESSAGE_FORMAT", "TOPIC_DELETION_DISABLED", "NON_EMPTY_GROUP",
         "GROUP_ID_NOT_FOUND", "GROUP_SUBSCRIBED_TO_TOPIC", "ELECTION_NOT_NEEDED", "NO_REASSIGNMENT_IN_PROGRESS", "RESOURCE_NOT_FOUND",
         "DUPLICATE_RESOURCE", "LISTENER_NOT_FOUND", "INVALID_PRINCIPAL_TYPE", "UNACCEPTABLE_CREDENTIAL", "INVALID_REGULAR_EXPRESSION",
         "INVALID_RECORD_STATE", "FENCED_STATE_EPOCH", "TELEMETRY_TOO_LARGE", "UNKNOWN_SUBSCRIPTION_ID",
         "DELEGATION_TOKEN_AUTH_DISABLED", "DELEGATION_TOKEN_NOT_FOUND", "DELEGATION_TOKEN_OWNER_MISMATCH",
         "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED", "INVALID_UPDATE_VERSION", "FEATURE_UPDATE_FAILED", "INCONSISTENT_VOTER_SET",
         "INVALID_VOTER_KEY", "DUPLICATE_VOTER", "VOTER_NOT_FOUND", "INVALID_REGISTRATION", "STREAMS_INVALID_TOPOLOGY",
         "STREAMS_INVALID_TOPOLOGY_EPOCH", "STREAMS_TOPOLOGY_FENCED"),
    ),
    (
        Verdict.OPERATION, "the client does not support the call, or not in its current state",
        ("_INVALID_ARG", "_CONFLICT", "_UNKNOWN_GROUP", "_EXISTING_SUBSCRIPTION", "_UNKNOWN_PROTOCOL", "_NOT_IMPLEMENTED", "_OUTDATED",
         "_READ_ONLY", "_INVALID_TYPE", "_NOT_CONFIGURED", "_APPLICATION", "_FS", "_FAIL", "_KEY_SERIALIZATION", "_VALUE_SERIALIZATION",
         "_KEY_DESERIALIZATION", "_VALUE_DESERIALIZATION"),
    ),
    (
        Verdict.OPERATION, "Kafka does not name the error, so nobody knows whether a retry helps",
        ("UNKNOWN",),
    ),
    # -- fatal for the client ----------------------------------------------------------------------------------------
    (
        Verdict.FENCED, "another client has the transactional id",
        ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"),
    ),
    (
        Verdict.FENCED, "another client has the name of this member (group.instance.id), or the client can no longer be used",
        ("FENCED_INSTANCE_ID", "_FATAL", "_DESTROY", "_CRIT_SYS_RESOURCE"),
    ),
    # -- fatal for the process ---------------------------------------------------------------------------------------
    (
        Verdict.PROCESS, "the credentials or the certificates are wrong",
        ("_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE",
         "DELEGATION_TOKEN_EXPIRED", "PRINCIPAL_DESERIALIZATION_FAILURE"),
    ),
    (
        Verdict.PROCESS, "the cluster has a version or a role that this client cannot use",
        ("UNSUPPORTED_VERSION", "_UNSUPPORTED_FEATURE", "MISMATCHED_ENDPOINT_TYPE", "UNSUPPORTED_ENDPOINT_TYPE", "UNSUPPORTED_ASSIGNOR"),
    ),
    (
        Verdict.PROCESS, "the settings of the group do not fit its other members or the limits of the cluster",
        ("INVALID_SESSION_TIMEOUT", "INCONSISTENT_GROUP_PROTOCOL", "INVALID_GROUP_ID", "GROUP_MAX_SIZE_REACHED",
         "INVALID_TRANSACTION_TIMEOUT"),
    ),
)  # fmt: skip
#: The rule for an error code that this table does not contain.
_UNKNOWN: Final = Rule(Verdict.OPERATION, "an error code that this version of Bascule does not know")


def rule_of(error: KafkaError) -> Rule:
    """Return the rule for an error, by its code."""
    return RULES.get(error.code(), _UNKNOWN)


def verdict_of(error: KafkaError) -> Verdict:
    """Return the verdict on an error. If the client marks the error as retriable or fatal, this mark precedes the table."""
    if error.fatal() and rule_of(error).verdict is not Verdict.PROCESS:
        return Verdict.FENCED
    return Verdict.RETRIABLE if error.retriable() else rule_of(error).verdict


def passing(error: KafkaError) -> bool:
    """Return whether an error may be temporary."""
    return verdict_of(error) is Verdict.RETRIABLE


def words(error: KafkaError | Exception) -> str:
    """Return the text of an error, for Kafka's errors without the notation ``KafkaError{code=...}`` of the client."""
    found = error.args[0] if isinstance(error, KafkaException) else error
    return found.str() if isinstance(found, KafkaError) else str(found)


def codes_of(*verdicts: Verdict) -> frozenset[int]:
    """Return the codes with these verdicts."""
    return frozenset(code for code, rule in RULES.items() if rule.verdict in verdicts)


#: Errors that mean that a later incarnation has the transactional id.
FENCED_PRODUCER: Final = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
#: Errors of a fenced member, from a heartbeat and while the group rebalances; the second is the only fatal error of a member.
FENCED_MEMBER: Final = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL})
#: Errors of Kafka or its client that mean that a record is too large.
TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE})
#: Error of a topic for a timestamp that is too far from its node's clock.
INVALID_TIMESTAMP: Final = KafkaError.INVALID_TIMESTAMP
