"""Ingresses defined at run time, on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_definitions import (  # noqa: F401
    bridge,
    definer,
    test_definition_with_a_name_of_the_file_has_no_effect,
    test_definitions_made_while_no_driver_runs_are_followed_by_the_next_one,
    test_driver_killed_while_an_ingress_is_created_changed_and_deleted_carries_each_record_once,
    test_driver_starts_many_ingresses_one_after_the_other_and_looks_after_those_that_run,
    test_driver_that_was_replaced_does_not_begin_a_deleted_ingress_again,
    test_ingress_created_again_begins_as_a_new_one,
    test_ingress_is_created_changed_and_deleted_while_the_others_run,
    test_ingress_of_a_damaged_definition_stands_with_its_positions_until_the_next_definition,
    test_ingress_of_the_file_that_moves_to_run_time_begins_as_a_new_one,
    test_ingress_stays_paused_across_drivers_and_can_be_deleted_so,
    test_ingress_whose_definition_is_lost_keeps_its_positions_until_it_is_created_again_or_deleted,
    test_ingresses_deleted_while_a_driver_has_not_started_them_yet_leave_no_positions,
    test_step_that_fails_is_repeated,
    topics,
)
