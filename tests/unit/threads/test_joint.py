"""Attempts whose result several threads share."""

from __future__ import annotations

from bascule.core.errors import Unavailable
from bascule.threads.joint import JointTry
from tests.support.outage import THREADS, Door, Service, told_together


def test_threads_waiting_for_a_failing_try_share_its_error_and_next_call_tries_again() -> None:
    door, service = Door(), Service(Unavailable("no answer"))
    joint = JointTry(door)
    errors = told_together(door, service, lambda: joint(service))
    assert [str(each) for each in errors] == ["no answer"] * THREADS
    assert len({id(each) for each in errors}) == THREADS
    assert service.tries == 1
    service.error = None
    assert joint(service) == "there"


def test_threads_waiting_for_a_successful_try_make_their_own_tries() -> None:
    door, service = Door(), Service()
    joint = JointTry(door)
    assert told_together(door, service, lambda: joint(service)) == [None] * THREADS
    assert service.tries == THREADS


def test_error_other_than_an_outage_is_not_shared() -> None:
    door, service = Door(), Service(KeyError("mine"))
    joint = JointTry(door)
    assert {type(each) for each in told_together(door, service, lambda: joint(service))} == {KeyError}
    assert service.tries == THREADS
