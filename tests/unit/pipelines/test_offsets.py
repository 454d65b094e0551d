"""Moves of positions on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

import pytest

from bascule.pipelines.spec import IngressSpec
from bascule.writer.control import OffsetMove, OffsetsWish
from tests.scenarios.operating import STOPPED, Operator
from tests.scenarios.sparkless import Bridge
from tests.scenarios.test_offsets import (  # noqa: F401
    bridge,
    handled,
    operator,
    produce,
    test_divert_moved_back_repeats_its_records_and_moved_forward_skips_them,
    test_divert_whose_records_were_deleted_continues_after_its_position_was_moved,
    test_driver_killed_while_positions_move_moves_them_once,
    test_ingress_moved_back_sends_its_records_again_once,
    test_records_that_a_divert_carried_alone_still_count_after_its_position_was_moved,
    test_refusal_is_told_as_it_was_stored_also_by_the_next_driver,
    test_request_about_a_divert_that_was_resumed_meanwhile_does_nothing_unless_it_still_fits,
    test_request_about_a_divert_without_a_position_is_refused,
    test_request_is_refused_if_the_position_has_moved_the_records_are_gone_or_the_topic_is_another,
    test_request_stored_while_no_driver_runs_is_handled_before_the_divert_starts,
    test_request_that_comes_again_after_a_later_one_is_refused_though_its_offsets_fit,
    test_request_whose_transaction_is_in_doubt_is_handled_once,
    topics,
)
from tests.support.mock_cluster import MockCluster


def test_moved_ingress_of_a_recreated_topic_reports_its_old_error_no_more(request: pytest.FixtureRequest, kafka: MockCluster) -> None:
    found: Bridge = request.getfixturevalue("bridge")
    administrator: Operator = request.getfixturevalue("operator")
    topic = f"{found.pipelines.topics.prefix}.source"
    kafka.create(topic, 1)
    ingress = IngressSpec("in", "queue", (topic,))
    produce(found, topic, "a")
    with found.running(ingresses=(ingress,)) as running:
        running.query("ingress:in").batch(1)
        administrator.want("ingress:in", STOPPED)
        administrator.follow(running)
        kafka.ids[topic] = "recreated"
        query = running.driver.queries["ingress:in"]
        query.restart()
        assert "was recreated" in (query.stopped or "")
        administrator.topics.want("ingress:in", OffsetsWish("r1", (OffsetMove(topic, "recreated", 0, 1, 0),)))
        assert handled(administrator, running, "r1", "ingress:in") == ""
        assert (query.stopped, query.running) == (None, None)
