"""Damaged records of the control of pipelines on the mock cluster. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from tests.scenarios.test_damaged_control import (  # noqa: F401
    bridge,
    operator,
    test_damaged_record_of_control_holds_its_divert_until_a_later_record_and_the_others_continue,
    topics,
)
