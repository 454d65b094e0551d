"""The driver, its positions and its tasks on the mock cluster, without Spark. Scenarios run the imported tests on Kafka."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.config.settings import Settings
from bascule.core.errors import BadRecord, Unavailable
from bascule.kafka.history import committed_note
from bascule.pipelines import driver as module
from bascule.pipelines.driver import Driver
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, IngressSpec, PipelinesSpec, StartPosition
from bascule.writer.position import COMMON, ENDED, Position, PositionTaken, position_key
from tests.scenarios import test_lost_positions
from tests.scenarios.sparkless import Bridge
from tests.scenarios.test_joining import (  # noqa: F401 - the same on the mock cluster
    test_a_divert_joins_the_others_when_it_is_near_them_and_they_run,
    test_a_divert_whose_joining_was_committed_in_doubt_has_joined,
    test_what_a_removed_divert_took_is_answered_for_though_its_joining_was_committed_in_doubt,
)
from tests.scenarios.test_lost_positions import (  # noqa: F401
    ingress,
    plain,
    test_a_divert_that_is_put_aside_may_have_lost_its_place,
    test_an_ingress_goes_on_without_the_diverts,
    test_one_that_is_enabled_stops_under_its_own_name_and_the_others_go_on,
    test_one_that_is_removed_answers_for_what_is_left,
)
from tests.support.mock_cluster import MockCluster


def test_diverts_whose_journal_is_trimmed_while_they_run_stop_and_do_not_try_again_for_ever(bridge: Bridge) -> None:
    test_lost_positions.test_diverts_whose_journal_is_gone_while_they_run_stop_and_do_not_try_again_for_ever(bridge, renewed=False)


def test_diverts_whose_journal_is_recreated_while_they_run_stop(bridge: Bridge, kafka: MockCluster) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("plain")) as running:
        kafka.ids[bridge.pipelines.topics.journal] = "another"
        running.driver.queries[COMMON].restart()
        assert "was recreated" in (running.driver.queries[COMMON].stopped or "")
        kafka.ids[bridge.pipelines.topics.journal] = ""
        with pytest.raises(Unavailable, match="no longer exists"):
            running.driver._positions.read(running.driver._positions.common_key)


def test_a_driver_waits_for_the_journal_and_names_it_when_it_does_not_come(
    bridge: Bridge, kafka: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOURNAL_TIMEOUT_S", 0.0)
    kafka.ids[bridge.pipelines.topics.journal] = ""
    with pytest.raises(Unavailable, match=r"topic '.*\.journal' does not exist; start the broker"), bridge.running(bridge.divert("x")):
        pass
    asked = iter([{}, {bridge.pipelines.topics.journal: "id"}])
    driver = Driver(bridge.pipelines)
    monkeypatch.setattr(module, "JOURNAL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(driver._positions.topics, "ids", lambda _: next(asked))
    assert driver._journal_id() == "id"


def test_a_driver_without_diverts_and_traces_of_them_does_not_ask_for_a_journal(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_journal_id", lambda _: pytest.fail("it asks"))
    with bridge.running() as running:
        assert running.driver.queries == {}


def test_diverts_that_are_all_disabled_have_no_query_that_runs(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    divert = bridge.divert("x")
    with bridge.running(divert, bridge.divert("y")) as running:
        running.settle()
    with bridge.running(replace(divert, enabled=False), bridge.divert("y", enabled=False)) as running:
        assert running.query(COMMON) is None
        assert running.driver.queries[COMMON].stopped is None
    bridge.send("1")
    with bridge.running(divert, bridge.divert("y", enabled=False)) as running:
        running.settle()
    assert bridge.carried("x") == ["1"]


def test_a_driver_that_another_has_replaced_stops_and_the_other_goes_on(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as first:
        with bridge.running(bridge.divert("x")) as second:
            bridge.send("1")
            first.driver.queries[COMMON].restart()
            assert first.driver.queries[COMMON].superseded
            second.batch()
        assert bridge.carried("x") == ["1"]


def test_an_ingress_finds_topics_that_come_later(bridge: Bridge, kafka: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = bridge.pipelines.topics.prefix
    pattern = IngressSpec("in", "queue", pattern=rf"{prefix}-in\..*|__.*|.*positions", start=StartPosition("latest"))
    kafka.create("__other")
    with bridge.running(ingresses=(pattern,)) as running:
        driver, query = running.driver, running.driver.queries["ingress:in"]
        assert query.running is None
        driver.poll()
        assert query.running is None, "it is not time to look yet"
        monkeypatch.setattr(module, "REFRESH_S", 0.0)
        driver._refresh_due_s = 0.0
        driver.poll()
        assert query.running is None
        kafka.create(f"{prefix}-in.a", 2)
        driver.poll()
        assert query.running is not None
        assert sorted(at for at in driver._sources["in"]) == [(f"{prefix}-in.a", 0), (f"{prefix}-in.a", 1)]
        runs = query.running
        driver.poll()
        assert query.running is runs, "nothing has changed"
        kafka.ids[f"{prefix}-in.a"] = "recreated"
        driver.poll()
        assert "was recreated" in (query.stopped or "")
        driver.poll()
        assert set(driver._held_keys()) == {position_key("ingress:in", f"{prefix}-in.a", partition) for partition in (0, 1)}


def test_topics_that_cannot_be_looked_for_are_looked_for_the_next_time(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    with bridge.running(ingresses=(IngressSpec("in", "queue", ("t",)),)) as running:
        driver = running.driver
        driver._refresh_due_s = 0.0

        def away(*_: object) -> Any:
            raise Unavailable("no Kafka")

        with monkeypatch.context() as patched:
            patched.setattr(Driver, "_matching", away)
            driver.poll()
        assert driver._refresh_due_s > time.monotonic()
        assert driver.queries["ingress:in"].stopped is None


def shown(bridge: Bridge, pipeline: str, topic: str) -> tuple[int, str]:
    return committed_note(bridge.pipelines.kafka, bridge.positions.group(pipeline), topic, 0)


def test_lag_is_shown_while_a_driver_runs_and_a_reason_when_it_ends(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    journal = bridge.pipelines.topics.journal
    with bridge.running(bridge.divert("now"), bridge.divert("bad", start=StartPosition(EARLIEST))) as running:
        bridge.send("1", "2")
        monkeypatch.setattr(module, "JOIN_RECORDS", -1)
        running.batch()
        running.query("divert:bad").fail(BadRecord("that cannot be carried"))
        running.driver.poll()
        assert running.driver._told == {"divert:bad"}
        running.driver._mirror_due_s = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(running.driver._positions, "stored", lambda *_: pytest.fail("it is told once"))
            running.driver.poll()
    assert shown(bridge, COMMON, journal) == (3, ENDED)
    offset, note = shown(bridge, "divert:bad", journal)
    assert offset <= 3
    assert note == "BadRecord: that cannot be carried"


def test_transactions_that_workers_left_open_are_ended_when_a_driver_stops(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    ended: list[str] = []
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))):
        monkeypatch.setattr(module, "end_open_transactions", lambda _, ids: ended.extend(ids))
    keys = (bridge.positions.common_key, bridge.positions.own_key("past"))
    assert ended == [bridge.pipelines.transactional_id(key) for key in keys]


def test_a_reason_that_cannot_be_told_holds_nothing_up(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:

        def away(*_: object, **__: object) -> Any:
            raise Unavailable("no Kafka")

        with monkeypatch.context() as patched:
            patched.setattr(Positions, "stored", away)
            running.driver._tell({COMMON: "why"})
        assert running.driver._told == set()
        running.driver._tell({"ingress:in": "nobody asks"})
        assert running.driver._told == set()


def test_a_driver_that_was_superseded_tells_nothing_of_what_its_successor_holds(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.query(COMMON).fail(PositionTaken("another driver"))
        running.driver.poll()
        assert running.driver.queries[COMMON].superseded
        assert running.driver._told == set()


def test_a_catch_up_that_does_not_reach_its_end_is_no_join(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    bridge.send("1", "2")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        bridge.send("3")
        running.batch(COMMON)
        running.batch("divert:past", end=2)
        monkeypatch.setattr(module, "TransformingBatch", lambda *_: lambda _: None)
        running.driver.poll()
        assert "divert:past" in running.driver.queries
        assert running.query(COMMON) is not None, "the others go on"


@pytest.mark.parametrize("behind", ["now", "past"])
def test_who_is_behind_is_brought_to_the_same_offset_before_they_join(bridge: Bridge, behind: str) -> None:
    bridge.journal.start_epoch()
    bridge.send("1", "2")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        bridge.send("3", "4")
        running.batch(COMMON, end=4 if behind == "now" else 5)
        running.batch("divert:past", end=5 if behind == "now" else 4)
        running.driver.poll()
        assert list(running.driver.queries) == [COMMON]
        assert bridge.stored()[bridge.positions.common_key].members == ("now", "past")
        assert bridge.stored()[bridge.positions.common_key].offset == 5
        running.settle()
    assert bridge.carried("now") == ["3", "4"]
    assert bridge.carried("past") == ["1", "2", "3", "4"]


def test_positions_of_idle_sources_stay_when_kafka_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(PipelinesSpec("a", {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, checkpoint_dir=str(tmp_path)))

    def away(*_: object) -> Any:
        raise Unavailable("no Kafka")

    monkeypatch.setattr(Positions, "pass_over", away)
    driver._pass_over({driver._positions.claim("ingress:in/t/0", Position("t", "id", 0, 1)): 1})
    assert driver._passed == {}


def test_a_driver_that_is_not_started_has_no_session() -> None:
    with pytest.raises(Unavailable, match="no Spark session"):
        _ = Driver(PipelinesSpec("a", {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}))._spark


def test_pipelines_need_a_kafka() -> None:
    with pytest.raises(Unavailable, match="no Kafka"):
        module.run(Settings(), on_ready=lambda: None)
