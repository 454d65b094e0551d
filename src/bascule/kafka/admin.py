"""Create, describe and check topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclOperation,
    AlterConfigOpType,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    ResourceType,
)

from bascule.core.errors import BasculeError, Denied, InvalidInput, Unavailable
from bascule.kafka import clients
from bascule.kafka.errors import Verdict, passing, verdict_of, words
from bascule.kafka.history import PROMPT
from bascule.kafka.replication import CLUSTER_DEFAULT
from bascule.kafka.retrying import FIRST_ANSWER_S, ask_in_tries, ask_until

T = TypeVar("T")

ADMIN_TIMEOUT_S = 30.0
#: A running Kafka answers in milliseconds, a starting one in seconds.
REACH_TIMEOUT_S = 10.0
#: Kafka's brokers learn of a new topic after some milliseconds.
VISIBLE_PAUSE_S = 0.02
#: A Kafka node lists a topic after it has created the logs of all earlier topics, which takes a minute on a busy machine.
VISIBLE_TIMEOUT_S = 120.0
#: The controller writes this if no broker is live. It uses the same error code for a replication factor that is too large.
_FENCED = "currently fenced"
#: Errors after which Kafka may have carried out the request.
_UNANSWERED = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError.REQUEST_TIMED_OUT, KafkaError.NETWORK_EXCEPTION)

#: Connection errors that say more than "transport failure".
_REFUSALS = (KafkaError._AUTHENTICATION, KafkaError._SSL)


@dataclass(frozen=True, slots=True)
class Facts:
    """A topic as Kafka describes it, with the number of brokers in the cluster."""

    settings: Mapping[str, str]
    partitions: int
    replicas: int
    brokers: int


class Topics:
    """Operations on topics of the cluster. Raises Unavailable if Kafka does not answer."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._bootstrap = kafka["bootstrap.servers"]
        # Not a method: a client that refers to its owner would keep its threads until a garbage collection, which a broker seldom runs.
        self._refusals: list[str] = []
        self._controller_known = False  # the last call of ``ids`` was answered
        settings: dict[str, Any] = {**PROMPT, **kafka, "error_cb": partial(_note, self._refusals)}
        try:
            self._admin = clients.admin(settings)
        except KafkaException as error:
            raise Unavailable(f"could not create a client for topics: {words(error)}") from error

    def reach(self) -> None:
        """Return when Kafka answers. Raises Unavailable with the name of the setting."""
        try:
            self._listed(time.monotonic() + REACH_TIMEOUT_S)
        except KafkaException as error:
            self._admin.poll(0)
            reason = self._refusals[0] if self._refusals else error.args[0].str()
            raise Unavailable(
                f"no Kafka answers at {self._bootstrap} (kafka.bootstrap_servers) within {REACH_TIMEOUT_S:g} s: {reason}"
            ) from error

    def partitions(self) -> dict[str, int]:
        """Return the number of partitions of every topic."""
        try:
            listed = self._listed(time.monotonic() + ADMIN_TIMEOUT_S)
        except KafkaException as error:
            raise Unavailable(f"Kafka does not answer at {self._bootstrap}: {words(error)}") from error
        return {name: len(topic.partitions) for name, topic in listed.topics.items() if topic.error is None}

    def in_sync(self, topic: str, partition: int, timeout_s: float) -> int:
        """Return the number of in-sync replicas of a partition, 0 if it has no leader. Raises Unavailable."""
        try:
            listed = self._listed(time.monotonic() + timeout_s)
        except KafkaException as error:
            raise Unavailable(f"Kafka does not answer at {self._bootstrap}: {words(error)}") from error
        partitions = listed.topics[topic].partitions if topic in listed.topics else {}
        return len(partitions[partition].isrs) if partition in partitions and partitions[partition].leader >= 0 else 0

    def facts(self, topics: Iterable[str]) -> dict[str, Facts]:
        """Return the facts of each topic that exists. Raises Unavailable."""
        names = list(topics)
        deadline_s = time.monotonic() + ADMIN_TIMEOUT_S
        try:
            # One of several nodes may not know a topic yet that was just created.
            return ask_in_tries(deadline_s, lambda answer_s: self._facts(names, answer_s))
        except KafkaException as error:
            raise Unavailable(f"Kafka does not describe Bascule's topics: {words(error)}") from error

    def _facts(self, names: list[str], timeout_s: float) -> dict[str, Facts]:
        cluster = self._listed(time.monotonic() + timeout_s)
        there = {name: cluster.topics[name].partitions for name in names if name in cluster.topics}
        asked = [ConfigResource(ResourceType.TOPIC, name) for name in there]
        answers = self._admin.describe_configs(asked, request_timeout=timeout_s) if asked else {}
        settings = {each.name: {name: str(entry.value) for name, entry in future.result().items()} for each, future in answers.items()}
        return {
            name: Facts(settings[name], len(partitions), min(len(each.replicas) for each in partitions.values()), len(cluster.brokers))
            for name, partitions in there.items()
            if partitions
        }

    def _listed(self, deadline_s: float) -> ClusterMetadata:
        self._admin.poll(0)  # collect connection errors, which gather in a client that is kept

        def ask() -> ClusterMetadata:
            listed = self._admin.list_topics(timeout=max(VISIBLE_PAUSE_S, deadline_s - time.monotonic()))
            # A node that has just started, or was suspended, knows no broker at first, not even itself. If it does not name the controller,
            # the client would wait for the controller in vain, whatever the next request is.
            if not listed.brokers:
                raise KafkaException(KafkaError(KafkaError.BROKER_NOT_AVAILABLE))
            return listed

        return ask_until(deadline_s, ask)

    def _ask_controller(
        self,
        timeout_s: float,
        ask: Callable[[float], T],
        *,
        first_s: float = FIRST_ANSWER_S,
        retriable: Callable[[KafkaError], bool] = passing,
    ) -> T:
        """Return the result of ``ask``, which gets the timeout of its request: see ``ask_in_tries``.

        The controller receives all requests about topics. Find it before the first request, and again before each retry.
        Raises Unavailable if Kafka does not answer at all, KafkaException.
        """
        deadline_s, found = time.monotonic() + timeout_s, True
        try:
            self._listed(deadline_s)
        except KafkaException as error:
            raise Unavailable(f"Kafka does not answer at {self._bootstrap}: {words(error)}") from error

        def attempt(answer_s: float) -> T:
            nonlocal found
            if not found:
                self._listed(time.monotonic() + answer_s)
            found = False
            return ask(answer_s)

        return ask_in_tries(deadline_s, attempt, first_s=first_s, retriable=retriable)

    def _change(self, ask: Callable[[float], T], *, retriable: Callable[[KafkaError], bool] = passing) -> T:
        """Return the result of a change that may be repeated. A request gets all the time: Kafka may be busy with the change.

        Raises KafkaException, Unavailable if Kafka does not answer at all.
        """
        return self._ask_controller(ADMIN_TIMEOUT_S, ask, first_s=ADMIN_TIMEOUT_S, retriable=retriable)

    def id(self, topic: str, timeout_s: float = ADMIN_TIMEOUT_S) -> str:
        """Return the id of a topic. Raises Unavailable, also if the topic does not exist."""
        found = self.ids([topic], timeout_s)
        if topic not in found:
            raise Unavailable(f"there is no topic {topic}")
        return found[topic]

    def ids(self, topics: Iterable[str], timeout_s: float = ADMIN_TIMEOUT_S) -> dict[str, str]:
        """Return the id of each topic that exists. A recreated topic has another id. Raises Unavailable.

        A client that knows no controller would wait for one in vain. Therefore the first call asks for all topics of the cluster. Each
        later call sends one request, as long as Kafka answers it.
        """
        names = list(topics)
        if not names:
            return {}
        if self._controller_known:
            self._controller_known = False
            with suppress(KafkaException):  # the controller may have gone: look for it
                found = self._ids(names, min(timeout_s, FIRST_ANSWER_S))
                self._controller_known = True
                return found
        try:
            found = self._ask_controller(timeout_s, partial(self._ids, names))
        except KafkaException as error:
            raise Unavailable(f"topics {', '.join(names)}: {words(error)}") from error
        self._controller_known = True
        return found

    def _ids(self, names: list[str], timeout_s: float) -> dict[str, str]:
        """Return the id of each topic that exists. Raises KafkaException."""
        found: dict[str, str] = {}
        for name, future in self._admin.describe_topics(TopicCollection(names), request_timeout=timeout_s).items():
            try:
                found[name] = str(future.result().topic_id)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
        return found

    def create(self, topic: str, partitions: int, config: Mapping[str, str], *, replication_factor: int = CLUSTER_DEFAULT) -> bool:
        """Create a topic; return False if it exists.

        Kafka refuses each replication factor while it counts none of its brokers as live ("fenced"), for example after a suspension of
        the whole machine. The request is retried for ``ADMIN_TIMEOUT_S``.

        Raises Unavailable, Denied, InvalidInput for a name or setting that Kafka refuses.
        """
        new = NewTopic(topic, num_partitions=partitions, replication_factor=replication_factor, config=dict(config))
        unanswered = False  # an earlier request may have created the topic

        def ask(timeout_s: float) -> bool:
            nonlocal unanswered
            try:
                self._admin.create_topics([new], operation_timeout=timeout_s, request_timeout=timeout_s)[topic].result()
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.TOPIC_ALREADY_EXISTS:
                    return unanswered
                unanswered = unanswered or code in _UNANSWERED
                raise
            return True

        try:
            return self._change(ask, retriable=lambda error: _all_fenced(error) or passing(error))
        except KafkaException as error:
            raise _not_created(topic, error.args[0]) from error

    def check_writable(self, topic: str) -> None:
        """Raise Denied if this client may not write to a topic: in a transaction, Kafka would not name the topic. Raises Unavailable."""
        asked = TopicCollection([topic])

        def ask(timeout_s: float) -> list[AclOperation] | None:
            described = self._admin.describe_topics(asked, include_authorized_operations=True, request_timeout=timeout_s)
            try:
                found: list[AclOperation] | None = described[topic].result().authorized_operations
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
                return None  # it was just created
            return found

        try:
            allowed = self._ask_controller(ADMIN_TIMEOUT_S, ask)
        except KafkaException as error:
            if verdict_of(error.args[0]) is Verdict.DENIED:
                raise Denied(topic, f"may not be described: {words(error)}") from error
            raise Unavailable(f"topic {topic!r} cannot be described: {words(error)}") from error
        if allowed and AclOperation.WRITE not in allowed:
            raise Denied(topic, "may not be written: Kafka's ACLs do not allow it")

    def await_visible(self, topics: Iterable[str]) -> None:
        """Return when Kafka shows topics that have just been created. Raises Unavailable."""
        wanted = set(topics)
        deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
        while not wanted <= self.partitions().keys():
            if time.monotonic() > deadline_s:
                raise Unavailable(f"Kafka does not list topics that it has created: {sorted(wanted - self.partitions().keys())}")
            time.sleep(VISIBLE_PAUSE_S)

    def delete(self, topics: Iterable[str]) -> None:
        """Delete topics, in this order, and return when Kafka no longer lists them. Raises Unavailable, Denied."""
        for topic in topics:
            try:
                self._change(partial(self._delete, topic))
            except KafkaException as error:
                if verdict_of(error.args[0]) is Verdict.DENIED:
                    raise Denied(topic, f"cannot be deleted: {words(error)}") from error
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise Unavailable(f"topic {topic!r} cannot be deleted: {words(error)}") from error
            deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
            while topic in self.partitions():
                if time.monotonic() > deadline_s:
                    raise Unavailable(f"Kafka still lists topic {topic!r}, which it has deleted")
                time.sleep(VISIBLE_PAUSE_S)

    def _delete(self, topic: str, timeout_s: float) -> None:
        self._admin.delete_topics([topic], operation_timeout=timeout_s, request_timeout=timeout_s)[topic].result()

    def set(self, topic: str, settings: Mapping[str, str | None]) -> None:
        """Change settings of a topic, None to the default of the cluster; the others stay. Raises Unavailable, Denied."""
        change, reset = AlterConfigOpType.SET, AlterConfigOpType.DELETE
        entries = [
            ConfigEntry(name, value or "", incremental_operation=reset if value is None else change) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        try:
            self._change(lambda timeout_s: self._admin.incremental_alter_configs([resource], request_timeout=timeout_s)[resource].result())
        except KafkaException as error:
            if verdict_of(error.args[0]) is Verdict.DENIED:
                raise Denied(topic, f"cannot be configured: {words(error)}") from error
            raise Unavailable(f"topic {topic!r} cannot be configured: {words(error)}") from error

    def overrides(self, topic: str) -> dict[str, str]:
        """Return the settings that somebody has set for a topic, without the defaults of the cluster. Raises Unavailable."""
        described = self._described(topic, ADMIN_TIMEOUT_S)
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG
        sources = (own, own.value)  # the client returns the number
        return {name: str(entry.value) for name, entry in described.items() if entry.source in sources and entry.value is not None}

    def config(self, topic: str, timeout_s: float = ADMIN_TIMEOUT_S) -> dict[str, str]:
        """Return a topic's settings. Raises Unavailable."""
        return {name: str(entry.value) for name, entry in self._described(topic, timeout_s).items()}

    def _described(self, topic: str, timeout_s: float) -> Mapping[str, ConfigEntry]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            found: Mapping[str, ConfigEntry] = self._ask_controller(
                timeout_s, lambda answer_s: self._admin.describe_configs([resource], request_timeout=answer_s)[resource].result()
            )
        except KafkaException as error:
            raise Unavailable(f"topic {topic!r} cannot be described: {words(error)}") from error
        return found


def delete_group(kafka: Mapping[str, Any], group: str) -> None:
    """Delete a consumer group with its offsets, if it exists. Raises Unavailable, also if the group may not be deleted or has members."""
    admin = clients.admin({**PROMPT, **kafka})
    try:
        ask_until(
            time.monotonic() + ADMIN_TIMEOUT_S,
            lambda: admin.delete_consumer_groups([group], request_timeout=ADMIN_TIMEOUT_S)[group].result(),
        )
    except KafkaException as error:
        if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
            raise Unavailable(f"consumer group {group!r} cannot be deleted: {words(error)}") from error


def _all_fenced(error: KafkaError) -> bool:
    """Return True if Kafka has refused a topic because no node is live, with the code of a wrong replication factor."""
    return error.code() == KafkaError.INVALID_REPLICATION_FACTOR and _FENCED in error.str()


def _not_created(topic: str, error: KafkaError) -> BasculeError:
    wrong_setting = error.code() in (KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_CONFIG, KafkaError.INVALID_REPLICATION_FACTOR)
    if wrong_setting and not _all_fenced(error):
        return InvalidInput(f"topic {topic!r} cannot be created: {error.str()}")
    if verdict_of(error) is Verdict.DENIED:
        return Denied(topic, f"cannot be created: {words(error)}")
    return Unavailable(f"topic {topic!r} cannot be created: {words(error)}")


def _note(refusals: list[str], error: KafkaError) -> None:
    if error.code() in _REFUSALS:
        refusals[:] = [error.str()]
