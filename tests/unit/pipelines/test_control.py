"""Control of pipelines on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_control import (  # noqa: F401
    bridge,
    operator,
    test_all_diverts_of_a_group_are_paused_and_resumed_in_another_order,
    test_broker_shows_why_a_paused_divert_keeps_the_journal,
    test_divert_of_a_failed_group_is_paused_and_the_rest_of_the_group_starts_again,
    test_divert_paused_before_it_ever_ran_begins_where_it_was_configured,
    test_divert_paused_by_a_driver_that_is_being_replaced_is_known_to_its_successor,
    test_divert_resumed_before_the_pause_is_known_to_be_stored_is_carried_once,
    test_driver_killed_while_a_divert_is_paused_and_resumed_loses_and_repeats_nothing,
    test_driver_replaces_reports_that_it_cannot_read,
    test_ingress_that_is_stopped_has_no_task_and_another_owner_until_resumed,
    test_journal_is_kept_for_a_divert_that_is_paused_while_the_broker_reads_the_positions,
    test_paused_divert_of_a_group_keeps_its_messages_and_the_others_continue,
    test_pipeline_paused_before_the_driver_starts_carries_nothing_until_resumed,
    test_pipeline_whose_task_is_slow_to_end_is_paused_as_soon_as_it_has_ended,
    test_report_that_a_replaced_driver_overwrites_is_written_again,
    test_reports_of_removed_pipelines_are_deleted_and_disabled_ones_say_so,
    test_restart_starts_the_task_again_also_after_an_error_that_is_not_retried,
    test_runs_of_pipelines_reach_a_receiver_of_openlineage_events,
    test_task_that_survives_the_pause_of_its_divert_carries_nothing_more,
    test_wishes_are_read_behind_a_barrier_again_after_kafka_did_not_answer,
    topics,
)
