"""Diverts with a user run only while the active broker says that the user may consume. On the mock cluster, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from bascule.broker.divert_access import DivertAccess, DivertUser
from bascule.core.kafka_records import Outgoing
from bascule.kafka.appender import Appender
from bascule.kafka.control import ControlTopics
from bascule.pipelines import control, driver
from bascule.pipelines.holds import Holds
from bascule.pipelines.spec import DivertSpec, user_of_definition
from bascule.writer.control import PipelineReport, PipelineState, WantedState
from bascule.writer.position import COMMON
from tests.scenarios.operating import STOPPED, TIMEOUT_S, KillAt, Killed, Operator
from tests.scenarios.sparkless import Bridge, Running
from tests.scenarios.test_defined_diverts import NAME, DivertDefiner
from tests.support.crash_points import at_crash_points
from tests.support.system import wait_for

REFUSED = "user 'ann' has no permission 'consume' on address '#'"


@pytest.fixture
def topics(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlTopics]:
    monkeypatch.setattr(control, "LOOK_S", 0.0)
    found = ControlTopics(bridge.pipelines.kafka, bridge.pipelines.topics)
    yield found
    found.close()


@pytest.fixture
def operator(bridge: Bridge, topics: ControlTopics) -> Operator:
    return Operator(bridge, topics)


@pytest.fixture
def definer(bridge: Bridge, topics: ControlTopics) -> DivertDefiner:
    return DivertDefiner(bridge, topics)


def say(operator: Operator, name: str, reason: str = "", user: str = "ann", address: str = "#") -> None:
    operator.topics.say_access(name, DivertAccess(user, address, reason, 1))


def reported(operator: Operator, running: Running, pipeline: str, state: PipelineState, error: str) -> PipelineReport:
    """Return the report of a pipeline when it has a state and an error."""

    def reports() -> Mapping[str, PipelineReport]:
        running.driver.poll()
        return operator.topics.reports(TIMEOUT_S).pipelines

    wait_for(lambda: (found := reports().get(pipeline)) and found.state is state and error in found.error, f"{pipeline} {state} {error}")
    return reports()[pipeline]


def test_divert_runs_while_the_broker_allows_it_and_is_stopped_with_the_reason_while_it_does_not(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MIRROR_S", 0.0)
    bridge.journal.start_epoch(["x"])
    say(operator, "x")
    with bridge.running(bridge.divert("x", exclusive=True, user="ann"), bridge.divert("y")) as running:
        running.settle()
        bridge.send("1", taken_by=["x"])
        running.batch()
        assert list(running.driver.queries) == [COMMON]
        say(operator, "x", REFUSED)
        operator.follow(running)
        bridge.send("2", taken_by=["x"])
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == (["1"], ["1", "2"])
        report = reported(operator, running, "divert:x", PipelineState.STOPPED, REFUSED)
        assert (report.error, report.error_at_ms) == (REFUSED, 0)
        assert running.driver._control._redrives.refused == {"divert:x": REFUSED}, "a redrive that runs would go on"

        def said() -> bool:
            running.driver.poll()
            return {pin.name: pin.reason for pin in bridge.keepers().found(bridge.snapshot())}.get("divert:x") == REFUSED

        wait_for(said, "the reason why the journal is kept")
        operator.want("divert:x", WantedState.RUNNING)
        operator.follow(running)
        assert running.query("divert:x") is None, "an administrator cannot override the permissions"
        say(operator, "x")
        operator.follow(running)
        running.settle()
        assert list(running.driver.queries) == [COMMON]
        bridge.send("3", taken_by=["x"])
        running.batch()
        reported(operator, running, "divert:x", PipelineState.RUNNING, "")
    assert bridge.carried("x") == bridge.carried("y") == ["1", "2", "3"]
    assert bridge.dead() == []


def test_running_redrive_learns_of_a_refusal_before_the_driver_stops_the_divert(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, known = Holds.hold, list[Mapping[str, str]]()

    def held(holds: Holds, pipeline: str) -> bool:
        known.append(running.driver._control._redrives.refused)
        return hold(holds, pipeline)

    monkeypatch.setattr(Holds, "hold", held)
    bridge.journal.start_epoch()
    say(operator, "x")
    with bridge.running(bridge.divert("x", user="ann")) as running:
        running.settle()
        say(operator, "x", REFUSED)
        operator.follow(running)
    assert known[:1] == [{"divert:x": REFUSED}]


@pytest.mark.parametrize("said", [None, ("bob", "#"), ("ann", "orders.#")])
def test_divert_without_a_decision_about_its_user_and_its_addresses_waits_for_one(
    bridge: Bridge, operator: Operator, said: tuple[str, str] | None
) -> None:
    bridge.journal.start_epoch()
    if said is not None:
        say(operator, "x", user=said[0], address=said[1])
    with bridge.running(bridge.divert("x", user="ann"), bridge.divert("y", group="g")) as running:
        running.settle()
        bridge.send("1")
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == ([], ["1"])
        reported(operator, running, "divert:x", PipelineState.STOPPED, "no active broker has decided whether user 'ann' may consume")
        say(operator, "x")
        operator.follow(running)
        running.settle()
        running.batch()
    assert bridge.carried("x") == ["1"]


def test_divert_that_an_administrator_has_stopped_stays_stopped_when_it_is_allowed(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    operator.want("divert:x", STOPPED)
    with bridge.running(bridge.divert("x", user="ann")) as running:
        reported(operator, running, "divert:x", PipelineState.STOPPED, "no active broker")
        say(operator, "x")
        operator.follow(running)
        report = reported(operator, running, "divert:x", PipelineState.STOPPED, "")
        wait_for(lambda: running.driver.poll() or not operator.topics.reports(TIMEOUT_S).pipelines["divert:x"].error, "no error")
        assert report.state is PipelineState.STOPPED


def test_decision_that_cannot_be_read_stops_the_divert(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    appender = Appender(bridge.pipelines.kafka)
    appender.append(Outgoing(bridge.pipelines.topics.control, b"access/divert:x", b"damaged", partition=0)).result()
    appender.close()
    with bridge.running(bridge.divert("x", user="ann")) as running:
        reported(operator, running, "divert:x", PipelineState.STOPPED, "no active broker")
    assert operator.topics.controlled_diverts(TIMEOUT_S).access == {"x": DivertAccess("", "")}


@pytest.mark.parametrize("place", ["hold.before", "hold.after", "join.before", "join.caught_up", "join.after"])
def test_driver_killed_while_a_divert_is_refused_and_allowed_loses_and_repeats_nothing(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    bridge.journal.start_epoch(["x"])
    kill = KillAt(place, most=1)

    def diverts() -> tuple[DivertSpec, ...]:
        return bridge.divert("x", exclusive=True, user="ann"), bridge.divert("y")

    def run(text: str) -> None:
        with bridge.running(*diverts()) as running:
            operator.follow(running)
            running.settle()
            bridge.send(text, taken_by=["x"])
            running.batch()

    say(operator, "x")
    run("1")
    with monkeypatch.context() as patched:
        for text, reason in (("2", REFUSED), ("3", "")):
            with bridge.running(*diverts()) as running:
                running.settle()
                at_crash_points(patched, kill)
                say(operator, "x", reason)
                try:
                    operator.follow(running)
                    running.settle()
                except Killed:
                    pass
            run(text)
            assert (bridge.carried("x")[-1:] == [text]) == (not reason)
    assert kill.kills
    assert bridge.carried("x") == bridge.carried("y") == ["1", "2", "3"]
    assert bridge.dead() == []


def test_refused_divert_never_runs_with_its_old_settings_while_it_cannot_be_changed(
    bridge: Bridge, operator: Operator, definer: DivertDefiner
) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("y")) as running:
        running.settle()
        definer.create(user="ann")
        say(operator, "late", REFUSED)
        definer.follow(running)
        bridge.send("secret")
        definer.create(revision=2, setting_of_a_later_version=True)
        wait_for(lambda: running.driver.poll() or NAME in running.driver._control._defined._failures, "the driver to try the change")
        running.driver.poll()
        reported(operator, running, NAME, PipelineState.STOPPED, REFUSED)
        assert definer.carry_all(running) == []
        definer.create(revision=3)
        definer.follow(running)
        running.settle()
        assert definer.carry_all(running) == ["secret"]


def test_decision_about_a_divert_is_about_its_addresses_whatever_their_setting_is_called() -> None:
    for name in ("from", "from_address"):
        assert user_of_definition(NAME, {"user": "ann", name: "orders.#"}) == DivertUser("ann", "orders.#")


def test_divert_that_is_defined_at_run_time_is_stopped_when_its_new_user_may_not_consume(
    bridge: Bridge, operator: Operator, definer: DivertDefiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.journal.start_epoch()
    hold, started = Holds.hold, list[bool]()

    def held(holds: Holds, pipeline: str) -> bool:
        started.append(running.driver.queries[pipeline].running is not None)
        return hold(holds, pipeline)

    monkeypatch.setattr(Holds, "hold", held)
    with bridge.running(bridge.divert("y")) as running:
        running.settle()
        definer.create(user="ann")
        definer.follow(running)
        bridge.send("1")
        assert definer.carry_all(running) == []
        reported(operator, running, NAME, PipelineState.STOPPED, "no active broker has decided whether user 'ann'")
        say(operator, "late")
        definer.follow(running)
        assert definer.carry_all(running) == ["1"]
        definer.create(revision=2, user="bob")
        bridge.send("2")
        definer.follow(running)
        assert started == [False], "the task was started for the new user before it was stopped"
        assert definer.carry_all(running) == ["1"]
        reported(operator, running, NAME, PipelineState.STOPPED, "no active broker has decided whether user 'bob'")
        say(operator, "late", user="bob", reason=REFUSED)
        reported(operator, running, NAME, PipelineState.STOPPED, REFUSED)
        definer.create(revision=3)
        definer.follow(running)
        assert definer.carry_all(running) == ["1", "2"], "a divert without a user needs no permission"
        definer.delete()
        definer.follow(running)
        assert definer.kept() == []
