"""When a driver stops by itself, and when it continues."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from bascule.core.errors import BadRecord, BasculeError
from bascule.pipelines import driver as module
from bascule.pipelines.driver import Driver, run_pipelines
from bascule.pipelines.ingresses import DriverIngresses
from bascule.pipelines.positions import Positions
from bascule.pipelines.queries import PipelineStopped, Query
from bascule.pipelines.spec import IngressSpec, PipelinesSpec
from bascule.writer.claims import Claim
from bascule.writer.position import PositionTaken

BAD, TAKEN = BadRecord("no JSON"), PositionTaken("another driver holds it")
#: A program of drivers whose main thread checks for the signal at any time. Spark's gateway also sets signal handlers.
SIGNALLED = """
import contextlib, os, signal, threading
from bascule.pipelines import driver
class Fake:
    queries, held, all_tried, amendable = {}, set(), True, False
    def __init__(self, *_):
        self.polled = threading.Event()
    watched = contextlib.nullcontext
    def start(self, turn):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=lambda: (self.polled.wait(), os.kill(os.getpid(), signal.SIGTERM))).start()
        return True
    def poll(self):
        self.polled.set()
    def stop(self):
        pass
driver.Driver, driver.POLL_S = Fake, 0.0
for _ in range(100):
    driver.run_pipelines(None, on_ready=lambda: None)
"""


def stopped_by(
    polls: int, monkeypatch: pytest.MonkeyPatch, *reasons: BasculeError | None, held_by_admin: Collection[str] = (), all_tried: bool = True,
    amendable: bool = False,
) -> str | None:  # fmt: skip
    """Return the error with which a driver stops if its queries stopped for ``reasons``, or None if it still runs after ``polls`` polls."""

    class Fake:
        def __init__(self, *_: object) -> None:
            self.left = polls
            self.held, self.all_tried, self.amendable = set(held_by_admin), all_tried, amendable
            self.queries = {str(n): Query(str(n), lambda: None, Path(), failure=reason) for n, reason in enumerate(reasons)}

        def start(self, _turn: object) -> bool:
            return True

        def watched(self) -> AbstractContextManager[None]:
            return nullcontext()

        def poll(self) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def stop(self) -> None:
            pass

    monkeypatch.setattr(module, "Driver", Fake)
    monkeypatch.setattr(module, "POLL_S", 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        run_pipelines(PipelinesSpec("a", {}), on_ready=lambda: None)
    except PipelineStopped as error:
        return str(error)
    except KeyboardInterrupt:
        return None
    raise AssertionError("the driver stopped without a reason")


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        ((), None),
        ((None, None), None),
        ((None, BAD), None),
        ((BAD, BAD), "0: BadRecord: no JSON; 1: BadRecord: no JSON"),
        ((None, TAKEN, BAD), "1: PositionTaken: another driver holds it; 2: BadRecord: no JSON"),
    ],
)
def test_driver_ends_when_all_queries_stopped_or_another_driver_took_over(
    reasons: tuple[BasculeError | None, ...], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stopped_by(3, monkeypatch, *reasons) == message


def test_driver_waits_for_an_administrator_while_all_queries_that_stopped_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped_by(3, monkeypatch, BAD, BAD, held_by_admin=["1"]) is None
    assert "holds it" in (stopped_by(3, monkeypatch, TAKEN, held_by_admin=["0"]) or "")


def test_driver_does_not_end_before_it_has_tried_to_start_all_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped_by(3, monkeypatch, BAD, all_tried=False) is None
    assert "holds it" in (stopped_by(3, monkeypatch, TAKEN, all_tried=False) or "")


def test_driver_continues_while_a_definition_made_at_run_time_can_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped_by(3, monkeypatch, BAD, amendable=True) is None
    assert "holds it" in (stopped_by(3, monkeypatch, TAKEN, amendable=True) or "")


def test_driver_ends_cleanly_whenever_the_signal_arrives() -> None:
    ended = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=60, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_ingress_with_missing_topics_holds_no_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverIngresses, "_matching", lambda *_: {})
    monkeypatch.setattr(Positions, "take_sources", lambda *_, **__: [])
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    ingresses = Driver(PipelinesSpec("a", kafka, ingresses=(IngressSpec("in", "queue", ("t",)),), checkpoint_dir=str(tmp_path)))._ingresses
    ingresses.claims["ingress:in"] = (Claim("ingress:in/t/0", "t", "id", 0, "driver.1"),)
    assert ingresses.query("in") is None
    assert ingresses.claims == {"ingress:in": ()}
