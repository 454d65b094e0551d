"""Diverts defined at run time, on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_defined_diverts import (  # noqa: F401
    bridge,
    definer,
    test_definition_with_code_is_not_followed_whoever_has_written_it,
    test_divert_begins_at_its_start,
    test_divert_begins_at_the_lowest_offset_that_a_broker_has_covered,
    test_divert_continues_across_drivers_and_is_deleted_while_none_runs,
    test_divert_is_created_changed_and_deleted_while_the_others_run,
    test_divert_is_paused_across_drivers_moved_and_resumed,
    test_divert_is_verified,
    test_divert_that_has_begun_continues_without_a_mark,
    test_divert_that_leaves_the_file_continues_by_its_definition,
    test_driver_killed_while_a_divert_is_created_changed_and_deleted_carries_each_message_once,
    test_driver_that_was_replaced_before_it_followed_deletes_no_later_divert,
    test_driver_that_was_replaced_does_not_begin_a_deleted_divert_again,
    test_journal_is_kept_from_where_a_divert_will_begin,
    topics,
)
