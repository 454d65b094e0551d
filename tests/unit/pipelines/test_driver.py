"""The driver, its positions and its tasks on the mock cluster, without Spark. The scenarios run the imported tests on Kafka."""

from __future__ import annotations

import logging
import threading
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
from bascule.pipelines.ingresses import DriverIngresses
from bascule.pipelines.jobs import ResidentTasks
from bascule.pipelines.positions import Positions
from bascule.pipelines.queries import Query
from bascule.pipelines.spec import EARLIEST, IngressSpec, PipelinesSpec, StartPosition
from bascule.writer.position import COMMON, ENDED, Position, PositionTaken, position_key
from tests.scenarios import test_lost_positions
from tests.scenarios.sparkless import Bridge, Context, Job
from tests.scenarios.test_joining import (  # noqa: F401 - the same on the mock cluster
    test_divert_joins_the_common_position_only_when_close_and_while_the_others_run,
    test_divert_whose_join_commit_was_in_doubt_has_joined,
    test_messages_of_removed_divert_are_dead_lettered_though_its_join_commit_was_in_doubt,
)
from tests.scenarios.test_lost_positions import (  # noqa: F401
    ingress,
    plain,
    test_disabled_divert_with_lost_position_blocks_no_other_divert,
    test_enabled_divert_with_lost_position_stops_and_the_others_continue,
    test_ingress_continues_when_the_common_position_of_the_diverts_is_lost,
    test_removed_exclusive_divert_with_lost_position_dead_letters_its_remaining_messages,
)
from tests.support.mock_cluster import MockCluster


def test_diverts_stop_for_good_when_journal_is_trimmed_beyond_their_position(bridge: Bridge) -> None:
    test_lost_positions.test_running_diverts_stop_for_good_when_their_journal_is_trimmed_or_recreated(bridge, renewed=False)


def test_diverts_stop_when_journal_is_recreated(bridge: Bridge, kafka: MockCluster) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("plain")) as running:
        kafka.ids[bridge.pipelines.topics.journal] = "another"
        running.driver.queries[COMMON].restart()
        assert "was recreated" in (running.driver.queries[COMMON].stopped or "")
        kafka.ids[bridge.pipelines.topics.journal] = ""
        with pytest.raises(Unavailable, match="no longer exists"):
            running.driver._positions.read(running.driver._positions.common_key)


def test_driver_waits_for_journal_topic_and_names_it_after_timeout(
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


def test_driver_without_diverts_does_not_query_journal(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_journal_id", lambda _: pytest.fail("it asks"))
    with bridge.running() as running:
        assert running.driver.queries == {}


def without_positions(*_: object) -> Any:
    pytest.fail("the positions are read")


def test_driver_without_enabled_pipelines_starts_no_spark(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
    monkeypatch.setattr(module, "spark_context", lambda _: pytest.fail("it starts Spark"))
    caplog.set_level(logging.INFO)
    disabled = IngressSpec("in", "queue", ("t",), enabled=False)
    with bridge.running(bridge.divert("x", enabled=False), ingresses=(disabled,)) as running:
        assert running.query(COMMON) is None
    with bridge.running() as running, monkeypatch.context() as patched:
        patched.setattr(Positions, "stored", without_positions)
        running.driver.poll()
        assert running.driver.queries == {}
    said = [record.getMessage() for record in caplog.records if "Spark" in record.getMessage()]
    assert said == [f"no divert or ingress is enabled, Spark is not started bridge={bridge.pipelines.bridge_id}"] * 2


def test_messages_left_by_a_removed_divert_start_spark_although_no_pipeline_is_enabled(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("x", exclusive=True)) as running:
        running.settle()
    bridge.send("1", taken_by=["x"])
    contexts: list[Any] = []

    def context(_: PipelinesSpec) -> Context:
        contexts.append(Context())
        return contexts[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "spark_context", context)
    with bridge.running(bridge.divert("y", enabled=False)) as running:
        running.settle()
        assert [running.driver._spark] == contexts
    assert bridge.dead() == ["x: 1"]


def test_plain_diverts_need_no_sql_session_even_to_catch_up_and_join(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sql_session", lambda _: pytest.fail("it starts Spark SQL"))
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
    bridge.send("1", "2")
    with bridge.running(bridge.divert("x"), bridge.divert("y", start=StartPosition(EARLIEST))) as running:
        running.settle()
        assert "divert:y" not in running.driver.queries
    assert bridge.carried("x") == bridge.carried("y") == ["1", "2"]


def test_disabled_diverts_have_no_running_query(bridge: Bridge) -> None:
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


def test_replaced_driver_stops_and_successor_continues(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as first:
        with bridge.running(bridge.divert("x")) as second:
            bridge.send("1")
            first.driver.queries[COMMON].restart()
            assert first.driver.queries[COMMON].superseded
            second.batch()
        assert bridge.carried("x") == ["1"]


def test_ingress_finds_topics_created_later(bridge: Bridge, kafka: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = bridge.pipelines.topics.prefix
    pattern = IngressSpec("in", "queue", pattern=rf"{prefix}-in\..*|__.*|.*positions", start=StartPosition("latest"))
    kafka.create("__other")
    with bridge.running(ingresses=(pattern,)) as running:
        driver, query = running.driver, running.driver.queries["ingress:in"]
        assert query.running is None
        driver.poll()
        assert query.running is None, "the refresh interval has not passed yet"
        monkeypatch.setattr(module, "REFRESH_S", 0.0)
        driver._refresh_due_s = 0.0
        driver.poll()
        assert query.running is None
        kafka.create(f"{prefix}-in.a", 2)
        driver.poll()
        assert query.running is not None
        assert sorted(at for at in driver._ingresses.sources["in"]) == [(f"{prefix}-in.a", 0), (f"{prefix}-in.a", 1)]
        runs = query.running
        driver.poll()
        assert query.running is runs, "nothing has changed"
        kafka.ids[f"{prefix}-in.a"] = "recreated"
        driver.poll()
        assert "was recreated" in (query.stopped or "")
        driver.poll()
        assert set(driver._held_keys()) == {position_key("ingress:in", f"{prefix}-in.a", partition) for partition in (0, 1)}


def test_failed_topic_lookup_is_retried_at_next_refresh(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    with bridge.running(ingresses=(IngressSpec("in", "queue", ("t",)),)) as running:
        driver = running.driver
        driver._refresh_due_s = 0.0

        def away(*_: object) -> Any:
            raise Unavailable("no Kafka")

        with monkeypatch.context() as patched:
            patched.setattr(DriverIngresses, "_matching", away)
            driver.poll()
        assert driver._refresh_due_s > time.monotonic()
        assert driver.queries["ingress:in"].stopped is None


def shown(bridge: Bridge, pipeline: str, topic: str) -> tuple[int, str]:
    return committed_note(bridge.pipelines.kafka, bridge.positions.group(pipeline), topic, 0)


def test_driver_reports_lag_while_running_and_reason_at_end(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    journal = bridge.pipelines.topics.journal
    with bridge.running(bridge.divert("now"), bridge.divert("bad", start=StartPosition(EARLIEST))) as running:
        bridge.send("1", "2")
        monkeypatch.setattr(module, "JOIN_RECORDS", -1)
        running.batch()
        running.query("divert:bad").fail(BadRecord("that cannot be carried"))
        running.driver.poll()
        assert running.driver._mirrors._told.keys() == {"divert:bad"}
        running.driver._mirror_due_s = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(Driver, "_tell", lambda _, reasons: None if not reasons else pytest.fail("it is told once"))
            running.driver.poll()
    assert shown(bridge, COMMON, journal) == (3, ENDED)
    offset, note = shown(bridge, "divert:bad", journal)
    assert offset <= 3
    assert note == "BadRecord: that cannot be carried"


def test_driver_ends_open_transactions_of_workers_at_stop(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    ended: list[str] = []
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))):
        monkeypatch.setattr(module, "end_open_transactions", lambda _, ids: ended.extend(ids))
    keys = (bridge.positions.common_key, bridge.positions.own_key("past"))
    assert ended == [bridge.pipelines.transactional_id(key) for key in keys]


def test_driver_stops_all_queries_side_by_side(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    met = threading.Barrier(2, timeout=30)
    stop = Job.stop

    def stop_together(job: Job) -> None:
        met.wait()
        stop(job)

    with bridge.running(bridge.divert("x"), bridge.divert("y", group="g")) as running:
        running.settle()
        jobs = [running.query(name) for name in (COMMON, "group:g")]
        monkeypatch.setattr(Job, "stop", stop_together)
    assert not met.broken
    assert not any(job.active for job in jobs)


def test_failed_report_of_reason_does_not_stop_driver(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:

        def away(*_: object, **__: object) -> Any:
            raise Unavailable("no Kafka")

        with monkeypatch.context() as patched:
            patched.setattr(Positions, "stored", away)
            running.driver._tell({COMMON: "why"})
        assert running.driver._mirrors._told == {}
        running.driver._tell({"ingress:in": "nobody asks"})
        assert running.driver._mirrors._told == {}


def test_superseded_driver_reports_no_reasons(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.query(COMMON).fail(PositionTaken("another driver"))
        running.driver.poll()
        assert running.driver.queries[COMMON].superseded
        assert running.driver._mirrors._told == {}


def test_catch_up_that_misses_its_end_does_not_join_divert(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    bridge.send("1", "2")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        bridge.send("3")
        running.batch(COMMON)
        running.batch("divert:past", end=2)
        monkeypatch.setattr(module, "carry_up_to", lambda *_: None)
        running.driver.poll()
        assert "divert:past" in running.driver.queries
        assert running.query(COMMON) is not None, "the other queries continue"


def test_join_that_failed_lets_both_queries_run_before_the_next_attempt(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    bridge.send("1", "2")
    attempts = 0

    def fail(*_: object) -> Any:
        nonlocal attempts
        attempts += 1
        raise BadRecord("that cannot be carried")

    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        monkeypatch.setattr(module.Driver, "_catch_up", fail)
        running.batch(COMMON)
        for _ in range(3):
            running.driver.poll()
        assert attempts == 1
        assert running.query(COMMON) is not None
        assert running.query("divert:past") is not None
        running.driver._join_due_s.clear()  # the pause is over
        running.driver.poll()
        assert attempts == 2


@pytest.mark.parametrize("behind", ["now", "past"])
def test_lagging_divert_is_brought_to_same_offset_before_join(bridge: Bridge, behind: str) -> None:
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


def test_driver_stops_and_reports_no_lag_when_kafka_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(PipelinesSpec("a", {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, checkpoint_dir=str(tmp_path)))
    driver._ingresses.claims["ingress:in"] = (driver._positions.claim("ingress:in/t/0", Position("t", "id", 0, 1)),)
    shipped = ResidentTasks([], driver.pipelines.kafka, committed=True)
    driver.queries["ingress:in"] = Query("ingress:in", lambda: None, tmp_path, running=Job(Context(), "in", shipped))

    def away(*_: object) -> Any:
        raise Unavailable("no Kafka")

    monkeypatch.setattr(Positions, "pass_over", away)
    monkeypatch.setattr(Positions, "stored", away)
    driver.stop()
    assert [record.getMessage().partition(" error=")[0] for record in caplog.records] == [
        "could not read positions for the lag, will retry",
        "could not advance positions of idle sources",
    ]


def test_failed_read_of_positions_delays_a_join(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:

        def away(*_: object) -> Any:
            raise Unavailable("no Kafka")

        with monkeypatch.context() as patched:
            patched.setattr(Positions, "stored", away)
            running.driver.poll()
        assert "divert:past" in running.driver.queries
        running.driver.poll()
        assert "divert:past" not in running.driver.queries


def test_driver_without_spark_looks_for_topics_again_and_again(bridge: Bridge) -> None:
    with bridge.running() as running:
        for _ in range(2):
            running.driver._refresh_due_s = 0.0
            running.driver.poll()
            assert running.driver._refresh_due_s > 0.0
        assert not running.driver._starting.started


def test_unstarted_driver_has_no_spark_context() -> None:
    with pytest.raises(Unavailable, match="no Spark context"):
        _ = Driver(PipelinesSpec("a", {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}))._spark


def test_pipelines_without_kafka_are_refused() -> None:
    with pytest.raises(Unavailable, match="no Kafka"):
        module.run(Settings(), on_ready=lambda: None)
