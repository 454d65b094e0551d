"""Reports to the service manager, over a real datagram socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from bascule.embedded import service_manager
from bascule.embedded.service_manager import REPORT_S, ServiceManager
from tests.support.service_manager import notify_socket


def test_process_reports_that_it_is_ready_alive_and_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(service_manager.time, "monotonic", lambda: now_s[0])
    with notify_socket(tmp_path / "notify", watchdog_s=6) as manager:
        service = ServiceManager(manager.environ)
        assert service.present
        assert service.interval_s == 2
        service.ready("active")
        service.alive("active")
        service.alive("active")  # within the interval
        now_s[0] = 2.0
        service.alive("waiting:\nKafka is away")
        service.stopping()
        assert manager.messages() == [
            ["READY=1", "STATUS=active"],
            ["WATCHDOG=1"],
            ["WATCHDOG=1", "STATUS=waiting: Kafka is away"],
            ["STOPPING=1", "STATUS=stopping"],
        ]


def test_children_do_not_inherit_the_variables(tmp_path: Path) -> None:
    with notify_socket(tmp_path / "notify", watchdog_s=6) as manager:
        environ = {**manager.environ, "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
        ServiceManager(environ)
        assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}])
def test_without_watchdog_of_this_process_only_the_status_is_reported(tmp_path: Path, variables: dict[str, str]) -> None:
    with notify_socket(tmp_path / "notify") as manager:
        service = ServiceManager(manager.environ | variables)
        assert service.interval_s == REPORT_S
        service.alive("active")
        assert manager.messages() == [["STATUS=active"]]


def test_abstract_socket_is_found_by_its_name() -> None:
    name = f"bascule-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready("active")
        assert manager.recv(100) == b"READY=1\nSTATUS=active\n"


def test_process_without_service_manager_reports_nothing() -> None:
    service = ServiceManager({"WATCHDOG_USEC": "1000"})
    assert not service.present
    service.ready("active")
    service.alive("active")
    service.stopping()


def test_missing_socket_does_not_stop_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "missing")}).ready("active")
    assert "could not report to the service manager" in caplog.text
