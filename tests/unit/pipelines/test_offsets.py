"""Moves of positions on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_offsets import (  # noqa: F401
    bridge,
    operator,
    test_divert_moved_back_repeats_its_records_and_moved_forward_skips_them,
    test_divert_whose_records_were_deleted_continues_after_its_position_was_moved,
    test_divert_whose_records_were_deleted_starts_like_a_new_one_after_a_start_without_it,
    test_diverts_of_a_group_whose_records_were_deleted_are_stopped_moved_and_resumed_one_by_one,
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
