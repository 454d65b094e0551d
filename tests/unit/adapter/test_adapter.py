"""The adapter of a program, from its start to its end by a signal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from bascule.adapter.inbound import Activation, ActivationSpec, ResourceAdapter
from bascule.core.errors import InvalidInput, Unavailable

#: Enough rounds for a signal to arrive at each step of a wait.
ROUNDS = 100
#: A program whose main thread checks for the signal at any time.
PROGRAM = f"""
import os, signal, threading
from bascule.adapter.inbound import ResourceAdapter, adapter
adapter.LOOK_S = 0.0
running = threading.Event()
class Watched(ResourceAdapter):
    def status(self):
        running.set()
        return []
def tell():
    running.wait()
    os.kill(os.getpid(), signal.SIGTERM)
for _ in range({ROUNDS}):
    running.clear()
    threading.Thread(target=tell).start()
    Watched({{}}).run()
"""


def test_program_ends_cleanly_whenever_the_signal_arrives() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


class Activations:
    """Records the starts and stops of activations. ``fails`` is the group that cannot start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.calls: list[str] = []

        def prepare(activation: Any) -> None:
            if activation.spec.group == fails:
                raise Unavailable("no Kafka")
            self.calls.append(f"prepare {activation.spec.group}")

        def consume(activation: Any) -> None:
            self.calls.append(f"consume {activation.spec.group}")

        def stop(activation: Any, _drain_s: float) -> list[str]:
            self.calls.append(f"stop {activation.spec.group}")
            return [f"{activation.spec.group}-1"]

        monkeypatch.setattr(Activation, "prepare", prepare)
        monkeypatch.setattr(Activation, "consume", consume)
        monkeypatch.setattr(Activation, "stop", stop)


def adapter(*groups: str) -> ResourceAdapter:
    made = ResourceAdapter({})
    for group in groups:
        made.endpoint(ActivationSpec(topics=("payments",), group=group))(lambda _: None)
    return made


def test_endpoints_start_and_stop_with_adapter_and_stop_returns_threads_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = Activations(monkeypatch)
    with adapter("shop", "store") as made:
        assert activations.calls == ["prepare shop", "prepare store", "consume shop", "consume store"]
        late = made.activate(ActivationSpec(topics=("orders",), group="late"), lambda _: None)
        assert activations.calls[-2:] == ["prepare late", "consume late"]
        assert made.deactivate(late) == ["late-1"]
        assert [status.group for status in made.status()] == ["shop", "store"]
        assert sorted(made.stop()) == ["shop-1", "store-1"]
    assert sorted(activations.calls[7:9]) == ["stop shop", "stop store"]


def test_failed_start_of_one_endpoint_stops_all_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = Activations(monkeypatch, fails="store")
    made = adapter("shop", "store")
    with pytest.raises(Unavailable, match="no Kafka"):
        made.start()
    assert activations.calls == ["prepare shop", "stop shop"]
    assert made.deactivate(made._activations[0]) == []


def test_second_endpoint_for_same_group_is_refused() -> None:
    with pytest.raises(InvalidInput, match="group 'shop' already has an endpoint"):
        adapter("shop", "shop")


def test_run_raises_error_when_endpoint_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.adapter.inbound.adapter.LOOK_S", 0.0)
    activations = Activations(monkeypatch)
    made = adapter("shop")
    made._activations[0]._fail(ValueError("broken"))
    with pytest.raises(Unavailable, match="endpoint of group 'shop' stopped: broken"):
        made.run()
    assert activations.calls == ["prepare shop", "consume shop", "stop shop"]
