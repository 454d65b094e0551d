"""Brokers of two versions on one journal, as in a rolling upgrade: each takes over from the other, and no message is lost or repeated."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from bascule.client import Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT
from tests.support.client import SOON_S
from tests.support.system import PYTHON_FAILOVER, SHORT_SESSION, System, wait_for

#: The version before the control of pipelines. A release replaces it by the release before.
BEFORE: Final = "f7fc405c462776106daa62528b78a2d478c6ef9c"


@pytest.fixture(scope="module")
def sources_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with the package of the version before."""
    directory = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "-C", ROOT, "archive", BEFORE, "src"], capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the repository has no commit {BEFORE[:8]}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory / "src"


@pytest.fixture
def brokers(kafka: EmbeddedKafka, sources_before: Path, topic_prefix: str, tmp_path: Path) -> Iterator[tuple[System, System]]:
    """Yield a broker of the version before, which serves, and a standby of this version."""
    with ExitStack() as stack:
        of_before = {"PYTHONPATH": str(sources_before)}
        old = System(kafka.bootstrap, tmp_path / "old", prefix=topic_prefix, config=SHORT_SESSION, env=of_before)
        new = System(kafka.bootstrap, tmp_path / "new", prefix=topic_prefix, config=SHORT_SESSION)
        stack.enter_context(old)
        stack.callback(new.broker.stop)
        new.broker.launch()
        wait_for(new.stands_by, "the broker of this version to stand by")
        yield old, new


def runs(system: System, sources: Path) -> bool:
    """Return whether the process of a broker has been started with the package in ``sources``."""
    return f"PYTHONPATH={sources}".encode() in Path(f"/proc/{system.broker.pid}/environ").read_bytes().split(b"\0")


def test_each_version_takes_over_from_the_other_with_all_messages(brokers: tuple[System, System], sources_before: Path, queue: str) -> None:
    old, new = brokers
    assert runs(old, sources_before)
    assert not runs(new, sources_before)
    with connect(PYTHON_FAILOVER.format(f"{old.url},{new.url}"), timeout_s=SOON_S) as context:
        numbers = iter(range(1_000))

        def send(count: int) -> None:
            for _ in range(count):
                context.send(Queue(queue), json.dumps(next(numbers)))

        send(20)
        old.broker.stop()  # the upgrade of the active broker
        wait_for(new.serves, "the broker of this version to serve")
        send(20)
        old.broker.launch()  # the way back: the version before follows a journal that this version has written
        wait_for(old.stands_by, "the broker of the version before to stand by")
        new.broker.stop()
        wait_for(old.serves, "the broker of the version before to serve again")
        send(20)
        new.broker.launch()
        wait_for(new.stands_by, "the broker of this version to stand by")
        old.broker.kill()
        wait_for(new.serves, "the broker of this version to serve after a kill")
        send(20)
        with context.consumer(Queue(queue)) as consumer:
            messages = [consumer.receive(SOON_S) for _ in range(80)]
            assert [message is not None and json.loads(message.body) for message in messages] == list(range(80))
            assert consumer.receive(0.2) is None
