"""Drivers of one bridge on Kafka in memory. One driver runs the pipelines, and the others stand by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from bascule.core.signals import StopSignals
from bascule.core.topics import JournalTopics
from bascule.kafka import election
from bascule.pipelines import standby as module
from bascule.pipelines.queries import PipelineStopped
from bascule.pipelines.spec import PipelinesSpec
from bascule.pipelines.standby import DriverTurn
from bascule.threads.background import in_background
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.system import wait_for
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures


@pytest.fixture
def driver(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DriverTurn]:
    monkeypatch.setattr(module, "STANDBY_AFTER_S", 0.1)
    monkeypatch.setattr(election, "POLL_S", 0.01)
    monkeypatch.setattr(StopSignals, "listen", lambda _: {})
    kafka.create("bascule.ingress")

    def make(stop: StopSignals, reports: list[str], bridge: str = "b1", instance: str | None = None) -> DriverTurn:
        pipelines = PipelinesSpec(bridge, SETTINGS, topics=JournalTopics("bascule"), instance=instance)
        return DriverTurn(pipelines, stop, lambda: reports.append("standby"))

    return make


def test_second_driver_waits_as_standby_until_first_ends(driver: Callable[..., DriverTurn]) -> None:
    reports: list[str] = []
    stop = StopSignals()
    with ExitStack() as ends:
        first, second = driver(stop, []), ends.enter_context(driver(stop, reports))
        with first:
            assert first.wait()
            waiting = in_background(second.wait, "second")
            wait_for(lambda: reports, "the second one to stand by")
            first.check()
            assert not waiting.done()
        assert waiting.result(20)
        second.check()
        assert reports == ["standby"]


def test_driver_restarted_under_its_name_continues_although_session_of_killed_one_has_not_ended(driver: Callable[..., DriverTurn]) -> None:
    reports: list[str] = []
    first = driver(StopSignals(), [], instance="one")
    assert first.wait()
    assert first._election is not None
    first._election.close(resign=False)  # Kafka sees no difference to a kill
    with driver(StopSignals(), reports, instance="two") as other:
        waiting = in_background(other.wait, "other")
        wait_for(lambda: reports, "a driver with another name to stand by")
        with driver(StopSignals(), [], instance="one") as second:
            assert second.wait()
            second.check()
            assert not waiting.done()
        assert waiting.result(20)


def test_standby_driver_ends_on_stop_signal(driver: Callable[..., DriverTurn]) -> None:
    reports: list[str] = []
    with driver(StopSignals(), []) as first:
        assert first.wait()
        stop = StopSignals()
        with driver(stop, reports) as second:
            waiting = in_background(second.wait, "second")
            wait_for(lambda: reports, "the second one to stand by")
            stop.set()
            assert waiting.result(20) is False


def test_driver_that_lost_election_stops(driver: Callable[..., DriverTurn], kafka: KafkaInMemory) -> None:
    with driver(StopSignals(), []) as turn:
        assert turn.wait()
        turn.check()
        turn._changed(False)
        with pytest.raises(PipelineStopped, match="elected another driver of this bridge"):
            turn.check()


def test_drivers_of_different_bridges_do_not_wait_for_each_other(driver: Callable[..., DriverTurn]) -> None:
    with driver(StopSignals(), []) as one, driver(StopSignals(), [], "b2") as other:
        assert one.wait()
        assert other.wait()
