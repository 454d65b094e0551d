"""Messages of a process to its service manager (systemd, ``Type=notify``): ready, status, alive, stopping. See sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from bascule.core.log import get_log

log = get_log(__name__)

#: systemd advises a process to report at least twice within WATCHDOG_USEC; with a third, a late report does no harm.
REPORTS_PER_WATCHDOG: Final = 3
#: Interval of reports without a watchdog, in seconds: the status is at most this old.
REPORT_S: Final = 5.0
#: A report is dropped after this time, in seconds, if the service manager does not read its socket. The caller may be an event loop.
SEND_TIMEOUT_S: Final = 0.1


class ServiceManager:
    """The service manager of this process. Without one, all methods do nothing.

    ``interval_s`` is the longest time between two calls of ``alive``. ``alive_s`` is the time of the last call, on the monotonic clock, and
    ``reported`` the status of ``ready``, "" before it and after ``stopping``; both are kept without a service manager, too.
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Take the variables of the service manager out of ``environ`` (default: os.environ), so that children do not report.

        Variables that are meant for another process are ignored.
        """
        variables = os.environ if environ is None else environ
        address = variables.pop("NOTIFY_SOCKET", "")
        watchdog_us, watched = variables.pop("WATCHDOG_USEC", ""), variables.pop("WATCHDOG_PID", "")
        self.interval_s = REPORT_S
        self._watched = False
        if address and watchdog_us.isdecimal() and int(watchdog_us) and watched in ("", str(os.getpid())):
            self.interval_s = min(REPORT_S, int(watchdog_us) / 1e6 / REPORTS_PER_WATCHDOG)
            self._watched = True
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._due_s = 0.0
        self.alive_s = time.monotonic()
        self.reported = ""
        self._status = ""

    @property
    def present(self) -> bool:
        """Return whether there is a service manager."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Report that the process serves, or is a standby, with a status of one line."""
        self.reported = status
        self._send(f"READY=1\n{self._new_status(status)}")

    def reloading(self) -> None:
        """Report that the process reads its settings again. ``reloaded`` must follow."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}\n")

    def reloaded(self) -> None:
        """Report that the process follows its new settings, or goes on with those before."""
        self._send("READY=1\n")

    def stopping(self) -> None:
        """Report that the process begins to stop."""
        self.reported = ""
        self._send(f"STOPPING=1\n{self._new_status('stopping')}")

    def alive(self, status: str = "") -> None:
        """Report that the process makes progress, and its status if it has changed. Call this often: it reports once in ``interval_s``."""
        self.alive_s = now_s = time.monotonic()
        if not self._address or now_s < self._due_s:
            return
        self._due_s = now_s + self.interval_s
        message = "WATCHDOG=1\n" * self._watched + (self._new_status(status) if status != self._status and status else "")
        if message:
            self._send(message)

    def _new_status(self, status: str) -> str:
        self._status = status
        return f"STATUS={' '.join(status.split())}\n"

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(SEND_TIMEOUT_S)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("could not report to the service manager", error=str(error))


#: No service manager.
NO_SERVICE_MANAGER: Final = ServiceManager({})
