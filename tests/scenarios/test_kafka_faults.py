"""Requests to Kafka that arrive late or twice, or whose answer is lost: nothing is lost, duplicated or torn."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

import pytest
from confluent_kafka import Consumer, KafkaException, Message

from bascule.client import Context, Queue, connect
from bascule.core.errors import BasculeError
from bascule.core.kafka_records import Output
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients, eviction
from bascule.kafka.election import Election, NotAllowed
from bascule.kafka.eviction import evict
from bascule.kafka.instance import SameInstance
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.position import Position
from tests.scenarios.topics import Reader, create
from tests.support.client import all_in
from tests.support.kafka_proxy import Action, Api, Injection, KafkaProxy
from tests.support.side_by_side import side_by_side
from tests.support.system import LONE_SESSION_S, PYTHON_FAILOVER, WAIT_S, System, wait_for

#: A client repeats a request after this time. Kafka's client requires 1 s more than the maximum wait of a fetch.
REQUEST_TIMEOUT_MS = 1500
#: Throttle time and error code: the beginning of the answer to an EndTxn.
END_TXN_ANSWER = struct.Struct(">ih")
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90


@pytest.fixture
def proxy(kafka: EmbeddedKafka) -> Iterator[KafkaProxy]:
    with KafkaProxy(kafka.port) as running:
        yield running


def end_txn_error(late: Injection) -> int:
    error: int = END_TXN_ANSWER.unpack_from(late.answer)[1]
    return error


def test_late_end_of_a_transaction_commits_half_of_the_next_transaction_of_a_naive_writer(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}.out"
    create(kafka.bootstrap, topic)
    naive = clients.producer(
        {"bootstrap.servers": proxy.bootstrap, "transactional.id": topic_prefix, "socket.timeout.ms": REQUEST_TIMEOUT_MS, "log_level": 0}
    )
    naive.init_transactions(30)
    naive.begin_transaction()
    naive.produce(topic, b"a1")
    late = proxy.inject(Api.END_TXN, Action.HOLD)
    naive.commit_transaction(30)  # repeated inside the client; no caller is told
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
        # The application was told that b does not exist; readers of committed records got half of the transaction.
        assert reader.read_until("b1") == ["a1", "b1"]


def at(offset: int) -> Position:
    return Position("journal", "id", 0, offset)


TOPICS = JournalTopics("faults")


def prepare_positions(kafka: EmbeddedKafka) -> None:
    """Create the topic of positions that all writers share."""
    Positions(PipelinesSpec("faults", {"bootstrap.servers": kafka.bootstrap}, topics=TOPICS), "").prepare_topics()


class Out:
    """Return a topic for a writer behind a proxy."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.bootstrap, self.prefix, self.topic = kafka.bootstrap, prefix, f"{prefix}.out"
        create(kafka.bootstrap, self.topic)

    def writer(self, proxy: KafkaProxy) -> TransactionalWriter:
        return TransactionalWriter(behind(proxy), self.prefix, TOPICS.positions, self.prefix)

    def records(self, *values: str) -> list[Output]:
        return [Output(self.topic, None, value.encode(), []) for value in values]

    def values(self, last: str, *, committed: bool = True) -> list[str]:
        with closing(Reader(self.bootstrap, self.topic, committed=committed)) as reader:
            return reader.read_until(last)


def behind(proxy: KafkaProxy) -> dict[str, str | int]:
    return {"bootstrap.servers": proxy.bootstrap, "socket.timeout.ms": REQUEST_TIMEOUT_MS, "log_level": 0}


@pytest.fixture
def out(kafka: EmbeddedKafka, topic_prefix: str) -> Out:
    prepare_positions(kafka)
    return Out(kafka, topic_prefix)


def test_late_end_of_a_transaction_is_refused_when_each_transaction_has_its_own_incarnation(proxy: KafkaProxy, out: Out) -> None:
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


#: Requests of a pipeline's writer to Kafka.
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
#: Only a new writer asks these: the incarnation of one that has written is kept, and knows the position.
FIRST_APIS = (Api.INIT_PRODUCER_ID, Api.FIND_COORDINATOR, Api.METADATA, Api.LIST_OFFSETS, Api.FETCH)
FAULTS = (Action.HOLD, Action.DELAY, Action.DROP_REPLY, Action.DUPLICATE)
#: A commit in doubt, and its requests. Every run injects each fault into these; the other requests get a lost answer only.
CORE_APIS, MORE_APIS = WRITER_APIS[:4], WRITER_APIS[4:]
WRITER_CASES = [
    *(pytest.param(action, CORE_APIS, id=action) for action in (*FAULTS, Action.MUTE_REPLY)),
    pytest.param(Action.DROP_REPLY, MORE_APIS, id="drop-reply-more"),
    *(
        pytest.param(action, MORE_APIS, id=f"{action}-more", marks=pytest.mark.slow)
        for action in (Action.HOLD, Action.DELAY, Action.DUPLICATE)
    ),
]


@pytest.mark.parametrize(("action", "apis"), WRITER_CASES)
def test_writer_writes_each_record_once_under_every_request_fault(
    kafka: EmbeddedKafka, topic_prefix: str, action: Action, apis: Sequence[Api]
) -> None:
    def run(api: Api) -> None:
        with KafkaProxy(kafka.port) as proxy:
            write_under_a_fault(proxy, Out(kafka, f"{topic_prefix}-{api.name.lower()}"), api, action)

    prepare_positions(kafka)
    side_by_side(run, apis)


def write_under_a_fault(proxy: KafkaProxy, out: Out, api: Api, action: Action) -> None:
    with ExitStack() as stack:
        writer = stack.enter_context(closing(out.writer(proxy)))
        writer.write(out.records("a"), None, at(1))
        if api in FIRST_APIS:
            writer = stack.enter_context(closing(out.writer(proxy)))
        fault = proxy.inject(api, action)
        writer.write(out.records("b", "c"), at(1), at(2))
        assert fault.hit
        # The delayed request arrives in the middle of another transaction, which is then aborted.
        assert writer.current() == at(2)
        writer.ahead(out.records("never"), at(2))
        fault.release()
        writer.abandon()
        assert writer.current() == at(2)
        writer.write(out.records("d"), at(2), at(3))
        assert writer.current() == at(3)
    assert out.values("d") == ["a", "b", "c", "d"]


#: Requests of a candidate in the election to Kafka.
ELECTION_APIS = (Api.FIND_COORDINATOR, Api.JOIN_GROUP, Api.SYNC_GROUP, Api.OFFSET_FETCH, Api.HEARTBEAT, Api.OFFSET_COMMIT)
#: Some of these requests are lost for a while, heartbeats included, and no other candidate may be elected meanwhile.
SESSION_S = 12


class Candidate:
    """Stand for election behind a proxy."""

    def __init__(self, stack: ExitStack, proxy: KafkaProxy, group: str, instance: str) -> None:
        self.elected = False
        self.errors: list[BasculeError] = []
        self.doubts: list[str] = []
        self.election = Election(
            behind(proxy), group, group, instance, SESSION_S,
            on_change=self._told, on_error=self.errors.append, on_doubt=self.doubts.append,
        )  # fmt: skip
        self._left = False
        stack.callback(self.leave)

    def _told(self, elected: bool) -> None:
        self.elected = elected

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.election.close(resign=True)


def inject_all(proxy: KafkaProxy, apis: Sequence[Api], action: Action) -> dict[Api, Injection]:
    """Inject a fault into the next request of each kind."""
    return {api: proxy.inject(api, action) for api in apis}


def let_join(faults: Mapping[Api, Injection]) -> None:
    """The client would wait for the answer to JoinGroup for the whole rebalance timeout."""
    join = faults.get(Api.JOIN_GROUP)
    if join is not None and join.action is Action.HOLD:
        wait_for(lambda: join.hit, "a request to join")
        join.release()


def test_election_succeeds_under_request_faults_and_ignores_late_requests(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    side_by_side(lambda action: elect_under_faults(kafka, f"{topic_prefix}-{action}", action), FAULTS)


def elect_under_faults(kafka: EmbeddedKafka, group: str, action: Action) -> None:
    create(kafka.bootstrap, group)
    with ExitStack() as stack:
        proxies = [stack.enter_context(KafkaProxy(kafka.port)) for _ in range(2)]
        faults = inject_all(proxies[0], ELECTION_APIS, action)
        first = Candidate(stack, proxies[0], group, "one")
        let_join(faults)
        wait_for(lambda: first.elected, "the first to be elected")
        second = Candidate(stack, proxies[1], group, "two")
        wait_for(first.election.confirm, "the first to be confirmed")
        assert not second.election.confirm()
        wait_for(lambda: all(fault.hit for fault in faults.values()), "each request to be met")
        first.leave()
        wait_for(lambda: second.elected, "the second to be elected")
        for fault in faults.values():
            fault.release()
        wait_for(second.election.confirm, "the second to be confirmed")
        assert not first.elected
        assert not first.errors
        assert not second.errors


def test_candidate_with_duplicated_join_request_joins_again_and_is_elected(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str
) -> None:
    create(kafka.bootstrap, topic_prefix)
    with ExitStack() as stack:
        twice = proxy.inject(Api.JOIN_GROUP, Action.DUPLICATE)
        fenced = Candidate(stack, proxy, topic_prefix, "one")
        wait_for(lambda: fenced.doubts, "the candidate to be fenced")
        assert twice.hit
        wait_for(fenced.election.confirm, "the candidate to be confirmed")
        assert not fenced.errors
        assert fenced.doubts[-1] == ""


def test_of_two_candidates_with_the_same_name_one_gets_an_error_and_the_other_is_elected(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str
) -> None:
    create(kafka.bootstrap, topic_prefix)
    with ExitStack() as stack:
        first = Candidate(stack, proxy, topic_prefix, "one")
        wait_for(first.election.confirm, "the first to be confirmed")
        second = Candidate(stack, proxy, topic_prefix, "one")
        wait_for(lambda: first.errors or second.errors, "one of them to be told")
        left, told = (first, second) if second.errors else (second, first)
        assert isinstance(told.errors[0], SameInstance)
        wait_for(left.election.confirm, "the other to be confirmed")
        assert not left.errors


class LateLeave(Consumer):
    """A client whose thread is paused after it has begun to leave its group: some polls serve nothing."""

    paused = -1

    def unsubscribe(self) -> None:
        self.paused = 10
        super().unsubscribe()

    def poll(self, timeout: float | None = None) -> Message | None:
        if self.paused > 0:
            self.paused -= 1
            return None
        return super().poll(timeout) if timeout is not None else super().poll()


def members(kafka: EmbeddedKafka, group: str) -> list[str]:
    admin = clients.admin({"bootstrap.servers": kafka.bootstrap})  # keep the reference: its futures end with it
    found = admin.describe_consumer_groups([group])[group].result(WAIT_S)
    return [member.group_instance_id for member in found.members]


def test_evicted_member_has_left_the_group_though_its_remover_was_paused(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(kafka.bootstrap, topic_prefix)
    with ExitStack() as stack:
        lost = Candidate(stack, proxy, topic_prefix, "one")
        wait_for(lost.election.confirm, "the first to be elected")
        lost.election.close(resign=False)
    monkeypatch.setattr(clients, "consumer", LateLeave)
    assert evict({"bootstrap.servers": kafka.bootstrap}, topic_prefix, topic_prefix, "one", lost.election.member, LONE_SESSION_S)
    assert members(kafka, topic_prefix) == []


def test_candidate_that_is_evicted_twice_in_a_minute_stands_for_election_again(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(kafka.bootstrap, topic_prefix)

    class Fencing(Consumer):
        """A client that leaves the group when the candidate has learned that another client has its name."""

        def unsubscribe(self) -> None:
            wait_for(lambda: candidate.doubts[-1:] != [""] or candidate.errors, "the candidate to be fenced")
            super().unsubscribe()

    with ExitStack() as stack:
        candidate = Candidate(stack, proxy, topic_prefix, "one")
        for _ in range(3):
            wait_for(lambda: (candidate.election.confirm() and candidate.doubts[-1] == "") or candidate.errors, "the election")
            assert candidate.errors == []
            member = candidate.election.member
            with monkeypatch.context() as patched:
                patched.setattr(eviction.clients, "consumer", Fencing)
                assert evict({"bootstrap.servers": kafka.bootstrap}, topic_prefix, topic_prefix, "one", member, SESSION_S)
        wait_for(lambda: candidate.election.confirm() or candidate.errors, "the candidate to be elected")
        assert candidate.errors == []
        assert candidate.doubts[-1] == ""


def test_candidate_that_resigns_has_left_the_group_though_its_thread_was_paused(
    kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(kafka.bootstrap, topic_prefix)
    monkeypatch.setattr(clients, "consumer", LateLeave)
    with ExitStack() as stack:
        candidate = Candidate(stack, proxy, topic_prefix, "one")
        wait_for(candidate.election.confirm, "the candidate to be elected")
    assert members(kafka, topic_prefix) == []


def test_error_for_session_timeout_refused_by_kafka_names_the_setting(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    create(kafka.bootstrap, topic_prefix)
    errors: list[BasculeError] = []
    election = Election(
        {"bootstrap.servers": kafka.bootstrap}, topic_prefix, topic_prefix, "one", 2, on_change=lambda _: None, on_error=errors.append
    )
    wait_for(lambda: errors, "the refusal")
    assert isinstance(errors[0], NotAllowed)
    assert "broker.session_timeout_s must lie between" in str(errors[0])
    election.close(resign=True)


#: Requests of a broker to Kafka at the start of an epoch.
START_APIS = (Api.METADATA, Api.LIST_OFFSETS, Api.FETCH, Api.INIT_PRODUCER_ID, Api.PRODUCE, *ELECTION_APIS[:4])
#: Requests that a broker sends all the time.
STEADY_APIS = (Api.PRODUCE, Api.HEARTBEAT)


class Behind:
    """A broker whose Kafka is behind a proxy, and a client of the broker."""

    def __init__(self, system: System, proxy: KafkaProxy) -> None:
        self.system, self.proxy = system, proxy

    def client(self) -> Context:
        return connect(PYTHON_FAILOVER.format(self.system.url), timeout_s=120.0)


@pytest.fixture(scope="module")
def broker(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    env = {"BASCULE_KAFKA__CLIENT__SOCKET_TIMEOUT_MS": str(REQUEST_TIMEOUT_MS)}
    with (
        KafkaProxy(kafka.port) as proxy,
        System(proxy.bootstrap, tmp_path_factory.mktemp("faults"), prefix="request-faults", env=env) as system,
    ):
        yield Behind(system, proxy)


@pytest.mark.parametrize("action", [*FAULTS, Action.MUTE_REPLY])
@pytest.mark.parametrize("api", STEADY_APIS, ids=lambda api: api.name)
def test_broker_stores_each_message_once_under_every_request_fault(broker: Behind, name: str, api: Api, action: Action) -> None:
    queue, bodies = Queue(name), [str(n) for n in range(30)]
    with broker.client() as context:
        producer = context.producer(queue)
        producer.send_many(bodies[:10])
        fault = broker.proxy.inject(api, action)
        producer.send_many(bodies[10:20])
        wait_for(lambda: fault.hit, f"a {api.name}")
        fault.release()
        producer.send_many(bodies[20:])
        assert all_in(context, queue, 30) == bodies
        wait_for(lambda: broker.system.depth(name) == 0, "the acknowledgements")


@pytest.mark.parametrize("action", FAULTS)
def test_starting_broker_restores_all_messages_under_every_request_fault(broker: Behind, name: str, action: Action) -> None:
    queue, bodies = Queue(name), [str(n) for n in range(20)]
    with broker.client() as context:
        producer = context.producer(queue)
        producer.send_many(bodies[:10])
        broker.system.broker.kill()
        faults = inject_all(broker.proxy, START_APIS, action)
        broker.system.broker.launch()
        let_join(faults)
        broker.system.broker.wait_ready()
        wait_for(lambda: all(fault.hit for fault in faults.values()), "each request to be met")
        producer.send_many(bodies[10:15])
        for fault in faults.values():
            fault.release()
        producer.send_many(bodies[15:])
        assert all_in(context, queue, 20) == bodies
        wait_for(lambda: broker.system.depth(name) == 0, "the acknowledgements")
