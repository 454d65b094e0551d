"""An administrator of the pipelines of a driver, for tests without Spark."""

from __future__ import annotations

from bascule.kafka.control import ControlTopics
from bascule.writer.control import PipelineState, WantedState, Wish
from tests.scenarios.sparkless import Bridge, Running
from tests.support.system import wait_for

PAUSED, STOPPED, RUNNING = WantedState.PAUSED, WantedState.STOPPED, WantedState.RUNNING
TIMEOUT_S = 30.0


class Killed(BaseException):
    """The end of a driver at a crash point."""


class KillAt:
    """Raise Killed at a crash point, ``most`` times and only after ``passes`` passes. For ``at_crash_points``."""

    def __init__(self, place: str, *, most: int | None = None, passes: int = 0) -> None:
        self.kills = 0
        self._place, self._most, self._passes = place, most, passes

    def __call__(self, name: str) -> None:
        if name != self._place or self.kills == self._most:
            return
        if self._passes:
            self._passes -= 1
            return
        self.kills += 1
        raise Killed


class Operator:
    """An administrator of the pipelines of a driver."""

    def __init__(self, bridge: Bridge, topics: ControlTopics) -> None:
        self.bridge, self.topics = bridge, topics

    def want(self, pipeline: str, state: WantedState) -> None:
        self.topics.want(pipeline, Wish(state, "ann", 1))

    def follow(self, running: Running) -> None:
        """Let the driver follow what was wanted before the call."""

        def followed() -> bool:
            running.driver.poll()
            return not list(running.driver._control._steering.due)

        running.driver.poll()
        wait_for(followed, "the driver to follow")

    def await_state(self, running: Running, pipeline: str, state: PipelineState) -> None:
        """Return when the driver reports a pipeline, which may have no report yet, in a state."""
        wait_for(lambda: running.driver.poll() or self.states().get(pipeline) is state, f"{pipeline} to be reported as {state}")

    def states(self) -> dict[str, PipelineState]:
        return {name: report.state for name, report in self.topics.reports(TIMEOUT_S).pipelines.items()}
