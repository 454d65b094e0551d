"""What the debug lines of a consumer say about the topic that it reads."""

from __future__ import annotations

import pytest

from bascule.core.log import get_log
from bascule.kafka.topic_view import TopicViewLog

LINE = "[thrd:localhost:9092/1]: localhost:9092/1: Received {} (v{}, 100 bytes, CorrId 7, rtt 0.50ms)"


def hear(log: TopicViewLog, answer: str, version: int) -> int | None:
    log.log(10, "%s %s", "RECV", LINE.format(answer, version))
    return log.view


def test_view_is_known_after_an_answer_of_each_kind_and_changes_with_each_answer_about_metadata() -> None:
    log = TopicViewLog(get_log("test"))
    assert hear(log, "MetadataResponse", 12) is None
    first = hear(log, "FetchResponse", 16)
    assert first is not None
    assert hear(log, "FetchResponse", 16) == first
    assert hear(log, "ListOffsetsResponse", 7) == first
    assert hear(log, "MetadataResponse", 12) not in (None, first)


def test_fetches_without_the_id_of_the_topic_say_nothing() -> None:
    log = TopicViewLog(get_log("test"))
    hear(log, "MetadataResponse", 12)
    assert hear(log, "FetchResponse", 12) is None
    assert hear(log, "FetchResponse", 13) is not None
    assert hear(log, "FetchResponse", 12) is None


def test_two_clients_have_different_views() -> None:
    views = set()
    for _ in range(2):
        log = TopicViewLog(get_log("test"))
        hear(log, "MetadataResponse", 12)
        views.add(hear(log, "FetchResponse", 16))
    assert len(views) == 2


def test_client_whose_lines_are_others_says_nothing() -> None:
    log = TopicViewLog(get_log("test"))
    for text in ("Received Metadata v12", "MetadataResponse", "FetchResponse received"):
        log.log(10, "%s %s", "RECV", text)
    assert log.view is None


@pytest.mark.parametrize("debugging", [False, True])
def test_debug_lines_are_logged_only_for_a_user_who_wants_them(debugging: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    hear(TopicViewLog(get_log("test"), debugging=debugging), "FetchResponse", 16)
    assert bool(caplog.records) == debugging
