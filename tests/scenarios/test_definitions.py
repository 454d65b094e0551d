"""Ingresses that are defined at run time: each record is carried once, whatever is killed, and the other pipelines are not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.journal.records import Op, decode_send, entries
from bascule.kafka import control as control_topics
from bascule.kafka.control import ControlTopics
from bascule.pipelines import control
from bascule.pipelines.defined_positions import DefinedPositions
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.writer.control import DEFINITION_KEY, PipelineDefinition, PipelineDeletion, PipelineReport, PipelineState, Wish
from bascule.writer.position import COMMON, position_key
from tests.scenarios import test_control
from tests.scenarios.operating import PAUSED, TIMEOUT_S, KillAt, Killed, Operator
from tests.scenarios.sparkless import Bridge, Running
from tests.scenarios.topics import produce
from tests.support.crash_points import at_crash_points
from tests.support.system import wait_for

bridge = test_control.bridge
topics = test_control.topics
#: The address of an ingress of the configuration file.
ELSEWHERE = "elsewhere"
#: Where a driver is killed while an ingress is created, changed and deleted.
PLACES = ["driver.source.after", "forget.before", "forget.after"]


class Definer(Operator):
    """An administrator who defines ingresses of one topic."""

    def __init__(self, bridge: Bridge, topics: ControlTopics) -> None:
        super().__init__(bridge, topics)
        self.source = f"{bridge.pipelines.topics.prefix}.source"
        bridge.topics.create(self.source, 1, {})
        bridge.positions.prepare_topics()  # as the broker does

    def define(self, definition: str = "1", revision: int = 1, name: str = "in", **settings: Any) -> None:
        table = {"topics": [self.source], "to": "queue", **settings}
        self.topics.define(f"ingress:{name}", PipelineDefinition(definition, revision, table, "ann", 1))

    def undefine(self, name: str = "in") -> None:
        self.topics.undefine(f"ingress:{name}", PipelineDeletion("ann", 1))

    def lose(self, name: str = "in") -> None:
        """Take the definition away as somebody does who creates the topic again: nothing says that it was deleted."""
        self.topics._store(f"{DEFINITION_KEY}ingress:{name}", None)

    def follow(self, running: Running) -> None:
        """Let the driver follow what was wanted and defined before the call."""

        def followed() -> bool:
            running.driver.poll()
            return not [*running.driver._control._steering.due, *running.driver._control._definitions.due]

        running.driver.poll()
        wait_for(followed, "the driver to follow")

    @contextmanager
    def followed_after(self, kill: KillAt, *diverts: DivertSpec) -> Iterator[Running]:
        """Let one driver follow, which is killed if it passes the place, and then another one, which is given."""
        with pytest.MonkeyPatch.context() as patched, self.bridge.running(*diverts) as running:
            at_crash_points(patched, kill)
            with suppress(Killed):
                self.follow(running)
        with self.bridge.running(*diverts) as running:
            self.follow(running)
            yield running

    def await_report(self, running: Running, there: Callable[[Mapping[str, PipelineReport]], bool]) -> None:
        """Return when the reports of the driver are as expected."""

        def reported() -> bool:
            running.driver.poll()
            return there(self.topics.reports(TIMEOUT_S).pipelines)

        wait_for(reported, "the reports of the driver")

    def failed(self, running: Running, name: str = "in") -> PipelineReport:
        """Let the driver follow, and return its report when an ingress has failed."""
        pipeline = f"ingress:{name}"
        self.follow(running)
        self.await_report(running, lambda found: pipeline in found and found[pipeline].state is PipelineState.FAILED)
        return self.topics.reports(TIMEOUT_S).pipelines[pipeline]

    def produce(self, *values: str) -> None:
        produce(self.bridge.pipelines.kafka["bootstrap.servers"], self.source, values)

    def carry(self, running: Running, count: int, name: str = "in") -> None:
        """Let an ingress carry the records before an offset."""
        running.query(f"ingress:{name}").batch(count)

    def messages(self) -> list[tuple[int, str]]:
        """Return the messages for the broker, except those of another ingress: the offset of the source record, and the address."""
        found = []
        for record in self.bridge.records("ingress"):
            value = bytes(record.value() or b"")
            for op, start, end in entries(value):
                assert op == Op.SEND
                send = decode_send(value, start, end)
                assert send.source is not None
                found.append((send.source.offset, send.address))
        return [message for message in found if message[1] != ELSEWHERE]

    def stored(self) -> list[str]:
        """Return the keys of positions and marks that the ingress has."""
        return sorted(key for key in self.bridge.stored() if "ingress:in" in key)


@pytest.fixture
def definer(bridge: Bridge, topics: ControlTopics) -> Definer:
    return Definer(bridge, topics)


def carried(offsets: Sequence[int], address: str = "queue") -> list[tuple[int, str]]:
    return [(offset, address) for offset in offsets]


@pytest.mark.on_mock_cluster
def test_ingress_is_created_changed_and_deleted_while_the_others_run(bridge: Bridge, definer: Definer) -> None:
    bridge.journal.start_epoch()
    other = IngressSpec("other", ELSEWHERE, (definer.source,))
    definer.produce("0", "1")
    with bridge.running(bridge.divert("x"), ingresses=(other,)) as running:
        running.settle()
        tasks = {name: running.query(name) for name in (COMMON, "ingress:other")}
        definer.define(body="text")
        definer.follow(running)
        definer.carry(running, 2)
        assert definer.messages() == carried([0, 1])
        definer.await_state(running, "ingress:in", PipelineState.RUNNING)
        report = definer.topics.reports(TIMEOUT_S).pipelines["ingress:in"]
        assert (report.revision, report.definition["to"], report.partitions) == (1, "queue", 1)
        before = running.query("ingress:in")
        definer.define(revision=2, to="changed")
        definer.follow(running)
        definer.produce("2")
        with pytest.raises(Exception, match="another driver has taken over"):
            before.batch(3)
        definer.carry(running, 3)
        assert definer.messages() == [*carried([0, 1]), *carried([2], "changed")]
        definer.await_report(running, lambda reports: reports["ingress:in"].revision == 2)
        definer.undefine()
        definer.follow(running)
        assert "ingress:in" not in running.driver.queries
        assert definer.stored() == []
        definer.await_report(running, lambda reports: "ingress:in" not in reports)
        assert {name: running.query(name) for name in tasks} == tasks, "another task was touched"
        assert definer.stored() == []


@pytest.mark.on_mock_cluster
def test_ingress_created_again_begins_as_a_new_one(bridge: Bridge, definer: Definer) -> None:
    definer.produce("0")
    definer.define()
    with bridge.running() as running:
        definer.follow(running)
        definer.carry(running, 1)
        definer.produce("1")
        definer.undefine()
        definer.define("2", start="latest")
        definer.follow(running)
        assert bridge.stored()[position_key("ingress:in", definer.source, 0)].offset == 2
        definer.undefine()
        definer.follow(running)
        definer.define("3")
        definer.follow(running)
        definer.carry(running, 2)
    assert definer.messages() == carried([0, 0, 1])


@pytest.mark.on_mock_cluster
def test_definitions_made_while_no_driver_runs_are_followed_by_the_next_one(bridge: Bridge, definer: Definer) -> None:
    definer.produce("0")
    definer.define()
    with bridge.running() as running:
        definer.follow(running)
        definer.carry(running, 1)
    definer.define(revision=2, to="changed")
    definer.produce("1")
    with bridge.running() as running:
        definer.follow(running)
        definer.carry(running, 2)
    assert definer.messages() == [(0, "queue"), (1, "changed")]
    definer.undefine()
    with bridge.running() as running:
        definer.follow(running)
        assert list(running.driver.queries) == []
        definer.await_report(running, lambda reports: not reports)
    assert definer.stored() == []


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("place", PLACES)
def test_driver_killed_while_an_ingress_is_created_changed_and_deleted_carries_each_record_once(definer: Definer, place: str) -> None:
    kill = KillAt(place)

    def carry_after_kill(step: int) -> None:
        with definer.followed_after(kill) as running:
            if "ingress:in" in running.driver.queries:
                definer.carry(running, step)

    definer.produce("0")
    definer.define()
    carry_after_kill(1)
    definer.define(revision=2, to="changed")
    definer.produce("1")
    carry_after_kill(2)
    definer.undefine()
    carry_after_kill(2)
    assert definer.stored() == []
    assert definer.messages() == [(0, "queue"), (1, "changed")]
    definer.define("2", to="again")
    carry_after_kill(2)
    assert kill.kills
    assert definer.messages() == [(0, "queue"), (1, "changed"), (0, "again"), (1, "again")]


@pytest.mark.on_mock_cluster
def test_ingress_stays_paused_across_drivers_and_can_be_deleted_so(bridge: Bridge, definer: Definer) -> None:
    definer.produce("0")
    definer.define()
    definer.topics.want("ingress:in", Wish(PAUSED, "ann", 1))
    for _ in range(2):
        with bridge.running() as running:
            definer.follow(running)
            assert running.query("ingress:in") is None
            definer.await_state(running, "ingress:in", PipelineState.PAUSED)
    with bridge.running() as running:
        definer.follow(running)
        definer.undefine()
        definer.follow(running)
        definer.define("2")
        definer.follow(running)
        definer.carry(running, 1)
    assert definer.messages() == carried([0])


@pytest.mark.on_mock_cluster
def test_definition_with_a_name_of_the_file_has_no_effect(bridge: Bridge, definer: Definer, caplog: pytest.LogCaptureFixture) -> None:
    bridge.journal.start_epoch()
    definer.produce("0")
    definer.define(name="x")
    definer.define(name="in")
    ingress = IngressSpec("in", "file", (definer.source,))
    with bridge.running(bridge.divert("x"), ingresses=(ingress,)) as running:
        definer.follow(running)
        definer.undefine("x")
        definer.undefine("in")
        definer.follow(running)
        definer.carry(running, 1)
        assert "ingress:x" not in running.driver.queries
    assert definer.messages() == [(0, "file")]
    assert {record.getMessage() for record in caplog.records if "ignored" in record.getMessage()} == {
        f"definition ignored, the configuration file has a pipeline of this name pipeline=ingress:{name}" for name in ("in", "x")
    }


@pytest.mark.on_mock_cluster
def test_driver_starts_many_ingresses_one_after_the_other_and_looks_after_those_that_run(
    bridge: Bridge, definer: Definer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DEFINITIONS_S", 0.0)
    names = ["a", "b", "c"]
    for name in names:
        definer.define(name=name)
    with bridge.running() as running:
        assert not running.driver.all_tried
        for count in range(1, 4):
            running.driver.poll()
            assert len(running.driver.queries) == count
            assert running.driver.all_tried is (count == len(names))
        definer.await_report(running, lambda reports: len(reports) == len(names))
    # The reports of this driver say nothing about the next one, which has not started the ingresses yet.
    with bridge.running():
        wait_for(lambda: definer.states() == {}, "the reports of the earlier driver to be deleted")


@pytest.mark.on_mock_cluster
def test_ingresses_deleted_while_a_driver_has_not_started_them_yet_leave_no_positions(
    bridge: Bridge, definer: Definer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_topics, "DELETIONS_MAX", 1)
    names = ["in", "b", "c", "d"]
    definer.produce("0")
    for name in names:
        definer.define(name=name)
    with bridge.running() as running:
        definer.follow(running)
        definer.carry(running, 1)
        definer.await_report(running, lambda found: len(found) == len(names))
    # This driver deletes the reports of the earlier one, and ends before it has started an ingress.
    with bridge.running():
        wait_for(lambda: definer.states() == {}, "the reports of the earlier driver to be deleted")
    for name in names:
        definer.undefine(name)
    deleted = definer.topics.wishes(TIMEOUT_S).deleted
    with bridge.running() as running:
        definer.follow(running)
        assert definer.topics.begun("ingress:in", TIMEOUT_S) == ""
        definer.define("2")
        definer.follow(running)
        definer.carry(running, 1)
        assert [key for key in bridge.stored() if any(f"ingress:{name}" in key for name in names[1:])] == []
    assert definer.messages() == carried([0, 0]), "the ingress that is created later begins at its start"
    assert len(deleted) == len(names), "more deletions than the broker keeps of pipelines without positions"


@pytest.mark.on_mock_cluster
def test_ingress_of_the_file_that_moves_to_run_time_begins_as_a_new_one(bridge: Bridge, definer: Definer) -> None:
    definer.produce("0")
    ingress = IngressSpec("in", "file", (definer.source,))
    with bridge.running(ingresses=(ingress,)) as running:
        definer.carry(running, 1)
    definer.define()
    with bridge.running() as running:
        definer.follow(running)
        definer.carry(running, 1)
    assert definer.messages() == [(0, "file"), (0, "queue")]


@pytest.mark.on_mock_cluster
def test_driver_that_was_replaced_does_not_begin_a_deleted_ingress_again(bridge: Bridge, definer: Definer) -> None:
    definer.produce("0")
    definer.define()
    with bridge.running() as old:
        definer.follow(old)
        definer.carry(old, 1)
        definer.undefine()
        with bridge.running() as running:
            definer.follow(running)
        assert definer.stored() == []
        query = old.driver.queries["ingress:in"]
        query.restart()
        assert query.superseded
    assert definer.stored() == []
    assert definer.messages() == carried([0])


@pytest.mark.on_mock_cluster
def test_step_that_fails_is_repeated(
    bridge: Bridge, definer: Definer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "RETRY_S", 0.0)
    definer.produce("0")
    definer.define()
    with bridge.running() as running:

        def away(*_: object, **__: object) -> Any:
            raise Unavailable("no Kafka")

        with monkeypatch.context() as patched:
            patched.setattr(DefinedPositions, "definitions", away)
            running.driver.poll()
            running.driver.poll()
            assert "ingress:in" not in running.driver.queries
        definer.follow(running)
        definer.undefine()
        with monkeypatch.context() as patched:
            patched.setattr(DefinedPositions, "forget", away)
            running.driver.poll()
            assert "ingress:in" not in running.driver.queries
            assert definer.stored()
        definer.follow(running)
        definer.define("2", body="a body of a later version")
        running.driver.poll()
        assert "ingress:in" not in running.driver.queries
    assert definer.stored() == []
    said = [record.getMessage() for record in caplog.records if "could not follow the definition" in record.getMessage()]
    assert [line.partition("error=")[2].strip('"')[:30] for line in said] == [
        "Unavailable: no Kafka", "Unavailable: no Kafka", "UnusableDefinition: the defini",
    ]  # fmt: skip


@pytest.mark.on_mock_cluster
def test_ingress_of_a_damaged_definition_stands_with_its_positions_until_the_next_definition(bridge: Bridge, topics: ControlTopics) -> None:
    bridge.journal.start_epoch()
    definer = Definer(bridge, topics)
    definer.define()
    definer.produce("1")

    def stands(running: Running) -> None:
        report = definer.failed(running)
        assert ("key b'definition/ingress:in': unreadable record" in report.error, report.definition_id) == (True, "1")

    with bridge.running(bridge.divert("x")) as running:
        definer.follow(running)
        definer.carry(running, 1)
        topics._store("definition/ingress:in", b"x")
        stands(running)
    with bridge.running(bridge.divert("x")) as running:
        stands(running)
        definer.produce("2")
        definer.define(revision=2)
        definer.follow(running)
        definer.carry(running, 2)
        assert [offset for offset, _ in definer.messages()] == [0, 1], "the positions were kept"
        topics._store("definition/ingress:in", b"x")
        stands(running)
        definer.undefine()
        definer.follow(running)
        definer.await_report(running, lambda found: "ingress:in" not in found)


@pytest.mark.on_mock_cluster
def test_ingress_whose_definition_is_lost_keeps_its_positions_until_it_is_created_again_or_deleted(
    bridge: Bridge, topics: ControlTopics
) -> None:
    bridge.journal.start_epoch()
    definer = Definer(bridge, topics)
    definer.define()
    definer.produce("1")

    def stands(running: Running) -> None:
        report = definer.failed(running)
        assert ("has lost the definition" in report.error, report.definition_id) == (True, "1")
        assert report.revision, "it is defined at run time"

    with bridge.running(bridge.divert("x")) as running:
        definer.follow(running)
        definer.carry(running, 1)
        definer.lose()
        stands(running)
    with bridge.running(bridge.divert("x")) as running:
        stands(running)
        definer.produce("2")
        definer.define(revision=2)
        definer.follow(running)
        definer.carry(running, 2)
        assert [offset for offset, _ in definer.messages()] == [0, 1], "the positions were kept"
        definer.lose()
        stands(running)
        definer.undefine()
        definer.follow(running)
        definer.await_report(running, lambda found: "ingress:in" not in found)
    assert definer.stored() == []
