"""Messages that an exclusive divert took, on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_exclusive_marks import (  # noqa: F401
    test_exclusive_divert_first_started_as_disabled_carries_taken_messages_once_enabled,
    test_exclusive_divert_removed_and_added_again_resumes_at_the_common_position,
    test_exclusive_divert_removed_while_lagging_and_added_again_resumes_at_its_own_position,
    test_message_taken_after_removal_of_its_exclusive_divert_is_dead_lettered,
    test_messages_of_exclusive_divert_removed_before_its_first_run_are_dead_lettered,
    test_messages_of_exclusive_divert_removed_while_lagging_are_dead_lettered,
    test_messages_of_exclusive_divert_removed_while_others_are_disabled_are_dead_lettered,
    test_messages_of_the_last_removed_divert_are_dead_lettered_and_reading_stops,
    test_new_exclusive_divert_carries_messages_taken_before_the_first_pipelines_start,
    test_new_exclusive_divert_carries_remaining_messages_of_an_epoch_with_trimmed_start,
)
