"""A process that was asked to end ends in time, whatever holds its main thread."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.speed import SLOWNESS

#: The main thread is in a call that no signal interrupts, as in a call of a Kafka client that waits for Kafka.
HELD = """
import hashlib, logging, os, sys
from bascule.core.signals import StopSignals
from bascule.threads.prompt_end import end_within
logging.basicConfig()
end_within(float(sys.argv[1]))
with StopSignals() as stop:
    print("ready", flush=True)
    if sys.argv[2] == "held":
        hashlib.pbkdf2_hmac("sha512", b"", b"", 2**31 - 1)
    while not stop.wait(60):
        pass
    print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_whose_main_thread_is_held_ends_in_time(number: signal.Signals) -> None:
    with started("0.1", "held") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=60 * SLOWNESS)
    assert process.returncode == 0
    assert "orderly end took too long, process ends timeout_s=0.1" in said


def test_process_that_ends_in_order_ends_at_once() -> None:
    with started("3600", "free") as process:
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=60 * SLOWNESS)
    assert (process.returncode, out, "too long" in said) == (0, "stopped\n", False)


def started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HELD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process
