"""A broker with the packages of its image: the life of a message and the positions of a divert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bascule import ConnectionFactory, Message, Queue
from bascule.embedded.kafka import EmbeddedKafka
from tests.support.hidden_packages import environment, locked
from tests.support.system import System

CONFIG = '[[divert]]\nname = "orders"\nfrom = "orders"\nto = "installed.orders"\n'


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("packages"), locked("requirements-broker.lock"))


@pytest.fixture(scope="module")
def broker(kafka: EmbeddedKafka, packages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("installed"), prefix="installed", config=CONFIG, env=packages) as system:
        yield system


def sent(broker: System) -> str:
    with ConnectionFactory(broker.url).connect() as context:
        return str(context.send(Queue("orders"), Message("content")).message_id)


def command(broker: System, packages: dict[str, str], *arguments: str) -> Any:
    given = {
        **packages, "BASCULE_CONFIG": str(broker.data_dir / "bascule.toml"), "BASCULE_BRIDGE__ID": broker.prefix,
        "BASCULE_JOURNAL__PREFIX": broker.prefix, "BASCULE_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap,
        "BASCULE_EMBEDDED__DATA_DIR": str(broker.data_dir), "LANG": os.environ.get("LANG", "C.UTF-8"),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "bascule", *arguments], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_life_of_a_message_is_answered_by_the_server_and_by_the_command(broker: System, packages: dict[str, str]) -> None:
    message = sent(broker)
    assert broker.ask("messages/life", id=message)["messages"]
    assert command(broker, packages, "why", message, "--format", "json")["messages"]


def test_positions_of_a_divert_are_answered(broker: System) -> None:
    assert broker.ask("diverts/orders/offsets")["name"] == "orders"
