"""The embedded Kafka of `bascule up`: a client without a login uses the users' topics, and nothing of Bascule's own."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from bascule.client import Queue, connect
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.protection import DIRECTORY, client_login, own_access
from bascule.kafka import clients
from bascule.kafka.acls import ANONYMOUS, ANY_HOST
from bascule.kafka.admin import Topics
from tests.scenarios.topics import create
from tests.support.client import SOON_S
from tests.support.system import System
from tests.support.up import Up

pytestmark = pytest.mark.timeout(280)

TOPICS = JournalTopics()
HIDDEN = [
    TOPICS.journal, TOPICS.snapshots, TOPICS.store, TOPICS.ingress, TOPICS.positions, TOPICS.brokers, TOPICS.control, TOPICS.reports,
]  # fmt: skip
ASK_S = 20.0


class Stranger:
    """A client of the plain listener, as any program of the machine."""

    def __init__(self, bootstrap: str) -> None:
        self.kafka = {"bootstrap.servers": bootstrap}
        self.admin = clients.admin(self.kafka)

    def produce(self, topic: str) -> None:
        told: list[KafkaError | None] = []
        producer = clients.producer(self.kafka)
        producer.produce(topic, b"forged", on_delivery=lambda error, _: told.append(error))
        producer.flush(ASK_S)
        _raise(told)

    def read(self, topic: str) -> None:
        with self._member("stranger") as consumer:
            consumer.assign([TopicPartition(topic, 0, 0)])
            _raise([record.error() for record in consumer.consume(1, ASK_S)])

    def commit(self, group: str) -> None:
        with self._member(group) as consumer:
            consumer.commit(offsets=[TopicPartition("users.in", 0, 0)], asynchronous=False)

    def join(self, group: str) -> None:
        with self._member(group) as consumer:
            consumer.subscribe(["users.in"])
            _raise([record.error() for record in consumer.consume(1, ASK_S)])

    def transact(self, transactional_id: str) -> None:
        producer = clients.producer({**self.kafka, "transactional.id": transactional_id})
        producer.init_transactions(ASK_S)

    def create(self, topic: str) -> None:
        _result(self.admin.create_topics([NewTopic(topic, 1, 1)]))

    def delete(self, topic: str) -> None:
        _result(self.admin.delete_topics([topic]))

    def add_partitions(self, topic: str) -> None:
        _result(self.admin.create_partitions([NewPartitions(topic, 2)]))

    def trim(self, topic: str) -> None:
        _result(self.admin.delete_records([TopicPartition(topic, 0, 1)]))

    def configure(self, kind: ResourceType, name: str) -> None:
        entry = ConfigEntry(
            "retention.ms" if kind is ResourceType.TOPIC else "log.retention.ms", "1", incremental_operation=AlterConfigOpType.SET
        )
        _result(self.admin.incremental_alter_configs([ConfigResource(kind, name, incremental_configs=[entry])]))

    def delete_group(self, group: str) -> None:
        _result(self.admin.delete_consumer_groups([group]))

    def delete_acls(self) -> None:
        every = AclBindingFilter(
            ResourceType.TOPIC, TOPICS.journal, ResourcePatternType.LITERAL, ANONYMOUS, ANY_HOST, AclOperation.ANY, AclPermissionType.ANY
        )
        _result(self.admin.delete_acls([every]))

    def take_user(self, user: str) -> None:
        mine = UserScramCredentialUpsertion(user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), b"mine")
        _result(self.admin.alter_user_scram_credentials([mine]))

    def _member(self, group: str) -> Any:
        return closing(clients.consumer({**self.kafka, "group.id": group, "enable.auto.commit": False}))


def _raise(errors: list[KafkaError | None]) -> None:
    assert errors, "no answer"
    if errors[0] is not None:
        raise KafkaException(errors[0])


def _result(futures: dict[Any, Future[Any]]) -> None:
    for each in futures.values():
        each.result(ASK_S)


@pytest.fixture(scope="module")
def bascule(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Start a `bascule up` on the data of a version that had no protection: the same directory, with a message."""
    directory = tmp_path_factory.mktemp("protected")
    with EmbeddedKafka(directory / "data" / DIRECTORY) as before, System(before.bootstrap, directory / "broker", prefix="bascule") as old:
        with connect(old.url) as client:
            client.producer(Queue("kept")).send("from before")
        create(before.bootstrap, "users.in")
    with Up(directory, "--no-pipelines") as running:
        own = Topics(own_access(running.data_dir, {"bootstrap.servers": running.kafka}))
        for topic in (TOPICS.positions, TOPICS.dead_letters):  # the pipelines would create them
            own.create(topic, 1, {})
        yield running


@pytest.fixture(scope="module")
def stranger(bascule: Up) -> Stranger:
    made = Stranger(bascule.kafka)
    made.transact("users.first")  # Kafka creates __transaction_state for its first client
    return made


def test_message_stored_before_the_protection_is_received_after_the_upgrade(bascule: Up) -> None:
    with connect(bascule.url) as client:
        message = client.consumer(Queue("kept")).receive(SOON_S)
    assert message is not None
    assert message.body == "from before"


def _produce(topic: str, stranger: Stranger) -> None:
    stranger.produce(topic)


def _read(topic: str, stranger: Stranger) -> None:
    stranger.read(topic)


REFUSED: dict[str, tuple[Callable[[Stranger], None], int]] = {
    **{f"produce to {name}": (partial(_produce, name), KafkaError.TOPIC_AUTHORIZATION_FAILED) for name in HIDDEN},
    **{f"read {name}": (partial(_read, name), KafkaError.TOPIC_AUTHORIZATION_FAILED) for name in HIDDEN},
    "forge a dead letter": (lambda each: each.produce(TOPICS.dead_letters), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "create an own topic": (lambda each: each.create(TOPICS.dead_letters), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "delete the journal": (lambda each: each.delete(TOPICS.journal), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "trim the journal": (lambda each: each.trim(TOPICS.journal), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "add partitions to the journal": (lambda each: each.add_partitions(TOPICS.journal), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "change the journal": (lambda each: each.configure(ResourceType.TOPIC, TOPICS.journal), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "change Kafka": (lambda each: each.configure(ResourceType.BROKER, "1"), KafkaError.CLUSTER_AUTHORIZATION_FAILED),
    "delete the transactions": (lambda each: each.delete("__transaction_state"), KafkaError.TOPIC_AUTHORIZATION_FAILED),
    "delete the ACLs": (lambda each: each.delete_acls(), KafkaError.CLUSTER_AUTHORIZATION_FAILED),
    "take the user": (lambda each: each.take_user("bascule"), KafkaError.CLUSTER_AUTHORIZATION_FAILED),
    "fence a divert": (
        lambda each: each.transact(TOPICS.transactional_id("bascule", "divert:common")),
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ),
    "join the election": (lambda each: each.join(TOPICS.brokers), KafkaError.GROUP_AUTHORIZATION_FAILED),
    "join the drivers": (lambda each: each.join(TOPICS.drivers("bascule")), KafkaError.GROUP_AUTHORIZATION_FAILED),
    "falsify the lag": (lambda each: each.commit("bascule.bascule.divert"), KafkaError.GROUP_AUTHORIZATION_FAILED),
    "delete the election": (lambda each: each.delete_group(TOPICS.brokers), KafkaError.GROUP_AUTHORIZATION_FAILED),
}


@pytest.mark.parametrize("what", REFUSED)
def test_client_without_login_may_not_use_what_is_bascules_own(what: str, stranger: Stranger) -> None:
    act, code = REFUSED[what]
    with pytest.raises(KafkaException) as refused:
        act(stranger)
    assert refused.value.args[0].code() == code


def test_client_without_login_does_everything_with_users_topics(stranger: Stranger) -> None:
    stranger.create("users.made")
    stranger.produce("users.made")
    stranger.read("users.made")
    stranger.add_partitions("users.made")
    stranger.configure(ResourceType.TOPIC, "users.made")
    stranger.commit("users.group")
    stranger.transact("users.transactions")
    stranger.trim("users.made")
    stranger.delete_group("users.group")
    stranger.delete("users.made")


def test_client_without_login_sees_own_topics_and_dead_letters(bascule: Up, stranger: Stranger) -> None:
    own = own_access(bascule.data_dir, stranger.kafka)
    told: list[KafkaError | None] = []
    producer = clients.producer(own)
    producer.produce(TOPICS.dead_letters, b"a dead letter", on_delivery=lambda error, _: told.append(error))
    producer.flush(ASK_S)
    assert told == [None]
    stranger.read(TOPICS.dead_letters)
    assert set(HIDDEN) <= stranger.admin.list_topics(timeout=ASK_S).topics.keys()


def test_wrong_password_and_no_login_are_refused_on_the_own_listener(bascule: Up, stranger: Stranger) -> None:
    own = own_access(bascule.data_dir, stranger.kafka)
    assert own["bootstrap.servers"] != bascule.kafka
    assert clients.admin(own).list_topics(timeout=ASK_S).topics
    for wrong in ({**own, "sasl.password": "wrong"}, {"bootstrap.servers": own["bootstrap.servers"]}):
        with pytest.raises(KafkaException):
            clients.admin(wrong).list_topics(timeout=3)


def test_files_with_the_password_are_for_the_owner_alone(bascule: Up) -> None:
    directory = bascule.data_dir / DIRECTORY
    password = (directory / "password").read_text().strip()
    assert len(password) >= 40
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    holders = [file for file in directory.iterdir() if file.is_file() and password in file.read_text(errors="replace")]
    assert {file.name for file in holders} == {"password", "client.properties"}
    for file in (*holders, directory / "server.properties"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert password not in str(client_login(directory))


def test_data_directory_without_a_running_kafka_changes_no_settings(tmp_path: Path) -> None:
    plain = {"bootstrap.servers": "127.0.0.1:9092"}
    assert own_access(tmp_path, plain) == plain
