"""An admin client of the Kafka in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AclOperation, AlterConfigOpType, ConfigEntry, ConfigSource

from tests.support.kafka_in_memory.client import MemoryClient
from tests.support.kafka_in_memory.state import DEFAULTS, Topic, failure


class MemoryAdmin(MemoryClient):
    """A client for administrative requests."""

    def __len__(self) -> int:
        """Return the number of waiting events: as the client that ships, one without events is false."""
        return 0

    def poll(self, timeout: float = -1) -> int:
        return 0

    def _answer_of_controller(self, call: str, answer: Callable[[], Any]) -> Future[Any]:
        """Answer a call to the controller.

        A client that knows no controller waits in vain: it does not ask for a newer list of nodes meanwhile.
        """
        if self.knows_controller:
            return self._answer(call, answer)
        future: Future[Any] = Future()
        future.set_exception(failure(KafkaError._TIMED_OUT, reason="Failed while waiting for controller: Local: Timed out"))
        return future

    def _answer(self, call: str, answer: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            self.kafka.meet(call)
            with self.kafka.turn:
                future.set_result(answer())
        except KafkaException as error:
            future.set_exception(error)
        return future

    def list_offsets(self, asked: Mapping[TopicPartition, Any], isolation_level: Any = None, request_timeout: float = 0) -> dict[Any, Any]:
        stable = isolation_level is IsolationLevel.READ_COMMITTED
        return {at: self._answer("list_offsets", partial(self._offset, at, spec._value, stable)) for at, spec in asked.items()}

    def _offset(self, at: TopicPartition, wanted: int, stable: bool) -> Any:
        partition = self.kafka.there(at)
        if wanted == -2:
            return SimpleNamespace(offset=partition.first, leader_epoch=partition.leader_epoch)
        if wanted == -1 and self.kafka.former.get((at.topic, at.partition)):
            return SimpleNamespace(**self.kafka.former[at.topic, at.partition].popleft())
        if wanted == -1:
            return SimpleNamespace(offset=partition.stable if stable else partition.end, leader_epoch=partition.leader_epoch)
        later = [offset for offset, record in sorted(partition.records.items()) if record.timestamp_ms >= wanted]
        return SimpleNamespace(offset=later[0] if later else -1, leader_epoch=partition.leader_epoch)

    def create_topics(self, topics: list[Any], **_: Any) -> dict[str, Future[None]]:
        return {each.topic: self._answer_of_controller("create_topics", partial(self._create, each)) for each in topics}

    def _create(self, new: Any) -> None:
        if new.topic in self.kafka.topics:
            raise failure(KafkaError.TOPIC_ALREADY_EXISTS)
        self.kafka.create(new.topic, new.num_partitions, **new.config).replicas = max(1, new.replication_factor)

    def _topic(self, name: str) -> Topic:
        if name not in self.kafka.topics:
            raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return self.kafka.topics[name]

    def delete_topics(self, topics: list[str], **_: Any) -> dict[str, Future[None]]:
        def delete(name: str) -> None:
            self._topic(name)
            del self.kafka.topics[name]

        return {name: self._answer_of_controller("delete_topics", partial(delete, name)) for name in topics}

    def incremental_alter_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[None]]:
        def alter(resource: Any) -> None:
            config = self._topic(resource.name).config
            for entry in resource.incremental_configs:
                reset = entry.incremental_operation is AlterConfigOpType.DELETE
                config[entry.name] = DEFAULTS[entry.name] if reset else entry.value

        return {each: self._answer_of_controller("incremental_alter_configs", partial(alter, each)) for each in resources}

    def describe_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[Any]]:
        def entries(name: str) -> dict[str, ConfigEntry]:
            default, own = ConfigSource.DEFAULT_CONFIG, ConfigSource.DYNAMIC_TOPIC_CONFIG
            sources: Any = {True: default.value, False: own.value}  # as librdkafka's client: the number
            return {key: ConfigEntry(key, value, sources[DEFAULTS.get(key) == value]) for key, value in self._topic(name).config.items()}

        return {each: self._answer_of_controller("describe_configs", partial(entries, each.name)) for each in resources}

    def describe_topics(self, asked: Any, include_authorized_operations: bool = False, **_: Any) -> dict[str, Future[Any]]:
        def described(name: str) -> Any:
            topic = self._topic(name)
            replicas = SimpleNamespace(replicas=[1] * topic.replicas, isr=[1] * topic.in_sync)
            allowed = [AclOperation.READ] if name in self.kafka.denied else [AclOperation.READ, AclOperation.WRITE]
            return SimpleNamespace(topic_id=topic.id, partitions=[replicas] * len(topic.partitions), authorized_operations=allowed)

        return {name: self._answer_of_controller("describe_topics", partial(described, name)) for name in asked.topic_names}

    def describe_consumer_groups(self, groups: list[str], **_: Any) -> dict[str, Future[Any]]:
        def described(group: str) -> Any:
            members = [
                SimpleNamespace(
                    member_id=each.memberid(), group_instance_id=each.instance, client_id="rdkafka", host="/127.0.0.1",
                    assignment=SimpleNamespace(topic_partitions=[TopicPartition(*at) for at in sorted(each.target)]),
                )
                for each in self.kafka.members[group]
            ]  # fmt: skip
            return SimpleNamespace(members=members)

        return {group: self._answer("describe_consumer_groups", partial(described, group)) for group in groups}

    def delete_records(self, ends: list[TopicPartition], **_: Any) -> dict[Any, Future[Any]]:
        return {at: self._answer("delete_records", partial(self._delete, at)) for at in ends}

    def _delete(self, at: TopicPartition) -> None:
        self.kafka.there(at).delete(at.offset)
