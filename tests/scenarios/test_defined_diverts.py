"""Diverts that are defined at run time: each message is carried once, whatever is killed, and the other pipelines are not touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bascule.broker.coverage import CoverageMark
from bascule.kafka.control import ControlTopics
from bascule.pipelines.audit import audit_diverts
from bascule.pipelines.defined_specs import with_defined
from bascule.pipelines.spec import DivertSpec
from bascule.writer.control import (
    COVERED_KEY,
    OffsetMove,
    OffsetsWish,
    PipelineDefinition,
    PipelineDeletion,
    PipelineState,
    WantedState,
    Wish,
)
from bascule.writer.pipeline_holds import TO_BEGIN, PipelineHoldsProtocol
from bascule.writer.position import COMMON, PositionTaken, group_pipeline
from tests.scenarios import test_control
from tests.scenarios.operating import PAUSED, TIMEOUT_S, KillAt
from tests.scenarios.sparkless import Bridge, Running
from tests.scenarios.test_definitions import Definer
from tests.support.system import wait_for

bridge = test_control.bridge
topics = test_control.topics
NAME = "divert:late"
#: Where a driver is killed while a divert is created, changed and deleted.
PLACES = ["define.before", "define.after", "forget.before", "forget.after"]


class DivertDefiner(Definer):
    """An administrator who defines a divert, and a broker that covers it."""

    def create(self, definition: str = "1", revision: int = 1, covered: int | None = None, epoch: int = 0, **settings: Any) -> None:
        """Define a divert of all messages, which the journal covers from now on."""
        self.state(definition, revision, **settings)
        self.cover(definition, revision, covered, epoch)

    def state(self, definition: str = "1", revision: int = 1, **settings: Any) -> None:
        table = {"from": "#", "to": f"{self.bridge.pipelines.topics.prefix}.late", **settings}
        self.topics.define(NAME, PipelineDefinition(definition, revision, table, "ann", 1))

    def cover(self, definition: str = "1", revision: int = 1, covered: int | None = None, epoch: int = 0) -> None:
        offset = self.bridge.end() if covered is None else covered
        self.topics.say_covered("late", epoch, CoverageMark(definition, revision, offset))

    def delete(self) -> None:
        self.topics.undefine(NAME, PipelineDeletion("ann", 1))

    def carry_all(self, running: Running) -> list[str]:
        """Let the divert carry what there is, and return the records of its topic."""
        running.batch(NAME)
        return self.bridge.carried("late")

    def kept(self) -> list[str]:
        """Return the keys of positions and marks that the divert has."""
        return sorted(key for key in self.bridge.stored() if "late" in key)

    def positions_of(self, name: str) -> tuple[str, ...]:
        found = [at.members for key, at in self.bridge.stored().items() if key.startswith(f"{name}/")]
        return found[0] if found else ()


@pytest.fixture
def definer(bridge: Bridge, topics: ControlTopics) -> DivertDefiner:
    bridge.journal.start_epoch()
    return DivertDefiner(bridge, topics)


@pytest.mark.on_mock_cluster
def test_divert_is_created_changed_and_deleted_while_the_others_run(bridge: Bridge, definer: DivertDefiner) -> None:
    with bridge.running(bridge.divert("x"), bridge.divert("y", group="g")) as running:
        running.settle()
        tasks = {name: running.query(name) for name in (COMMON, group_pipeline("g"))}
        bridge.send("before")
        definer.state()
        definer.follow(running)
        assert NAME not in running.driver.queries, "a divert that no broker covers is not begun"
        definer.cover()
        definer.follow(running)
        bridge.send("first")
        assert definer.carry_all(running) == ["first"]
        definer.await_state(running, NAME, PipelineState.RUNNING)
        report = definer.topics.reports(TIMEOUT_S).pipelines[NAME]
        assert (report.revision, report.definition["from"], report.partitions) == (1, "#", 1)
        before = running.query(NAME)
        definer.create(revision=2, selector="nothing = 1")
        definer.follow(running)
        bridge.send("unwanted")
        with pytest.raises(Exception, match="another driver has taken over"):
            before.batch(bridge.end())
        assert definer.carry_all(running) == ["first"]
        running.driver.poll()
        assert definer.positions_of(COMMON) == ("x",), "a divert that is defined at run time joins no group"
        definer.delete()
        definer.follow(running)
        assert NAME not in running.driver.queries
        assert definer.kept() == []
        definer.await_report(running, lambda reports: NAME not in reports)
        assert {name: running.query(name) for name in tasks} == tasks, "another task was touched"
        running.batch()
        assert bridge.carried("x") == bridge.carried("y") == ["before", "first", "unwanted"]


@pytest.mark.on_mock_cluster
def test_divert_begins_at_the_lowest_offset_that_a_broker_has_covered(bridge: Bridge, definer: DivertDefiner) -> None:
    bridge.send("before")
    first = bridge.end()
    bridge.send("0")
    definer.create(epoch=5)
    definer.cover(covered=first, epoch=1)
    definer.cover("another", covered=0, epoch=2)
    with bridge.running() as running:
        definer.follow(running)
        assert definer.carry_all(running) == ["0"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("code", [{"python": "os:system"}, {"select": ["text as value"]}])
def test_definition_with_code_is_not_followed_whoever_has_written_it(
    bridge: Bridge, definer: DivertDefiner, caplog: pytest.LogCaptureFixture, code: dict[str, Any]
) -> None:
    definer.create(**code)
    with bridge.running() as running:
        wait_for(lambda: running.driver.poll() or "cannot be given at run time" in caplog.text, "the refusal")
        assert NAME not in running.driver.queries
    assert definer.kept() == []


@pytest.mark.on_mock_cluster
def test_divert_that_has_begun_continues_without_a_mark(bridge: Bridge, definer: DivertDefiner) -> None:
    definer.create()
    bridge.send("0")
    with bridge.running() as running:
        definer.follow(running)
        assert definer.carry_all(running) == ["0"]
        for key in definer.topics._table(definer.topics._topics.control, 10):
            if key.startswith(f"{COVERED_KEY}{NAME}/"):  # as somebody does who creates or deletes a divert of the name at the same time
                definer.topics._store(key, None)
        definer.follow(running)
        bridge.send("1")
        assert definer.carry_all(running) == ["0", "1"]
    with bridge.running() as running:
        definer.follow(running)
        bridge.send("2")
        assert definer.carry_all(running) == ["0", "1", "2"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize(("start", "texts"), [("earliest", ["before", "after"]), ("latest", ["after"])])
def test_divert_begins_at_its_start(bridge: Bridge, definer: DivertDefiner, start: str, texts: list[str]) -> None:
    bridge.send("before")
    definer.create(start=start)
    bridge.send("after")
    with bridge.running() as running:
        definer.follow(running)
        assert definer.carry_all(running) == texts


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("others", [(), ("x",)], ids=["alone", "beside a divert of the file"])
def test_divert_continues_across_drivers_and_is_deleted_while_none_runs(
    bridge: Bridge, definer: DivertDefiner, others: Sequence[str]
) -> None:
    diverts = [bridge.divert(name) for name in others]
    definer.create()
    for number in range(3):
        bridge.send(str(number))
        with bridge.running(*diverts) as running:
            definer.follow(running)
            running.batch()
            assert bridge.carried("late") == [str(each) for each in range(number + 1)]
            assert set(bridge.pins()) == {NAME, *([COMMON] if others else ())}
            running.driver.poll()
    definer.delete()
    with bridge.running(*diverts) as running:
        definer.follow(running)
        assert NAME not in running.driver.queries
        definer.await_report(running, lambda reports: NAME not in reports)
    assert definer.kept() == []
    definer.create("2")
    bridge.send("again")
    with bridge.running(*diverts) as running:
        definer.follow(running)
        assert definer.carry_all(running) == ["0", "1", "2", "again"]
        assert bridge.counted("late") == 1, "the counts of the deleted divert are gone"


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("place", PLACES)
def test_driver_killed_while_a_divert_is_created_changed_and_deleted_carries_each_message_once(
    bridge: Bridge, definer: DivertDefiner, place: str
) -> None:
    kill = KillAt(place)

    def carry_after_kill() -> None:
        with definer.followed_after(kill, bridge.divert("x")) as running:
            if NAME in running.driver.queries:
                running.batch(NAME)

    definer.create()
    bridge.send("0")
    carry_after_kill()
    definer.create(revision=2, key="none")
    bridge.send("1")
    carry_after_kill()
    definer.delete()
    bridge.send("2")
    carry_after_kill()
    assert definer.kept() == []
    definer.create("2")
    bridge.send("3")
    carry_after_kill()
    assert kill.kills
    assert bridge.carried("late") == ["0", "1", "3"]


@pytest.mark.on_mock_cluster
def test_divert_is_paused_across_drivers_moved_and_resumed(bridge: Bridge, definer: DivertDefiner) -> None:
    bridge.send("0")
    definer.create()
    began = bridge.end()
    with bridge.running() as running:
        definer.follow(running)
        bridge.send("1")
        assert definer.carry_all(running) == ["1"]
        definer.topics.want(NAME, Wish(PAUSED, "ann", 1))
        definer.follow(running)
        bridge.send("2")
        assert running.query(NAME) is None
    with bridge.running() as running:
        definer.follow(running)
        assert running.query(NAME) is None
        definer.await_state(running, NAME, PipelineState.PAUSED)
        (at,) = [at for key, at in bridge.stored().items() if key.startswith(f"{NAME}/")]
        definer.topics.want(NAME, OffsetsWish("w", (OffsetMove(at.topic, at.topic_id, 0, at.offset, began),), "ann", 1, 0))
        definer.follow(running)
        definer.topics.want(NAME, Wish(WantedState.RUNNING, "ann", 2))
        definer.follow(running)
        assert definer.carry_all(running) == ["1", "1", "2"]


@pytest.mark.on_mock_cluster
def test_divert_that_leaves_the_file_continues_by_its_definition(bridge: Bridge, definer: DivertDefiner) -> None:
    definer.create()
    with bridge.running() as running:
        definer.follow(running)
        bridge.send("0")
        definer.carry_all(running)
    late: DivertSpec = bridge.divert("late")
    bridge.send("1")
    with bridge.running(late, bridge.divert("x")) as running:
        definer.follow(running)
        running.settle()
        bridge.send("2")
        running.batch()
        running.driver.poll()
        running.batch()
        assert definer.positions_of(COMMON) == ("late", "x"), "the divert of the file joins its group"
    bridge.send("3")
    with bridge.running(bridge.divert("x")) as running:
        definer.follow(running)
        assert definer.carry_all(running) == ["0", "1", "2", "3"]
        assert definer.positions_of(COMMON) == ("x",)


@pytest.mark.on_mock_cluster
def test_driver_that_was_replaced_does_not_begin_a_deleted_divert_again(bridge: Bridge, definer: DivertDefiner) -> None:
    definer.create()
    with bridge.running() as old:
        definer.follow(old)
        bridge.send("0")
        definer.carry_all(old)
        definer.delete()
        with bridge.running() as running:
            definer.follow(running)
        assert definer.kept() == []
        query: Any = old.driver.queries[NAME]
        query.restart()
        assert query.running is None
    assert definer.kept() == []
    assert bridge.carried("late") == ["0"]


@pytest.mark.on_mock_cluster
def test_driver_that_was_replaced_before_it_followed_deletes_no_later_divert(bridge: Bridge, definer: DivertDefiner) -> None:
    definer.create()
    with bridge.running() as running:
        definer.follow(running)
    with bridge.running() as old:  # has read that there are positions of the first definition
        definer.delete()
        definer.create("2")
        with bridge.running() as running:
            definer.follow(running)
            bridge.send("0")
            assert definer.carry_all(running) == ["0"]
            with pytest.raises(PositionTaken, match="by another definition"):
                old.driver.poll()
            bridge.send("1")
            assert definer.carry_all(running) == ["0", "1"]


@pytest.mark.on_mock_cluster
def test_journal_is_kept_from_where_a_divert_will_begin(bridge: Bridge, definer: DivertDefiner) -> None:
    bridge.send("0")
    definer.create()
    covered, held = bridge.end(), {"late": ("1", bridge.end())}
    bridge.send("1")

    def needs() -> Mapping[str, tuple[int, str]]:
        keepers = bridge.keepers()
        protocol = PipelineHoldsProtocol(keepers, bridge.pipelines.topics.journal, 0, defined=lambda: held)
        keepers._protocol = protocol
        return {hold.name: (hold.offset, hold.reason) for hold in keepers.found(bridge.snapshot())}

    assert needs() == {NAME: (covered, TO_BEGIN)}
    with bridge.running() as running:
        definer.follow(running)
        assert needs() == {NAME: (covered, "")}
        definer.carry_all(running)
        assert needs()[NAME][0] == bridge.end()


@pytest.mark.on_mock_cluster
def test_divert_is_verified(bridge: Bridge, definer: DivertDefiner) -> None:
    definer.create()
    with bridge.running() as running:
        definer.follow(running)
        bridge.send("0", "1")
        definer.carry_all(running)
    (result,) = audit_diverts(with_defined(bridge.pipelines))
    assert (result.divert, result.expected, result.found, result.exact) == ("late", 2, 2, True)
