"""Groups of diverts on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_groups import (  # noqa: F401
    ingress,
    test_disabled_diverts_of_a_group_continue_in_another_group,
    test_divert_moves_to_other_groups_and_back_without_loss_or_repeat,
    test_diverts_of_a_group_share_a_position_and_default_group_keeps_its_own,
    test_driver_killed_while_diverts_change_groups_loses_and_repeats_nothing,
    test_group_whose_unread_records_are_deleted_stops_and_the_others_continue,
    test_groups_without_a_default_divert_need_no_common_query,
    test_messages_of_exclusive_divert_removed_from_a_group_are_dead_lettered,
    test_messages_of_removed_exclusive_divert_are_dead_lettered_once_though_another_divert_begins_earlier,
    test_new_exclusive_divert_of_a_group_carries_messages_taken_before_the_pipelines_knew_it,
    test_random_changes_of_groups_lose_and_repeat_nothing,
    test_source_partitions_of_an_ingress_are_spread_over_its_tasks,
    test_stopped_group_delays_no_other_group_and_keeps_the_journal,
)
