"""Redrive of dead letters on the mock cluster, without Spark. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_redrive import (  # noqa: F401
    bridge,
    letters,
    operator,
    test_dead_letters_are_chosen_by_place_pipeline_reason_time_and_header,
    test_dead_letters_that_cannot_be_redriven_stay_and_say_why,
    test_job_that_fails_does_not_hold_up_the_next_one,
    test_messages_that_a_divert_could_not_carry_are_redriven_once_it_can,
    test_records_of_an_ingress_that_was_defined_at_run_time_are_redriven,
    test_records_that_an_ingress_could_not_take_are_redriven_as_it_takes_others,
    test_run_ends_when_the_topic_is_recreated_and_takes_no_record_of_the_new_topic,
    test_run_killed_anywhere_leaves_each_dead_letter_waiting_or_redriven_once,
    test_run_leaves_the_dead_letters_of_a_divert_that_is_refused_meanwhile,
    test_run_that_is_stopped_while_its_filter_matches_nothing_ends_and_is_not_done,
    topics,
)
