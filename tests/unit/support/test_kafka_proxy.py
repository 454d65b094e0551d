"""Requests through the Kafka proxy. Two sockets take the places of the client and of Kafka."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.scenarios.test_kafka_faults import ELECTION_APIS, FAULTS, START_APIS, STEADY_APIS, WRITER_CASES
from tests.support.kafka_proxy import Action, Api, KafkaProxy, read_frame
from tests.support.system import wait_for

SOON_S = 10.0
#: The minimum number of requests with a fault in a run.
FAULTS_MIN = 40


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def request(api: Api, number: int) -> bytes:
    return frame(struct.pack(">hhi", api, 0, number))


def answer(number: int, body: bytes = b"") -> bytes:
    return frame(struct.pack(">i", number) + body)


class Ends:
    """A proxy, and the client's and Kafka's ends of a connection through it."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.kafka_port: int = listener.getsockname()[1]
        self.proxy = KafkaProxy(self.kafka_port)
        self.client = socket.create_connection(("127.0.0.1", self.proxy.port), SOON_S)
        self.kafka, _ = listener.accept()
        self.kafka.settimeout(SOON_S)
        listener.close()

    def ask(self, api: Api, number: int) -> None:
        """Send a request that Kafka receives and answers."""
        self.client.sendall(request(api, number))
        self.serve(api, number)

    def serve(self, api: Api, number: int) -> None:
        assert read_frame(self.kafka) == request(api, number)
        self.kafka.sendall(answer(number))


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    with ends.proxy, ends.client, ends.kafka:
        yield ends


def test_request_without_a_fault_passes_and_is_counted(ends: Ends) -> None:
    ends.proxy.inject(Api.END_TXN, Action.DROP_REPLY)
    ends.ask(Api.PRODUCE, 1)
    assert read_frame(ends.client) == answer(1)
    assert ends.proxy.passed == {Api.PRODUCE: 1}


def test_held_request_reaches_kafka_on_release_though_its_client_has_gone(ends: Ends) -> None:
    late = ends.proxy.inject(Api.END_TXN, Action.HOLD)
    ends.client.sendall(request(Api.END_TXN, 1))
    ends.client.close()
    serving = threading.Thread(target=ends.serve, args=(Api.END_TXN, 1))
    serving.start()
    wait_for(lambda: late.hit, "the request")
    late.release()
    serving.join(SOON_S)
    assert not serving.is_alive()


def test_dropped_reply_closes_the_connection_after_kafka_has_executed_the_request(ends: Ends) -> None:
    lost = ends.proxy.inject(Api.END_TXN, Action.DROP_REPLY)
    ends.ask(Api.END_TXN, 1)
    assert read_frame(ends.client) == b""
    assert lost.hit


def test_muted_reply_leaves_the_connection_open(ends: Ends) -> None:
    ends.proxy.inject(Api.END_TXN, Action.MUTE_REPLY)
    ends.ask(Api.END_TXN, 1)
    ends.ask(Api.END_TXN, 2)
    assert read_frame(ends.client) == answer(2)


def test_duplicated_request_gets_one_reply(ends: Ends) -> None:
    ends.proxy.inject(Api.PRODUCE, Action.DUPLICATE)
    ends.ask(Api.PRODUCE, 1)
    ends.serve(Api.PRODUCE, 1)
    ends.ask(Api.PRODUCE, 2)
    assert [read_frame(ends.client) for _ in range(2)] == [answer(1), answer(2)]


@pytest.mark.parametrize("api", [Api.METADATA, Api.FIND_COORDINATOR])
def test_reply_naming_the_kafka_node_names_the_proxy_instead(ends: Ends, api: Api) -> None:
    ends.client.sendall(request(api, 1))
    read_frame(ends.kafka)
    ends.kafka.sendall(answer(1, b"127.0.0.1" + struct.pack(">i", ends.kafka_port)))
    assert read_frame(ends.client) == answer(1, b"127.0.0.1" + struct.pack(">i", ends.proxy.port))


def test_every_run_injects_many_faults_of_each_kind_into_critical_requests() -> None:
    written = [api for case in WRITER_CASES if not case.marks for api in case.values[1]]
    met = Counter([*written, *len(FAULTS) * [*ELECTION_APIS, *START_APIS, *STEADY_APIS]])
    assert FAULTS == (Action.HOLD, Action.DELAY, Action.DROP_REPLY, Action.DUPLICATE)
    transactions = (Api.END_TXN, Api.INIT_PRODUCER_ID, Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN)
    groups = (Api.JOIN_GROUP, Api.SYNC_GROUP, Api.HEARTBEAT, Api.OFFSET_FETCH, Api.OFFSET_COMMIT, Api.LIST_OFFSETS)
    assert all(met[api] >= len(FAULTS) for api in (*transactions, *groups))
    assert met.total() >= FAULTS_MIN
