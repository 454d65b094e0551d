"""Groups of diverts that cannot continue, on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_lost_groups import (  # noqa: F401
    bridge,
    operator,
    test_divert_that_is_new_while_its_group_cannot_continue_can_be_stopped_and_has_no_position,
    test_divert_whose_records_were_deleted_starts_like_a_new_one_after_a_start_without_it,
    test_diverts_of_a_group_whose_records_were_deleted_are_stopped_moved_and_resumed_one_by_one,
    test_messages_of_an_exclusive_divert_removed_after_its_records_were_deleted_are_dead_lettered,
    topics,
)
