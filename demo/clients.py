"""The clients of the demo: Java programs, and a thread that produces the airports."""

from __future__ import annotations

import csv
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Producer

from tests.support.java import java_command

POLL_S = 0.1


class Java:
    """A Java program, with its JSON lines as they arrive. It ends with the demo, however the demo ends."""

    running: ClassVar[list[Java]] = []

    def __init__(self, program: str, *arguments: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self._process = subprocess.Popen(java_command(program, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.running.append(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def tell(self, command: str) -> None:
        """Write a line to the standard input of the program, unless the program has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the program. Return whether it succeeded."""
        done = self._process.wait(timeout_s) == 0
        self._reader.join()
        return done

    @property
    def failed(self) -> bool:
        """Return whether the program has ended with an error."""
        return self._process.poll() not in (None, 0)

    def last(self, field: str) -> int:
        """Return a number of the last line that has it; 0 if there is none."""
        return next((int(line[field]) for line in reversed(self.lines) if field in line), 0)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of an event."""
        return [line for line in self.lines if line.get("event") == name]

    def received(self, subscriber: str) -> int:
        """Return the number of messages that a subscriber has received so far."""
        return next((int(line["received"]) for line in reversed(self.lines) if line.get("subscriber") == subscriber), 0)

    def kill(self) -> None:
        """End the program."""
        self._process.kill()


class Airports(threading.Thread):
    """Produces the airports as records of a Kafka topic while the flights are sent. The key is the airport's code."""

    def __init__(self, bootstrap: str, topic: str, file: Path, share: Callable[[], float]) -> None:
        """``share`` returns the share of the airports that are due, from 0 to 1."""
        super().__init__(name="airports", daemon=True)
        with file.open() as lines:
            self._rows = list(csv.DictReader(lines))
        self._topic, self._share = topic, share
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 2})
        self._ending = threading.Event()
        self.stored = 0

    @property
    def total(self) -> int:
        """Return the number of airports."""
        return len(self._rows)

    def run(self) -> None:
        produced = 0
        while produced < self.total and not self._ending.wait(POLL_S):
            due = int(self.total * min(1.0, self._share()))
            for row in self._rows[produced:due]:
                self._producer.produce(self._topic, json.dumps(row).encode(), key=row["faa"].encode(), on_delivery=self._delivered)
            produced = max(produced, due)
            self._producer.poll(0)
        self._producer.flush()

    def _delivered(self, error: object, _message: object) -> None:
        self.stored += error is None

    def stop(self) -> None:
        """End without the rest of the airports."""
        self._ending.set()
        self.join()
