"""The transformations of examples/, and the commands around them in the guides, with their own broker and pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT
from tests.support.system import System, wait_for

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]


class Site:
    """A system, and the commands of a user."""

    def __init__(self, system: System, config: Path) -> None:
        self.system = system
        self.env = os.environ | {
            "BASCULE_CONFIG": str(config),
            "BASCULE_KAFKA__BOOTSTRAP_SERVERS": system.bootstrap,
            "BASCULE_BRIDGE__ID": system.prefix,
            "BASCULE_JOURNAL__PREFIX": system.prefix,
            "BASCULE_BROKER__PORT": str(system.port),
        }

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], env=self.env, capture_output=True, text=True, timeout=200, check=False)

    def bascule(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "bascule.cli", *arguments)

    def topic(self, name: str, count: int) -> list[tuple[str, Any]]:
        """Return key and JSON value of the records that a reader of the topic gets."""
        done = self.run(
            EXAMPLES / "kafka_topic.py", "read", name, "--count", str(count), "--timeout-s", "180", "--bootstrap", self.system.bootstrap
        )
        assert done.returncode == 0, done.stderr + self.system.pipelines.said()
        records = [line.split(" ", 1) for line in done.stdout.splitlines()]
        return [(key, json.JSONDecoder().raw_decode(rest)[0]) for key, rest in records]

    def verified(self) -> dict[str, Any]:
        done = self.bascule("verify", "--format", "json")
        assert done.stdout, done.stderr
        return {row["divert"]: row for row in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def site(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("transformed")
    config = (EXAMPLES / "transformed.toml").read_text()
    with System(kafka.bootstrap, directory, prefix="transformed", config=config, env={"PYTHONPATH": str(EXAMPLES)}) as system:
        system.pipelines.start()
        yield Site(system, directory / "bascule.toml")


def test_transformed_messages_are_written_to_their_topics_and_verified(site: Site) -> None:
    for flight, carrier, delay in ((11, "B6", 90), (12, "XX", 30), (13, "UA", 6)):
        properties = ("--property", f"carrier={carrier}", "--property", f"dep_delay:int={delay}")
        assert site.bascule("send", "flights", "--text", json.dumps({"flight": flight}), *properties).returncode == 0
    assert site.topic("kafka.flights.hours", 3) == [
        ("B6", {"flight": "11", "hours": 1.5}),
        ("XX", {"flight": "12", "hours": 0.5}),
        ("UA", {"flight": "13", "hours": 0.1}),
    ]
    assert site.topic("kafka.flights.named", 2) == [
        ("B6", {"airline": "JetBlue", "flight": 11}),
        ("UA", {"airline": "United", "flight": 13}),
    ]

    def complete() -> bool:
        verified = site.verified()
        return all(row["exact"] for row in verified.values()) and [verified[name]["found"] for name in ("hours", "named")] == [3, 2]

    wait_for(complete, "the positions behind the three messages")
