"""A program notices a termination signal at any time, and ends at once after a second one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bascule.core.signals import StopSignals

#: Sends the signal at each step of a program's wait. A wait for an Event would hang in one of the first hundred rounds.
PROGRAM = """
import os, signal, threading
from bascule.core.signals import StopSignals
for _ in range(300):
    running = threading.Event()
    threading.Thread(target=lambda: (running.wait(), os.kill(os.getpid(), signal.SIGTERM))).start()
    with StopSignals() as stop:
        while not stop.wait(0.0):
            running.set()
"""


def test_program_ends_cleanly_whenever_the_signal_arrives() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_received_stop_signal_stays_set_and_handlers_are_restored_afterwards(number: signal.Signals) -> None:
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


def test_second_signal_interrupts_an_impatient_wait() -> None:
    with StopSignals(impatient=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
