"""Pipelines that administrators pause, stop and resume: nothing is lost, doubled or reordered, and other pipelines continue."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from bascule.config.openlineage import OpenLineage
from bascule.core.errors import BadRecord, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.appender import Appender
from bascule.kafka.compacted import Stored, TableReader
from bascule.kafka.control import ControlTopics
from bascule.kafka.positions import PositionReader
from bascule.pipelines import control, driver, queries
from bascule.pipelines.lineage_sender import lineage_of
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.writer.control import OffsetMove, OffsetsWish, PipelineReport, PipelineState, RestartWish, WantedState
from bascule.writer.position import COMMON, Position, PositionTaken, position_key, position_partition
from tests.scenarios.operating import PAUSED, RUNNING, STOPPED, TIMEOUT_S, KillAt, Killed, Operator
from tests.scenarios.sparkless import Bridge, without_spark
from tests.support.crash_points import at_crash_points
from tests.support.lineage_receiver import LineageReceiver
from tests.support.system import wait_for

#: Where a driver is killed while a divert is paused or resumed.
PLACES = [("hold.before", ""), ("hold.after", "g"), ("join.before", "g"), ("join.caught_up", ""), ("join.after", "g")]


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    without_spark(monkeypatch)
    monkeypatch.setattr(control, "LOOK_S", 0.0)
    return Bridge(kafka, topic_prefix)


@pytest.fixture
def topics(bridge: Bridge) -> Iterator[ControlTopics]:
    found = ControlTopics(bridge.pipelines.kafka, bridge.pipelines.topics)
    yield found
    found.close()


@pytest.fixture
def operator(bridge: Bridge, topics: ControlTopics) -> Operator:
    return Operator(bridge, topics)


@pytest.mark.on_mock_cluster
def test_paused_divert_of_a_group_keeps_its_messages_and_the_others_continue(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("x", exclusive=True), bridge.divert("y"), bridge.divert("z", group="g")) as running:
        running.settle()
        bridge.send("1", taken_by=["x"])
        running.batch()
        other = running.query("group:g")
        stood = bridge.end()
        operator.want("divert:x", PAUSED)
        operator.follow(running)
        assert running.query("group:g") is other, "the task of another group was touched"
        bridge.send("2", "3", taken_by=["x"])
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y"), bridge.carried("z")) == (["1"], ["1", "2", "3"], ["1", "2", "3"])
        assert bridge.pins() == {"divert:x": stood, COMMON: bridge.end(), "group:g": bridge.end()}
        operator.await_state(running, "divert:x", PipelineState.PAUSED)
        operator.want("divert:x", RUNNING)
        operator.follow(running)
        running.settle()
        assert list(running.driver.queries) == [COMMON, "group:g"]
        assert running.query("group:g") is other
        bridge.send("4", taken_by=["x"])
        running.batch()
    assert bridge.carried("x") == bridge.carried("y") == bridge.carried("z") == ["1", "2", "3", "4"]
    assert bridge.dead() == []
    assert set(bridge.pins()) == {COMMON, "group:g"}


@pytest.mark.on_mock_cluster
def test_runs_of_pipelines_reach_a_receiver_of_openlineage_events(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch([])
    with LineageReceiver() as receiver, lineage_of(OpenLineage(url=receiver.url), "demo", "kafka:9092") as lineage:
        with bridge.running(bridge.divert("x"), bridge.divert("y"), lineage=lineage) as running:
            running.settle()
            operator.await_state(running, "divert:x", PipelineState.RUNNING)
            operator.want("divert:x", PAUSED)
            operator.follow(running)
            operator.await_state(running, "divert:x", PipelineState.PAUSED)
            running.query(COMMON).fail(Unavailable("injected"))
            wait_for(lambda: running.driver.poll() or "FAIL" in receiver.types("divert.y"), "the failure to be told")
            operator.await_state(running, "divert:y", PipelineState.RUNNING)
        wait_for(lambda: receiver.types("divert.y")[-1] == "COMPLETE", "the end of the driver to be told")
    assert receiver.types("divert.x") == ["START", "COMPLETE"]
    assert receiver.types("divert.y") == ["START", "FAIL", "START", "COMPLETE"]
    (output,) = receiver.events[0]["outputs"]
    assert (output["namespace"], output["name"]) == ("kafka://kafka:9092", bridge.divert("x").target)


@pytest.mark.on_mock_cluster
def test_pipeline_paused_before_the_driver_starts_carries_nothing_until_resumed(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch(["x"])
    diverts = bridge.divert("x", exclusive=True, group="g"), bridge.divert("y")
    with bridge.running(*diverts) as running:
        running.settle()
        bridge.send("1", taken_by=["x"])
        running.batch()
    operator.want("divert:x", STOPPED)
    for text in "23":
        with bridge.running(*diverts) as running:
            running.settle()
            bridge.send(text, taken_by=["x"])
            running.batch()
            operator.await_state(running, "divert:x", PipelineState.STOPPED)
            assert running.query("divert:x") is None
    assert bridge.carried("x") == ["1"]
    assert bridge.carried("y") == ["1", "2", "3"]
    assert bridge.pins()["divert:x"] < bridge.end()
    with bridge.running(*diverts) as running:
        running.settle()
        operator.want("divert:x", RUNNING)
        operator.follow(running)
        running.settle()
        assert list(running.driver.queries) == [COMMON, "group:g"]
        bridge.send("4", taken_by=["x"])
        running.batch()
    assert bridge.carried("x") == bridge.carried("y") == ["1", "2", "3", "4"]
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
def test_divert_paused_before_it_ever_ran_begins_where_it_was_configured(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    operator.want("divert:new", PAUSED)
    with bridge.running(bridge.divert("new", group="g")) as running:
        running.settle()
        bridge.send("1")
        running.batch()
        assert bridge.carried("new") == []
        operator.want("divert:new", RUNNING)
        operator.follow(running)
        running.settle()
    assert bridge.carried("new") == ["1"]


@pytest.mark.on_mock_cluster
def test_all_diverts_of_a_group_are_paused_and_resumed_in_another_order(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    names = ("a", "b", "c")
    with bridge.running(*(bridge.divert(name, group="g") for name in names)) as running:
        running.settle()
        sent = 0
        for order, state in ((names, PAUSED), (("b", "c", "a"), RUNNING)):
            for name in order:
                operator.want(f"divert:{name}", state)
                operator.follow(running)
                sent += 1
                bridge.send(str(sent))
                running.batch()
        running.settle()
        assert list(running.driver.queries) == ["group:g"]
    for name in names:
        assert bridge.carried(name) == [str(number) for number in range(1, sent + 1)]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize(("place", "group"), PLACES)
def test_driver_killed_while_a_divert_is_paused_and_resumed_loses_and_repeats_nothing(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, place: str, group: str
) -> None:
    bridge.journal.start_epoch(["x"])
    kill = KillAt(place, most=1)

    def diverts() -> tuple[DivertSpec, ...]:
        return bridge.divert("x", exclusive=True, group=group), bridge.divert("y", group=group)

    def run(text: str) -> None:
        with bridge.running(*diverts()) as running:
            operator.follow(running)
            running.settle()
            bridge.send(text, taken_by=["x"])
            running.batch()

    run("1")
    with monkeypatch.context() as patched:
        for text, state in (("2", PAUSED), ("3", RUNNING)):
            with bridge.running(*diverts()) as running:
                running.settle()
                at_crash_points(patched, kill)
                operator.want("divert:x", state)
                try:
                    operator.follow(running)
                    running.settle()
                except Killed:
                    pass
            run(text)
            assert ("divert:x" in bridge.pins()) == (state is PAUSED)
            assert (bridge.carried("x")[-1:] == [text]) == (state is RUNNING)
    assert kill.kills
    assert bridge.carried("x") == bridge.carried("y") == ["1", "2", "3"]
    assert bridge.counted("x") == bridge.counted("y") == 3
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
def test_task_that_survives_the_pause_of_its_divert_carries_nothing_more(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        zombie = running.query(COMMON)
        operator.want("divert:x", PAUSED)
        operator.follow(running)
        bridge.send("1")
        with pytest.raises(PositionTaken):
            zombie.batch(bridge.end())
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == ([], ["1"])


@pytest.mark.on_mock_cluster
def test_restart_starts_the_task_again_also_after_an_error_that_is_not_retried(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y", group="g")) as running:
        running.settle()
        first, other = running.query(COMMON), running.query("group:g")
        first.fail(BadRecord("that cannot be carried"))
        operator.await_state(running, "divert:x", PipelineState.FAILED)
        assert "that cannot be carried" in operator.topics.reports(TIMEOUT_S).pipelines["divert:x"].error
        operator.topics.want("divert:x", RestartWish("1"))
        operator.await_state(running, "divert:x", PipelineState.RUNNING)
        again = running.query(COMMON)
        running.driver.poll()
        assert running.query(COMMON) is again is not first, "one request restarts once"
        assert running.query("group:g") is other
    with bridge.running(bridge.divert("x"), bridge.divert("y", group="g")) as running:
        started = running.query(COMMON)
        running.driver.poll()
        assert running.query(COMMON) is started, "a start satisfies earlier requests"


@pytest.mark.on_mock_cluster
def test_ingress_that_is_stopped_has_no_task_and_another_owner_until_resumed(bridge: Bridge, operator: Operator) -> None:
    topic = f"{bridge.pipelines.topics.prefix}.source"
    bridge.topics.create(topic, 1, {})
    ingress = IngressSpec("in", "queue", (topic,))
    key = position_key("ingress:in", topic, 0)
    with bridge.running(ingresses=(ingress,)) as running:
        owner = bridge.stored()[key].owner
        operator.want("ingress:in", STOPPED)
        operator.follow(running)
        assert running.query("ingress:in") is None
        assert bridge.stored()[key].owner not in ("", owner), "a task that Spark has not ended would continue"
        operator.await_state(running, "ingress:in", PipelineState.STOPPED)
    with bridge.running(ingresses=(ingress,)) as running:
        assert running.query("ingress:in") is None
        operator.want("ingress:in", RUNNING)
        operator.follow(running)
        assert running.query("ingress:in").active
        operator.await_state(running, "ingress:in", PipelineState.RUNNING)
        report = operator.topics.reports(TIMEOUT_S).pipelines["ingress:in"]
        assert (report.definition["topics"], report.sources, report.lag) == ([topic], ((topic, 0, 0, 0),), 0)
        assert operator.topics.reports(TIMEOUT_S).driver is not None
    ended = operator.topics.reports(TIMEOUT_S).driver
    assert ended is not None
    assert not ended.running


@pytest.mark.on_mock_cluster
def test_pipeline_whose_task_is_slow_to_end_is_paused_as_soon_as_it_has_ended(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "STOP_WAIT_S", 0.0)
    monkeypatch.setattr(control, "RETRY_S", 600.0)
    topic = f"{bridge.pipelines.topics.prefix}.source"
    bridge.topics.create(topic, 1, {})
    may_end = threading.Event()
    with bridge.running(ingresses=(IngressSpec("in", "queue", (topic,)),)) as running:
        monkeypatch.setattr(running.query("ingress:in"), "stop", lambda: may_end.wait(30))
        operator.want("ingress:in", PAUSED)
        wait_for(lambda: running.driver.poll() or running.driver.queries["ingress:in"].ending, "the request to be followed")
        assert operator.states().get("ingress:in") is not PipelineState.PAUSED
        may_end.set()
        wait_for(running.driver.queries["ingress:in"]._ending.done, "the end of the task, which no poll has seen")  # type: ignore[union-attr]
        operator.await_state(running, "ingress:in", PipelineState.PAUSED)
        assert running.query("ingress:in") is None


@pytest.mark.on_mock_cluster
def test_reports_of_removed_pipelines_are_deleted_and_disabled_ones_say_so(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("a"), bridge.divert("b")) as running:
        wait_for(lambda: running.driver.poll() or set(operator.states()) == {"divert:a", "divert:b"}, "the reports")
    operator.want("divert:b", PAUSED)
    with bridge.running(bridge.divert("b", enabled=False)) as running:
        wait_for(lambda: running.driver.poll() or operator.states() == {"divert:b": PipelineState.DISABLED}, "the reports")


@pytest.mark.on_mock_cluster
def test_broker_shows_why_a_paused_divert_keeps_the_journal(bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MIRROR_S", 0.0)
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        bridge.send("1")

        def said(state: WantedState) -> bool:
            running.driver.poll()
            pins = {pin.name: pin.reason for pin in bridge.keepers().found(bridge.snapshot())}
            return pins["divert:x"] == f"an administrator has {state.value} the divert; to continue: bascule divert resume x"

        for state in (PAUSED, STOPPED):
            operator.want("divert:x", state)
            operator.follow(running)
            wait_for(partial(said, state), "the reason")
        bridge.send("2", "3")
        key = bridge.positions.own_key("x")
        at = bridge.stored()[key]
        operator.topics.want("divert:x", OffsetsWish("r1", (OffsetMove(at.topic, at.topic_id, 0, at.offset, at.offset + 1),)))
        operator.follow(running)
        assert bridge.stored()[key].offset == at.offset + 1
        wait_for(partial(said, STOPPED), "the reason at the new position")


@pytest.mark.on_mock_cluster
def test_driver_replaces_reports_that_it_cannot_read(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")):
        pass
    appender = Appender(bridge.pipelines.kafka)
    for key in (b"divert:x", b"divert:removed", b"driver"):
        appender.append(Outgoing(bridge.pipelines.topics.reports, key, b'{"version":2}', partition=0)).result()
    appender.close()
    with bridge.running(bridge.divert("x")) as running:
        running.driver.poll()
        wait_for(lambda: all(future.done() for future in running.driver._control._writing), "the reports to be stored")
        assert operator.states() == {"divert:x": PipelineState.RUNNING}


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("committed", [True, False])
def test_divert_resumed_before_the_pause_is_known_to_be_stored_is_carried_once(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("x", exclusive=True), bridge.divert("y")) as running:
        running.settle()
        part = Positions.part

        def in_doubt(*arguments: Any) -> None:
            if committed:
                part(*arguments)
            raise Unavailable("the answer is lost")

        with monkeypatch.context() as patched:
            patched.setattr(Positions, "part", in_doubt)
            operator.want("divert:x", PAUSED)
            wait_for(lambda: running.driver.poll() or list(running.driver._control._steering.due), "the attempt to pause")
            bridge.send("1", taken_by=["x"])
            running.batch()
        operator.want("divert:x", RUNNING)
        monkeypatch.setattr(control, "RETRY_S", 0.0)
        running.driver._control._step_due_s = 0.0
        operator.follow(running)
        running.settle()
        assert list(running.driver.queries) == [COMMON]
        bridge.send("2", taken_by=["x"])
        running.batch()
    assert bridge.carried("x") == bridge.carried("y") == ["1", "2"]
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
def test_divert_of_a_failed_group_is_paused_and_the_rest_of_the_group_starts_again(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), bridge.divert("y")) as running:
        running.settle()
        running.query(COMMON).fail(BadRecord("the target of x does not exist"))
        running.driver.poll()
        assert running.driver.queries[COMMON].stopped is not None
        operator.want("divert:x", PAUSED)
        operator.follow(running)
        bridge.send("1")
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == ([], ["1"])
        operator.want("divert:x", RUNNING)
        operator.follow(running)
        running.settle()
    assert bridge.carried("x") == bridge.carried("y") == ["1"]


@pytest.mark.on_mock_cluster
def test_divert_paused_by_a_driver_that_is_being_replaced_is_known_to_its_successor(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch()
    diverts = bridge.divert("x", group="g"), bridge.divert("y", group="g")
    with bridge.running(*diverts) as replaced:
        replaced.settle()
        operator.want("divert:x", PAUSED)
        take_all = Positions._taken_all

        def late(positions: Positions, keys: Mapping[str, str]) -> dict[str, Position]:
            patched.setattr(Positions, "_taken_all", take_all)
            assert replaced.driver._holds.hold("divert:x")
            return take_all(positions, keys)

        with monkeypatch.context() as patched:
            patched.setattr(Positions, "_taken_all", late)
            with bridge.running(*diverts) as running:
                bridge.send("1")
                running.batch()
                assert (bridge.carried("x"), bridge.carried("y")) == ([], ["1"])
                operator.want("divert:x", RUNNING)
                operator.follow(running)
                running.settle()
                assert list(running.driver.queries) == ["group:g"]
    assert bridge.carried("x") == bridge.carried("y") == ["1"]


@pytest.mark.on_mock_cluster
def test_wishes_are_read_behind_a_barrier_again_after_kafka_did_not_answer(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        read, barriers, failing = TableReader.read, list[str](), True

        def reading(reader: TableReader, *arguments: Any) -> dict[bytes, Stored]:
            if failing:
                raise Unavailable("no answer")
            return read(reader, *arguments)

        def behind_barrier(reader: TableReader, *arguments: Any) -> dict[bytes, Stored]:
            barriers.append(reader._at[0].topic)
            return reading(reader, *arguments)

        monkeypatch.setattr(control, "REPORT_S", 0.0)
        monkeypatch.setattr(TableReader, "read", reading)
        monkeypatch.setattr(TableReader, "read_behind_barrier", behind_barrier)
        running.driver._control.poll()
        failing = False
        running.driver._control.poll()
        assert barriers == [bridge.pipelines.topics.control], "a former leader may answer a new reader with wishes from before a pause"
        running.driver._control.poll()
        assert len(barriers) == 1


@pytest.mark.on_mock_cluster
def test_report_that_a_replaced_driver_overwrites_is_written_again(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        operator.await_state(running, "divert:x", PipelineState.RUNNING)
        stale = PipelineReport(PipelineState.PAUSED, "replaced", 1)
        for future in operator.topics.report({"divert:x": stale}):
            future.result()
        monkeypatch.setattr(control, "REPORT_S", 0.0)
        monkeypatch.setattr(control, "WHOLE_REPORT_S", 0.0)
        operator.await_state(running, "divert:x", PipelineState.RUNNING)


@pytest.mark.on_mock_cluster
def test_journal_is_kept_for_a_divert_that_is_paused_while_the_broker_reads_the_positions(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch()
    group = position_partition(bridge.positions.common_key)
    name = next(name for name in "abcdef" if position_partition(bridge.positions.own_key(name)) != group)
    with bridge.running(bridge.divert(name), bridge.divert("y")) as running:
        running.settle()
        stood = bridge.end()
        read = PositionReader.read_behind_barrier

        def torn(reader: PositionReader) -> dict[str, Position]:
            """Read the partition of the group later than the others."""
            monkeypatch.setattr(PositionReader, "read_behind_barrier", read)
            before = read(reader)
            operator.want(f"divert:{name}", PAUSED)
            operator.follow(running)
            bridge.send("1")
            running.batch()
            return before | {key: at for key, at in read(reader).items() if position_partition(key) == group}

        monkeypatch.setattr(PositionReader, "read_behind_barrier", torn)
        assert min(bridge.pins().values()) == stood < bridge.end()
