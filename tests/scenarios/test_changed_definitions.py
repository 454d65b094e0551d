"""Two brokers change a definition at the same time, and a broker is killed within a change: all of a change counts, or nothing."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.kafka import EmbeddedKafka
from tests.support.system import SHORT_SESSION, System, wait_for

CHANGES = 8
CONFIG = {"topics": ["in"], "to": "queue://q"}
ANSWER_S = 60.0


def send(system: System, method: str, path: str, **arguments: Any) -> tuple[int, Any]:
    request = system._request(path, json.dumps(arguments).encode() if arguments else None)
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def two(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Callable[..., Any]:
    """Return a context with an active broker, which gets an environment, and a standby."""

    @contextmanager
    def run(**env: str) -> Iterator[tuple[System, System]]:
        standby = System(kafka.bootstrap, tmp_path / "standby", prefix=topic_prefix, config=SHORT_SESSION)
        with System(kafka.bootstrap, tmp_path / "active", prefix=topic_prefix, config=SHORT_SESSION, env=env) as active:
            standby.broker.launch()
            try:
                wait_for(standby.stands_by, "the standby")
                yield active, standby
            finally:
                standby.broker.stop()

    return run


def test_two_brokers_that_change_a_definition_at_the_same_time_keep_each_other_s_changes(two: Callable[..., Any]) -> None:
    with two() as brokers:
        assert send(brokers[0], "POST", "ingresses", name="made", config=CONFIG)[0] == 202

        def change(system: System, setting: str, value: str) -> None:
            for number in range(CHANGES):
                code, answer = send(system, "PATCH", "ingresses/made/config", **{setting: f"{value}{number}"})
                assert code == 202, answer

        with ThreadPoolExecutor() as pool:
            changes = [
                pool.submit(change, *each) for each in zip(brokers, ("reply_to", "key_as"), ("queue://a", "property:b"), strict=True)
            ]
            for each in changes:
                each.result()
        _, found = send(brokers[1], "GET", "ingresses/made")
        assert found["revision"] == 1 + 2 * CHANGES
        assert found["config"] == {**CONFIG, "reply_to": f"queue://a{CHANGES - 1}", "key_as": f"property:b{CHANGES - 1}"}


def test_change_of_a_broker_that_is_killed_before_its_commit_does_not_happen_and_delays_nobody(two: Callable[..., Any]) -> None:
    with two(**{ARMED_VARIABLE: "slot.commit.before"}) as (killed, other):
        with pytest.raises((OSError, http.client.HTTPException)):
            send(killed, "POST", "ingresses", name="made", config=CONFIG)
        wait_for(lambda: not killed.broker.running, "the end of the broker")
        assert send(other, "GET", "ingresses") == (200, [])
        assert send(other, "POST", "ingresses", name="made", config=CONFIG)[0] == 202
        wait_for(other.serves, "the standby to serve")
