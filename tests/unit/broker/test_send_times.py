"""The histogram of the times that senders wait for the acknowledgement of persistent messages."""

from __future__ import annotations

from bascule.broker.journaling import Journaling
from bascule.broker.send_times import BOUNDS_S, SendTimes
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.times = SendTimes(lambda: self.now_s)

    @property
    def counted(self) -> dict[float, int]:
        """Return the numbers of messages by the upper bound of their bucket."""
        return {bound: count for bound, count in zip((*BOUNDS_S, float("inf")), self.times.counts, strict=True) if count}


def test_each_message_counts_with_its_own_wait() -> None:
    clock = Clock()
    journaling = Journaling(lambda *_: None, send_times=clock.times)
    journaling.begin(0, 0)
    for pause_s in (0.0, 0.0001, 0.02):
        clock.now_s += pause_s
        journaling.add_send(b"entry", ())
        journaling.then_tell(lambda: None, (), lambda _: None, "token")
    journaling.flush()
    clock.now_s += 0.004
    assert clock.counted == {}
    journaling.confirm()
    assert clock.counted == {0.005: 1, 0.025: 2}  # the first two arrived together
    assert abs(clock.times.sum_s - (0.004 + 2 * 0.0241)) < 1e-9
    assert clock.times.count == 3


def test_time_ends_after_the_last_answer_of_the_record() -> None:
    clock = Clock()
    journaling = Journaling(lambda *_: None, send_times=clock.times)
    journaling.begin(0, 0)
    for _ in range(2):
        journaling.add_send(b"entry", ())
        journaling.then_tell(lambda: None, (), lambda _: None, "token")
    journaling.flush()
    journaling.turns.left = 1
    journaling.confirm()
    assert journaling.pending
    clock.now_s += 0.3
    journaling.turns.left = 100
    journaling.carry_out()
    assert clock.counted == {0.5: 2}


def test_messages_that_wait_for_no_record_or_for_a_commit_do_not_count() -> None:
    clock = Clock()
    broker = BrokerInMemory(journaling=lambda append, **options: Journaling(append, **options, send_times=clock.times))
    sender = Sender()
    transaction = broker.engine.begin(b"1")
    broker.send("orders", message_bytes("volatile", durable=False), sender, 1)
    broker.send("orders", message_bytes("transacted"), sender, 2, transaction=transaction)
    broker.settle()
    assert (sender.accepted_tokens, clock.counted) == ([1, 2], {})
    broker.send("orders", message_bytes("persistent"), sender, 3)
    clock.now_s += 0.05
    broker.settle()
    assert (sender.accepted_tokens, clock.times.count) == ([1, 2, 3], 1)
