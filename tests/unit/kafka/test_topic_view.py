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


def test_id_of_the_topic_is_known_once_the_client_has_learnt_it_and_fetches_by_it() -> None:
    log = TopicViewLog(get_log("test"))

    def learn(found: str) -> str:
        log.log(10, "%s %s", "METADATA", f"[thrd:main]: Topic a b changed id from {'A' * 22} to {found}")
        return log.topic_id("a b")

    assert learn("D4PxC30KRd2y06kNRaCD+Q") == "", "no fetch has used it"
    hear(log, "FetchResponse", 16)
    assert log.topic_id("a b") == "D4PxC30KRd2y06kNRaCD+Q"
    assert learn("E4PxC30KRd2y06kNRaCD+Q") == "E4PxC30KRd2y06kNRaCD+Q"
    assert learn("A" * 22) == ""
    hear(log, "FetchResponse", 12)
    assert learn("D4PxC30KRd2y06kNRaCD+Q") == ""


@pytest.mark.parametrize("debugging", [False, True])
def test_debug_lines_are_logged_only_for_a_user_who_wants_them(debugging: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    hear(TopicViewLog(get_log("test"), debugging=debugging), "FetchResponse", 16)
    assert bool(caplog.records) == debugging


def test_ids_of_several_topics_are_known_by_topic() -> None:
    log = TopicViewLog(get_log("test"))
    hear(log, "FetchResponse", 16)
    for topic, found in (("a", "D4PxC30KRd2y06kNRaCD+Q"), ("b", "rqzvyl2vR1mcpkoC-BSZ6A")):
        log.log(10, "%s %s", "METADATA", f"[thrd:main]: Topic {topic} changed id from {'A' * 22} to {found}")
    assert (log.topic_id("a"), log.topic_id("b"), log.topic_id("c")) == ("D4PxC30KRd2y06kNRaCD+Q", "rqzvyl2vR1mcpkoC-BSZ6A", "")


def test_epoch_of_the_first_leader_of_a_partition_stays_known() -> None:
    log = TopicViewLog(get_log("test"))
    assert log.first_leader_epoch(("a", 1)) is None
    for before, after in (("leader -1 epoch -1", "leader 1 epoch 4"), ("leader 1 epoch 4", "leader 2 epoch 5")):
        log.log(10, "%s %s", "BROKER", f"[thrd:main]: a [1]: {before} -> {after}")
    assert log.first_leader_epoch(("a", 1)) == 4
    assert log.first_leader_epoch(("a", 0)) is None
