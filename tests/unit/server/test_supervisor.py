"""The supervisor over real processes that do nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.signals import StopSignals
from bascule.embedded.process import PortInUse
from bascule.embedded.service_manager import ServiceManager
from bascule.server.supervisor import BACKOFF_MAX_S, STEADY_S, CommandPart, PartState, Supervisor, backoff_s, choose_ports
from tests.support.service_manager import notify_socket

SERVES = "import signal; print('ready now', flush=True); signal.pause()"


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


def part(directory: Path, name: str, program: str = SERVES) -> CommandPart:
    return CommandPart(name, [sys.executable, "-c", program], log_file=directory / f"{name}.log")


@contextmanager
def running(directory: Path, parts: list[CommandPart], reports: list[str]) -> Iterator[Path]:
    """Run the supervisor in a thread until the end of the test; yield the file of process ids."""
    stop, ready = StopSignals(), threading.Event()
    supervisor = Supervisor(parts, pids_file=directory / "pids.json", tell=reports.append)
    thread = threading.Thread(target=supervisor.run, args=(stop, ready.set))
    thread.start()
    try:
        assert ready.wait(20)
        yield directory / "pids.json"
    finally:
        stop.set()
        thread.join()


def pids(file: Path) -> dict[str, int | None]:
    content: dict[str, int | None] = json.loads(file.read_text())
    return content


def alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_supervisor_reports_to_the_service_manager(tmp_path: Path) -> None:
    stop = StopSignals()
    with notify_socket(tmp_path / "notify", watchdog_s=60) as manager:
        service = ServiceManager(manager.environ)
        supervisor = Supervisor([part(tmp_path, "broker")], pids_file=tmp_path / "pids.json", tell=print, service_manager=service)
        supervisor.run(stop, stop.set)
        assert manager.messages() == [["WATCHDOG=1"], ["STOPPING=1", "STATUS=stopping"]]


def test_a_killed_part_is_restarted_and_its_new_process_id_recorded(tmp_path: Path) -> None:
    reports: list[str] = []
    with running(tmp_path, [part(tmp_path, "broker"), part(tmp_path, "pipelines")], reports) as file:
        before = pids(file)
        assert before["broker"] is not None
        os.kill(before["broker"], signal.SIGKILL)
        until(lambda: pids(file)["broker"] not in (None, before["broker"]))
        until(lambda: len(reports) == 2)
        after = pids(file)
        assert alive(after["broker"])
        assert after["pipelines"] == before["pipelines"]
    assert reports[0].startswith("broker ended with -9; see ")
    assert reports[1] == f"broker is ready again (process {after['broker']})"
    assert pids(file) == {"broker": None, "pipelines": None}
    assert not any(alive(pid) for pid in after.values())


def test_a_part_starts_when_the_parts_before_it_are_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n{SERVES}"
    first, second = part(tmp_path, "first", waits), part(tmp_path, "second")
    supervisor = Supervisor([first, second], pids_file=tmp_path / "pids.json", tell=lambda _line: None)
    try:
        supervisor.look(0.0)
        supervisor.look(1.0)
        assert first.pid is not None
        assert second.pid is None
        gate.touch()
        until(first.ready)
        supervisor.look(2.0)
        supervisor.look(2.0)
        assert second.pid is not None
        until(second.ready)
        supervisor.look(3.0)
        assert supervisor.all_ready
    finally:
        first.stop(5)
        second.stop(5)


def test_a_ready_part_is_asked_to_reload_and_another_one_once_it_is_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    reloads = (
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGHUP, lambda *_: print('reloaded', flush=True))\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        "print('ready now', flush=True)\n"
        "while True: signal.pause()"
    )
    late = part(tmp_path, "late", reloads)
    supervisor = Supervisor([late], pids_file=tmp_path / "pids.json", tell=lambda _line: None)
    try:
        supervisor.look(0.0)
        supervisor.hang_up()
        supervisor.look(1.0)
        assert late.pid is not None
        assert (tmp_path / "late.log").read_text() == ""
        gate.touch()
        until(late.ready)
        supervisor.look(2.0)
        supervisor.look(3.0)
        until(lambda: "reloaded" in (tmp_path / "late.log").read_text())
        assert late.pid is not None
    finally:
        late.stop(5)


def test_repeated_deaths_increase_the_backoff_and_a_steady_run_resets_it(tmp_path: Path) -> None:
    broker = part(tmp_path, "broker")
    supervisor = Supervisor([broker], pids_file=tmp_path / "pids.json", tell=lambda _line: None)
    (watched,) = supervisor._watched
    now_s = 0.0

    def serves_and_dies(after_s: float) -> float:
        nonlocal now_s
        supervisor.look(now_s)
        until(broker.ready)
        supervisor.look(now_s)
        assert watched.state is PartState.READY
        broker.stop(5)
        now_s += after_s
        supervisor.look(now_s)
        delay_s = watched.due_s - now_s
        supervisor.look(watched.due_s - 0.001 if delay_s else now_s - 1)
        assert broker.pid is None, "started before its time"
        now_s = watched.due_s
        return delay_s

    assert [serves_and_dies(1.0) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert serves_and_dies(STEADY_S) == 0.0
    assert backoff_s(100) == BACKOFF_MAX_S


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        ("import sys; print('error: no JDK'); sys.exit(3)", Unavailable, "no JDK"),
        ("import sys; print('starting'); print('error: bad\\n  more\\nnoise'); sys.exit(2)", InvalidInput, "bad\n  more"),
        ("import sys; sys.exit(7)", Unavailable, "broker ended with 7; see "),
    ],
)
def test_a_part_that_was_never_ready_fails_the_start_with_its_own_error(
    tmp_path: Path, program: str, kind: type[Exception], text: str
) -> None:
    supervisor = Supervisor([part(tmp_path, "broker", program)], pids_file=tmp_path / "pids.json", tell=lambda _line: None)
    with pytest.raises(kind) as raised:
        supervisor.run(StopSignals(), lambda: None)
    assert str(raised.value) == text or str(raised.value).startswith("broker ended with 7; see ")


def test_automatically_chosen_ports_are_reused_in_next_run(tmp_path: Path) -> None:
    wanted = {"amqp": (0, "--amqp-port", "127.0.0.1"), "admin": (0, "--admin-port", "127.0.0.1")}
    first = choose_ports(tmp_path / "ports.json", wanted)
    assert choose_ports(tmp_path / "ports.json", wanted) == first
    with socket.create_server(("127.0.0.1", first["amqp"])):
        second = choose_ports(tmp_path / "ports.json", wanted)
        assert second["amqp"] != first["amqp"]
        assert second["admin"] == first["admin"]
        with pytest.raises(PortInUse, match=rf"port {first['amqp']} for amqp on 127.0.0.1 .* --amqp-port"):
            choose_ports(tmp_path / "ports.json", {"amqp": (first["amqp"], "--amqp-port", "127.0.0.1")})
