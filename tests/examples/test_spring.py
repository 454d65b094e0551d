"""Spring's JmsTemplate and listener containers, as in examples/spring, with a broker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT
from tests.support.java import JARS, SMALL_JVM, compiled_sources
from tests.support.speed import SLOWNESS
from tests.support.system import System, failover

SOURCE = ROOT / "examples" / "spring" / "Shop.java"
SPRING = "spring"
RUN_TIMEOUT_S = 120.0 * SLOWNESS


@pytest.mark.services
@pytest.mark.timeout(300)
def test_spring_jms_templates_and_listeners_work_with_the_broker(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    classes = compiled_sources("spring-shop", [SOURCE], JARS, SPRING)
    path = os.pathsep.join(map(str, [classes, *classpath(JARS), *classpath(SPRING)]))
    with System(kafka.bootstrap, tmp_path / "broker", prefix=topic_prefix) as system:
        done = subprocess.run(
            [find_jdk().executable, *SMALL_JVM, "-cp", path, "Shop", failover(system.url)],
            capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
        left = {name: system.depth(name) for name in ("orders", "confirmations", "prices", "DLQ")}
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    # 4712 failed once in its listener: the transaction was rolled back, and no reply was sent until it succeeded.
    assert sorted(said[:3]) == ["4711 confirmed, delivery 1", "4712 confirmed, delivery 2", "4713 confirmed, delivery 1"]
    assert said[3:5] == ["chair costs 12.50", "warehouse: 3 chairs left"]
    assert left == dict.fromkeys(left, 0)
