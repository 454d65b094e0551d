import signal
import socket
import sys
from pathlib import Path

import pytest

from bascule.embedded import process
from bascule.embedded.process import Child, NotStarted, PortInUse, check_port, free_port


def python(tmp_path: Path, program: str) -> Child:
    return Child([sys.executable, "-c", program], log_file=tmp_path / "logs" / "child.log", name="Part")


SLEEPS = "import time; print('here', flush=True); time.sleep(60)"


def log_has(child: Child, text: str) -> bool:
    return text in child.log_file.read_text()


def test_child_becomes_ready_runs_and_stops(tmp_path: Path) -> None:
    child = python(tmp_path, SLEEPS)
    assert child.pid is None
    child.start()
    child.wait_ready(lambda: log_has(child, "here"), 20)
    assert child.running
    assert child.pid
    child.stop()
    assert child.returncode == -signal.SIGTERM
    assert child.pid is None


def test_killed_child_can_be_started_again(tmp_path: Path) -> None:
    child = python(tmp_path, SLEEPS)
    child.start()
    first = child.pid
    child.kill()
    assert child.returncode == -signal.SIGKILL
    child.start()
    assert child.pid not in (None, first)
    child.kill()


def test_child_that_exits_early_shows_only_its_own_log_lines(tmp_path: Path) -> None:
    child = python(tmp_path, "raise SystemExit('no heart for it')")
    child.log_file.parent.mkdir()
    child.log_file.write_text("words of an earlier run\n")
    child.start()
    with pytest.raises(NotStarted, match=r"(?s)Part ended with 1 before it was ready; end of .*child\.log:\nno heart for it") as caught:
        child.wait_ready(lambda: False, 20)
    assert "earlier run" not in str(caught.value)


def test_child_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    child = python(tmp_path, SLEEPS)
    child.start()
    with pytest.raises(NotStarted, match=r"was not ready after 0\.1 s"):
        child.wait_ready(lambda: False, 0.1)
    assert not child.running


def test_child_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path: Path) -> None:
    child = python(tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPS)
    child.start()
    child.wait_ready(lambda: log_has(child, "here"), 20)
    child.stop(timeout_s=0.1)
    assert child.returncode == -signal.SIGKILL


def test_child_has_sigterm_unblocked_though_its_parent_blocks_the_signal(tmp_path: Path) -> None:
    child = python(tmp_path, SLEEPS)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child.wait_ready(lambda: log_has(child, "here"), 20)
    child.stop()
    assert child.returncode == -signal.SIGTERM


def test_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotStarted, match="/no/such/program"):
        Child(["/no/such/program"], log_file=tmp_path / "log").start()


def test_free_ports_are_distinct_and_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    passing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = process.free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < passing
    monkeypatch.setattr(process, "LASTING_PORT_MIN", passing)
    assert free_port() >= passing  # a port of the ephemeral range is better than no port


def test_free_port_is_never_handed_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LASTING_PORT_MIN", process._first_passing_port() - 300)
    assert set(process.free_ports(50)).isdisjoint(process.free_ports(50))


def test_port_in_use_is_refused_and_free_port_is_accepted() -> None:
    check_port(free_port(), "Kafka", "--kafka-port")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortInUse, match="choose another with --kafka-port"):
            check_port(other.getsockname()[1], "Kafka", "--kafka-port")
