"""Positions that administrators move: records are repeated or skipped as confirmed, once, whatever is killed."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka.appender import Appender
from bascule.kafka.history import TopicHistory
from bascule.kafka.lineage import PartitionLineage
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines import control, driver
from bascule.pipelines.offset_moves import OffsetMoves, OffsetsRefused
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.writer.control import OffsetMove, OffsetsWish, PipelineState
from bascule.writer.position import COMMON, MOVED, MovedMark, Position, position_key
from tests.scenarios import test_control
from tests.scenarios.operating import RUNNING, STOPPED, TIMEOUT_S, KillAt, Killed, Operator
from tests.scenarios.sparkless import Bridge, Running
from tests.support.crash_points import at_crash_points
from tests.support.system import wait_for

bridge = test_control.bridge
topics = test_control.topics
operator = test_control.operator
PLACES = ["offsets.before", "offsets.after"]


def own(bridge: Bridge, name: str = "x") -> Position:
    return bridge.stored()[bridge.positions.own_key(name)]


def handled_count(bridge: Bridge, name: str = "x") -> int:
    """Return how many requests about a divert were handled, as a plan says it."""
    return MovedMark.of(bridge.stored().get(f"{MOVED}divert:{name}")).number


def move(operator: Operator, to: int, request: str = "r1", *, offset: int | None = None, name: str = "x") -> OffsetsWish:
    """Ask for the position of a stopped divert to move."""
    at = own(operator.bridge, name)
    topic_id = operator.bridge.topics.id(at.topic)
    moves = (OffsetMove(at.topic, topic_id, at.partition, at.offset if offset is None else offset, to),)
    wish = OffsetsWish(request, moves, "ann", 1, handled_count(operator.bridge, name))
    operator.topics.want(f"divert:{name}", wish)
    return wish


def handled(operator: Operator, running: Running, request: str, pipeline: str = "divert:x") -> str:
    """Return the error with which the driver reports a request."""

    def reported() -> bool:
        running.driver.poll()
        report = operator.topics.reports(TIMEOUT_S).pipelines.get(pipeline)
        return report is not None and report.offsets_request == request

    wait_for(reported, f"request {request} to be reported")
    return operator.topics.reports(TIMEOUT_S).pipelines[pipeline].offsets_error


def stopped(operator: Operator, running: Running, name: str = "x") -> None:
    operator.want(f"divert:{name}", STOPPED)
    operator.follow(running)


def resumed(operator: Operator, running: Running, name: str = "x") -> None:
    operator.want(f"divert:{name}", RUNNING)
    operator.follow(running)
    running.settle()


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("group", ["", "g"])
def test_divert_moved_back_repeats_its_records_and_moved_forward_skips_them(bridge: Bridge, operator: Operator, group: str) -> None:
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("x", exclusive=True, group=group), bridge.divert("y", group=group)) as running:
        running.settle()
        begin = bridge.end()
        bridge.send("1", "2", taken_by=["x"])
        running.batch()
        stopped(operator, running)
        move(operator, begin, "back")
        assert handled(operator, running, "back") == ""
        assert own(bridge).offset == begin
        assert bridge.pins()["divert:x"] == begin, "the broker keeps the journal from the new position on"
        resumed(operator, running)
        bridge.send("3", taken_by=["x"])
        running.batch()
        assert bridge.carried("x") == ["1", "2", "1", "2", "3"]
        stopped(operator, running)
        bridge.send("4", taken_by=["x"])
        running.batch()
        move(operator, bridge.end(), "forward")
        assert handled(operator, running, "forward") == ""
        resumed(operator, running)
        bridge.send("5", taken_by=["x"])
        running.batch()
        assert list(running.driver.queries) == ["group:g" if group else COMMON]
    assert bridge.carried("x") == ["1", "2", "1", "2", "3", "5"]
    assert bridge.carried("y") == ["1", "2", "3", "4", "5"]
    assert (bridge.counted("x"), bridge.counted("y")) == (6, 5)
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
def test_records_that_a_divert_carried_alone_still_count_after_its_position_was_moved(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "JOIN_RECORDS", -1)
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        begin = bridge.end()
        stopped(operator, running)
        bridge.send("1", "2")
        resumed(operator, running)
        stopped(operator, running)
        assert own(bridge).carried.pipelines["x"].records == 2
        move(operator, begin)
        assert handled(operator, running, "r1") == ""
        assert bridge.counted("x") == 2
        resumed(operator, running)
        assert bridge.counted("x") == len(bridge.carried("x")) == 4


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("place", PLACES)
def test_driver_killed_while_positions_move_moves_them_once(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    bridge.journal.start_epoch(["x"])

    def diverts() -> tuple[DivertSpec, ...]:
        return bridge.divert("x", exclusive=True), bridge.divert("y")

    with bridge.running(*diverts()) as running:
        running.settle()
        begin = bridge.end()
        bridge.send("1", taken_by=["x"])
        running.batch()
        stopped(operator, running)
        with monkeypatch.context() as patched:
            at_crash_points(patched, KillAt(place))
            move(operator, begin)
            with pytest.raises(Killed):
                running.driver.poll()
    for _ in range(2):
        with bridge.running(*diverts()) as running:
            assert handled(operator, running, "r1") == ""
            assert running.query("divert:x") is None
            assert own(bridge).offset == begin
    with bridge.running(*diverts()) as running:
        resumed(operator, running)
        bridge.send("2", taken_by=["x"])
        running.batch()
        stopped(operator, running)
    with bridge.running(*diverts()) as running:  # the request was handled, and its position is where it was before
        resumed(operator, running)
    assert bridge.carried("x") == ["1", "1", "2"]
    assert bridge.carried("y") == ["1", "2"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("committed", [True, False])
def test_request_whose_transaction_is_in_doubt_is_handled_once(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    monkeypatch.setattr(control, "RETRY_S", 0.0)
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        begin = bridge.end()
        bridge.send("1")
        running.batch()
        stopped(operator, running)
        write = TransactionalWriter.write
        in_doubt(monkeypatch, committed=committed)
        move(operator, begin)
        assert handled(operator, running, "r1") == ""
        assert TransactionalWriter.write is write
        resumed(operator, running)
        assert bridge.carried("x") == ["1", "1"]


@pytest.mark.on_mock_cluster
def test_request_that_comes_again_after_a_later_one_is_refused_though_its_offsets_fit(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        begin = bridge.end()
        bridge.send("1", "2")
        running.batch()
        stopped(operator, running)
        wishes = []
        for request, offset in (("first", begin), ("second", bridge.end() - 1)):
            wishes.append(move(operator, offset, request))
            assert handled(operator, running, request) == ""
            resumed(operator, running)
            stopped(operator, running)
        repeated = bridge.carried("x")
        for wish in (*wishes, *wishes):
            operator.topics.want("divert:x", wish)
            assert "another request to move positions was handled after this plan was made" in handled(operator, running, wish.id)
        resumed(operator, running)
        assert bridge.carried("x") == repeated


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("committed", [True, False])
def test_refusal_is_told_as_it_was_stored_also_by_the_next_driver(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    monkeypatch.setattr(control, "RETRY_S", 0.0)
    bridge.journal.start_epoch()
    diverts = bridge.divert("x"), bridge.divert("y")
    with bridge.running(*diverts) as running:
        running.settle()
        bridge.send("1")
        running.batch()
        stopped(operator, running)
        end = own(bridge).offset
        in_doubt(monkeypatch, committed=committed)
        refuse = OffsetMoves._moved

        def refused_once(*_: Any) -> Any:
            monkeypatch.setattr(OffsetMoves, "_moved", refuse)
            raise OffsetsRefused("this once")

        monkeypatch.setattr(OffsetMoves, "_moved", refused_once)
        move(operator, end - 1)
        assert handled(operator, running, "r1") == ("this once" if committed else "")
        assert own(bridge).offset == (end if committed else end - 1)
    with bridge.running(*diverts) as running:
        assert handled(operator, running, "r1") == ("this once" if committed else "")


def in_doubt(patch: pytest.MonkeyPatch, *, committed: bool) -> None:
    """Lose the answer of the next transaction that handles a request, which is committed or not."""
    write = TransactionalWriter.write

    def lost(writer: TransactionalWriter, outputs: Any, before: Any, after: Any, others: Any = None) -> None:
        moves = any(key.startswith(MOVED) for key in others or ())
        if committed or not moves:
            write(writer, outputs, before, after, others)
        if moves:
            patch.setattr(TransactionalWriter, "write", write)
            raise Unavailable("the answer is lost")

    patch.setattr(TransactionalWriter, "write", lost)


@pytest.mark.on_mock_cluster
def test_request_about_a_divert_without_a_position_is_refused(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        stopped(operator, running)
        moves = (OffsetMove(bridge.pipelines.topics.journal, bridge.topics.id(bridge.pipelines.topics.journal), 5, 0, 0),)
        operator.topics.want("divert:x", OffsetsWish("r1", moves))
        assert handled(operator, running, "r1") == f"divert:x has no position in {bridge.pipelines.topics.journal}-5"
        resumed(operator, running)
        bridge.send("1")
        running.batch()
    assert bridge.carried("x") == ["1"]


@pytest.mark.on_mock_cluster
def test_request_is_refused_if_the_position_has_moved_the_records_are_gone_or_the_topic_is_another(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        bridge.send("1", "2")
        running.batch()
        stopped(operator, running)
        at = own(bridge)
        journal = bridge.pipelines.topics.journal
        move(operator, 0, "moved", offset=at.offset - 1)
        text = f"the position in {journal}-0 is at offset {at.offset}, no longer at {at.offset - 1}"
        assert handled(operator, running, "moved") == text
        bridge.trim(at.offset - 1)
        move(operator, 0, "gone")
        text = f"the records of {journal}-0 from offset 0 are deleted: the first one is at offset {at.offset - 1}"
        assert handled(operator, running, "gone") == text
        operator.topics.want("divert:x", OffsetsWish("other", (OffsetMove(journal, "another", 0, at.offset, at.offset - 1),)))
        assert handled(operator, running, "other") == f"topic {journal!r} was deleted or recreated"
        assert own(bridge).offset == at.offset
        with monkeypatch.context() as patched:
            patched.setattr(PartitionLineage, "check_tail", partialmethod(PartitionLineage.check_tail, timeout_s=0.0))
            move(operator, bridge.end() + 9, "beyond")
            assert "has lost its tail" in handled(operator, running, "beyond")
        move(operator, at.offset - 1, "last")
        assert handled(operator, running, "last") == ""
        resumed(operator, running)
    assert bridge.carried("x") == ["1", "2", "2"]


@pytest.mark.on_mock_cluster
def test_divert_whose_records_were_deleted_continues_after_its_position_was_moved(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    diverts = bridge.divert("x"), bridge.divert("y")
    with bridge.running(*diverts) as running:
        running.settle()
        stopped(operator, running)
        bridge.send("1", "2")
        running.batch()
        bridge.trim(bridge.end() - 1)
    with bridge.running(*diverts) as running:
        operator.await_state(running, "divert:x", PipelineState.STOPPED)
        move(operator, bridge.end() - 1)
        assert handled(operator, running, "r1") == ""
        resumed(operator, running)
        bridge.send("3")
        running.batch()
    assert bridge.carried("x") == ["2", "3"]
    assert bridge.carried("y") == ["1", "2", "3"]


@pytest.mark.on_mock_cluster
def test_request_stored_while_no_driver_runs_is_handled_before_the_divert_starts(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    diverts = bridge.divert("x"), bridge.divert("y")
    with bridge.running(*diverts) as running:
        running.settle()
        begin = bridge.end()
        bridge.send("1")
        running.batch()
        stopped(operator, running)
    move(operator, begin)
    operator.want("divert:x", RUNNING)
    with bridge.running(*diverts) as running:
        assert handled(operator, running, "r1") == ""
        operator.follow(running)
        running.settle()
    assert bridge.carried("x") == ["1", "1"]
    assert bridge.carried("y") == ["1"]


@pytest.mark.on_mock_cluster
def test_request_about_a_divert_that_was_resumed_meanwhile_does_nothing_unless_it_still_fits(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        begin = bridge.end()
        bridge.send("1")
        running.batch()
        stopped(operator, running)
        wish = move(operator, begin, "unseen")
        operator.want("divert:x", RUNNING)
        wait_for(lambda: handled(operator, running, "unseen") == "", "the request before the resume")
        running.settle()
        running.settle()
        assert bridge.carried("x") == ["1", "1"]
        bridge.send("2")
        running.batch()
        operator.topics.want("divert:x", OffsetsWish("late", wish.moves))
        assert "no longer at" in handled(operator, running, "late")
        running.settle()
        running.settle()
        bridge.send("3")
        running.batch()
    assert bridge.carried("x") == ["1", "1", "2", "3"]
    assert bridge.carried("y") == ["1", "2", "3"]


def produce(bridge: Bridge, topic: str, *values: str) -> None:
    appender = Appender(bridge.pipelines.kafka)
    for value in values:
        appender.append(Outgoing(topic, None, value.encode(), partition=0)).result()
    appender.close()


def taken_in(bridge: Bridge) -> int:
    """Return the number of records for the broker."""
    history = TopicHistory(bridge.pipelines.kafka, bridge.pipelines.topics.ingress, 0)
    return sum(1 for _ in history.records(history.earliest(), history.latest(), committed=True))


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("place", ["", *PLACES])
def test_ingress_moved_back_sends_its_records_again_once(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    topic = f"{bridge.pipelines.topics.prefix}.source"
    bridge.topics.create(topic, 1, {})
    ingress = IngressSpec("in", "queue", (topic,), tasks=1)
    key = position_key("ingress:in", topic, 0)
    produce(bridge, topic, "a", "b", "c")

    def follow() -> None:
        with monkeypatch.context() as patched:
            at_crash_points(patched, KillAt(place))
            handled(operator, running, "r1", "ingress:in")

    with bridge.running(ingresses=(ingress,)) as running:
        running.query("ingress:in").batch(3)
        assert taken_in(bridge) == bridge.stored()[key].offset == 3
        operator.want("ingress:in", STOPPED)
        operator.follow(running)
        operator.topics.want("ingress:in", OffsetsWish("r1", (OffsetMove(topic, bridge.topics.id(topic), 0, 3, 1),)))
        if place:
            with pytest.raises(Killed):
                follow()
        else:
            follow()
    with bridge.running(ingresses=(ingress,)) as running:
        assert handled(operator, running, "r1", "ingress:in") == ""
        assert bridge.stored()[key].offset == 1
        operator.want("ingress:in", RUNNING)
        operator.follow(running)
        running.query("ingress:in").batch(3)
        assert taken_in(bridge) == 5
        assert bridge.stored()[key].offset == 3


def test_ingress_of_a_recreated_topic_continues_after_its_position_was_moved(bridge: Bridge, operator: Operator) -> None:
    topic = f"{bridge.pipelines.topics.prefix}.source"
    bridge.topics.create(topic, 1, {})
    ingress = IngressSpec("in", "queue", (topic,))
    key = position_key("ingress:in", topic, 0)
    produce(bridge, topic, "a")
    with bridge.running(ingresses=(ingress,)) as running:
        running.query("ingress:in").batch(1)
        operator.want("ingress:in", STOPPED)
        operator.follow(running)
    bridge.topics.delete([topic])
    bridge.topics.create(topic, 1, {})
    produce(bridge, topic, "b", "c")
    with bridge.running(ingresses=(ingress,)) as running:
        operator.topics.want("ingress:in", OffsetsWish("r1", (OffsetMove(topic, bridge.topics.id(topic), 0, 1, 0),)))
        assert handled(operator, running, "r1", "ingress:in") == ""
        assert bridge.stored()[key].topic_id == bridge.topics.id(topic)
        assert running.driver.queries["ingress:in"].stopped is None, "an error is reported that no longer holds"
        operator.want("ingress:in", RUNNING)
        operator.follow(running)
        running.query("ingress:in").batch(2)
        assert (taken_in(bridge), bridge.stored()[key].offset) == (3, 2)
