"""The adapter of a program, from its start to the signal that ends it."""

from __future__ import annotations

import subprocess
import sys

#: More than enough for a signal to come at each step of a wait.
ROUNDS = 100
#: Of a program whose main thread looks for the signal all the time.
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


def test_a_program_ends_at_whatever_moment_the_signal_comes() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
