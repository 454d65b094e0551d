"""A signal that asks a program to end is found at whatever moment it comes, and a second one does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bascule.core.signals import StopSignals

#: Ends a program at each step of its wait: with an Event it would hang in one of the first hundred rounds.
PROGRAM = """
import os, signal, threading
from bascule.core.signals import StopSignals
for _ in range(1000):
    running = threading.Event()
    threading.Thread(target=lambda: (running.wait(), os.kill(os.getpid(), signal.SIGTERM))).start()
    with StopSignals() as stop:
        while not stop.wait(0.0):
            running.set()
"""


def test_a_program_ends_at_whatever_moment_the_signal_comes() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_has_come_stays_and_after_that_signals_do_what_they_did_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.is_set()
        assert not stop.wait(0.0)
        for _ in range(2):
            os.kill(os.getpid(), number)
            begun_s = time.monotonic()
            assert stop.wait(60)
            assert stop.is_set()
            assert time.monotonic() - begun_s < 30
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_wait_where_nobody_is_to_wait() -> None:
    with StopSignals(impatient=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
