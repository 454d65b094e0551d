"""A Kafka cluster inside the test's process: the mock cluster of librdkafka (``rdkafka_mock.h``), called through its C functions.

It answers produce, fetch, offsets, consumer groups, transactions and descriptions of topics over TCP, and starts in a millisecond. The
clients are the real ones. ``product_on`` bridges most differences from Kafka. Three remain: no producer is fenced, a reader of committed
records sees rolled-back ones, and no topic can be deleted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from bascule.core.log import ClientLog
from bascule.kafka import admin, clients, history, own_topics
from bascule.pipelines import defined_positions, positions
from tests.support.librdkafka import ERROR_BYTES, library

#: librdkafka's type of a client (``RD_KAFKA_PRODUCER``), which contains the cluster.
_PRODUCER: Final = 0
LIST_TRIES: Final = 5


class MockCluster:
    """A cluster with a number of nodes. Use it as a context manager."""

    def __init__(self, nodes: int = 1) -> None:
        self._library = library()
        error = ctypes.create_string_buffer(ERROR_BYTES)
        conf = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        self._library.rd_kafka_conf_set(conf, b"log_level", b"0", error, ERROR_BYTES)
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(_PRODUCER, conf, error, ERROR_BYTES))
        if not self._client.value:
            raise RuntimeError(f"no client for a mock cluster: {error.value.decode()}")
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, nodes))
        # Questions about topics go to the controller.
        self._library.rd_kafka_mock_set_controller_id(self._cluster, 1)
        #: Ids of topics in place of their own, as for recreated topics; an empty id means that the topic does not exist.
        self.ids: dict[str, str] = {}
        #: Consumer groups that were deleted: the cluster cannot delete one, so the product does not see their offsets.
        self.deleted_groups: set[str] = set()
        self.bootstrap: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    @property
    def kafka(self) -> dict[str, Any]:
        """Return the settings of a client. The client does not complain if the cluster ends first."""
        return {"bootstrap.servers": self.bootstrap, "log_level": 0}

    def create(self, topic: str, partitions: int = 1) -> bool:
        """Create a topic; return False if it exists. A topic that is used without being created has four partitions."""
        code: int = self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)
        if code not in (0, KafkaError.TOPIC_ALREADY_EXISTS):
            raise RuntimeError(f"the mock cluster refuses topic {topic!r}: error {code}")
        return code == 0

    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        """Delete a partition's records before an offset."""
        deleted = self._library.rd_kafka_mock_partition_delete_records(
            self._cluster, topic.encode(), ctypes.c_int32(partition), ctypes.c_int64(before)
        )
        if deleted:
            raise RuntimeError(f"the mock cluster refuses to delete records of {topic!r}: error {deleted}")

    def fail(self, api_key: int, *errors: int) -> None:
        """Answer the next requests of a kind (Kafka's API key) with these error codes, one each."""
        self._library.rd_kafka_mock_push_request_errors(self._cluster, ctypes.c_int16(api_key), ctypes.c_size_t(len(errors)), *errors)

    def count_requests(self) -> None:
        """Count the requests that come from now on."""
        self._library.rd_kafka_mock_start_request_tracking(self._cluster)

    def requests(self, api_key: int) -> int:
        """Return the number of requests of a kind (Kafka's API key) since ``count_requests``."""
        count = ctypes.c_size_t()
        self._library.rd_kafka_mock_get_requests.restype = ctypes.POINTER(ctypes.c_void_p)
        found = self._library.rd_kafka_mock_get_requests(self._cluster, ctypes.byref(count))
        keys = [self._library.rd_kafka_mock_request_api_key(ctypes.c_void_p(found[number])) for number in range(count.value)]
        self._library.rd_kafka_mock_request_destroy_array(found, count)
        return keys.count(api_key)

    def close(self) -> None:
        """End the cluster."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the cluster."""
        self.close()


class PatientAdmin(AdminClient):
    """An admin client that asks again if the connection broke: on a busy machine the mock cluster sometimes drops one."""

    def list_topics(self, *args: Any, **more: Any) -> Any:
        """Return the topics of the cluster."""
        for _ in range(LIST_TRIES - 1):
            try:
                return super().list_topics(*args, **more)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._TRANSPORT:
                    raise
        return super().list_topics(*args, **more)


@contextmanager
def product_on(patch: pytest.MonkeyPatch, nodes: int = 1) -> Iterator[MockCluster]:
    """Run a cluster, and let the product in this process use it until ``patch`` is undone.

    Pass the ``monkeypatch`` of the test. If the test and the cluster replaced the same function with two different MonkeyPatch objects, the
    later undo would put the cluster's function back, and the following tests would call a cluster that has ended.

    The mock cluster stores the ends of transactions without a checksum, creates and trims topics only by C functions, and its topics have
    no settings.
    """

    checked, described, committed = clients.consumer, admin.Topics.ids, history.committed_offset

    def unchecked(settings: Mapping[str, Any], logger: ClientLog | None = None) -> Consumer:
        return checked({**settings, "check.crcs": False}, logger)

    def ids(topics: admin.Topics, names: Iterable[str], timeout_s: float = admin.ADMIN_TIMEOUT_S) -> dict[str, str]:
        found = described(topics, names, timeout_s)
        return {name: cluster.ids.get(name, each) for name, each in found.items() if cluster.ids.get(name) != ""}

    def committed_offset(kafka: Mapping[str, Any], group: str, *place: Any) -> int:
        return -1 if group in cluster.deleted_groups else committed(kafka, group, *place)

    with MockCluster(nodes) as cluster:
        patch.setattr(clients, "consumer", unchecked)
        patch.setattr(clients, "AdminClient", PatientAdmin)
        patch.setattr(admin.Topics, "create", lambda _, topic, partitions, *__, **___: cluster.create(topic, partitions))
        patch.setattr(admin.Topics, "ids", ids)
        patch.setattr(own_topics, "guard", lambda *_: [])
        patch.setattr(positions, "guard_transactions", lambda _: [])
        patch.setattr(positions, "committed_offset", committed_offset)
        patch.setattr(defined_positions, "delete_group", lambda _, group: cluster.deleted_groups.add(group))
        yield cluster
