"""Requests to Kafka that come late, come twice, or whose answer is lost: nothing is lost, doubled or torn."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import KafkaException, Producer
from tests.scenarios.topics import Reader, create

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.positions import Position
from bascule.kafka.transactional import Output, TransactionalWriter
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import Pipelines
from bascule.testing.kafka_proxy import Action, Api, Injection, KafkaProxy

#: A client repeats a request after this time. Kafka's clients want it 1 s above the time that a fetch waits.
REQUEST_TIMEOUT_MS = 1500
#: Throttle time and error code: how the answer to an EndTxn begins.
END_TXN_ANSWER = struct.Struct(">ih")
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90


@pytest.fixture
def proxy(kafka: EmbeddedKafka) -> Iterator[KafkaProxy]:
    with KafkaProxy(kafka.port) as running:
        yield running


def end_txn_error(late: Injection) -> int:
    error: int = END_TXN_ANSWER.unpack_from(late.answer)[1]
    return error


def test_a_late_end_of_a_transaction_commits_half_of_the_next_one_of_a_naive_writer(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}.out"
    create(kafka.bootstrap, topic)
    naive = Producer(
        {"bootstrap.servers": proxy.bootstrap, "transactional.id": topic_prefix, "socket.timeout.ms": REQUEST_TIMEOUT_MS, "log_level": 0}
    )
    naive.init_transactions(30)
    naive.begin_transaction()
    naive.produce(topic, b"a1")
    late = proxy.inject(Api.END_TXN, Action.HOLD)
    naive.commit_transaction(30)  # repeated inside the client; nobody is told
    assert late.hit
    naive.begin_transaction()
    naive.produce(topic, b"b1")
    assert naive.flush(30) == 0
    late.release()
    assert end_txn_error(late) == 0
    naive.produce(topic, b"b2")
    with pytest.raises(KafkaException):
        naive.abort_transaction(30)
    with closing(Reader(kafka.bootstrap, topic)) as reader:
        # The application has said that there is no b; readers of committed records got the half of it.
        assert reader.read_until("b1") == ["a1", "b1"]



def at(offset: int) -> Position:
    return Position("journal", "id", 0, offset)


class Out:
    """A topic of its own for a writer behind a proxy."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.bootstrap, self.prefix, self.topic = kafka.bootstrap, prefix, f"{prefix}.out"
        pipelines = Pipelines(prefix, {"bootstrap.servers": kafka.bootstrap}, prefix="faults")
        Positions(pipelines, "").prepare_topics()
        create(kafka.bootstrap, self.topic)
        self.positions_topic = pipelines.positions_topic

    def writer(self, proxy: KafkaProxy) -> TransactionalWriter:
        return TransactionalWriter(behind(proxy), self.prefix, self.positions_topic, self.prefix)

    def records(self, *values: str) -> list[Output]:
        return [Output(self.topic, None, value.encode(), []) for value in values]

    def values(self, last: str, *, committed: bool = True) -> list[str]:
        with closing(Reader(self.bootstrap, self.topic, committed=committed)) as reader:
            return reader.read_until(last)


def behind(proxy: KafkaProxy) -> dict[str, str | int]:
    return {"bootstrap.servers": proxy.bootstrap, "socket.timeout.ms": REQUEST_TIMEOUT_MS, "log_level": 0}


@pytest.fixture
def out(kafka: EmbeddedKafka, topic_prefix: str) -> Out:
    return Out(kafka, topic_prefix)


def test_a_late_end_of_a_transaction_is_refused_where_each_has_an_incarnation_of_its_own(proxy: KafkaProxy, out: Out) -> None:
    with closing(out.writer(proxy)) as writer:
        writer.write(out.records("a1"), None, at(1))
        late = proxy.inject(Api.END_TXN, Action.HOLD)
        writer.write(out.records("a2"), at(1), at(2))
        assert writer.current() == at(2)
        writer.ahead(out.records("b1"), at(2))
        assert out.values("b1", committed=False) == ["a1", "a2", "b1"]
        late.release()
        assert end_txn_error(late) in (INVALID_PRODUCER_EPOCH, PRODUCER_FENCED)
        writer.abandon()
        writer.write(out.records("c1"), at(2), at(3))
    assert out.values("c1") == ["a1", "a2", "c1"]


#: What a writer of pipelines asks of Kafka.
WRITER_APIS = (
    Api.END_TXN,
    Api.INIT_PRODUCER_ID,
    Api.PRODUCE,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.FIND_COORDINATOR,
    Api.METADATA,
    Api.LIST_OFFSETS,
    Api.FETCH,
)
FAULTS = (Action.HOLD, Action.DELAY, Action.DROP_REPLY, Action.DUPLICATE)


@pytest.mark.parametrize("action", FAULTS)
@pytest.mark.parametrize("api", WRITER_APIS, ids=lambda api: api.name)
def test_a_writer_writes_once_whatever_becomes_of_a_request(proxy: KafkaProxy, out: Out, api: Api, action: Action) -> None:
    with closing(out.writer(proxy)) as writer:
        writer.write(out.records("a"), None, at(1))
        fault = proxy.inject(api, action)
        writer.write(out.records("b", "c"), at(1), at(2))
        assert fault.hit
        # What is held comes into the middle of another transaction, which is then given up.
        assert writer.current() == at(2)
        writer.ahead(out.records("never"), at(2))
        fault.release()
        writer.abandon()
        assert writer.current() == at(2)
        writer.write(out.records("d"), at(2), at(3))
        assert writer.current() == at(3)
    assert out.values("d") == ["a", "b", "c", "d"]
