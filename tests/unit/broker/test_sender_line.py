"""The line of senders that wait until a message may enter very many queues."""

from __future__ import annotations

import random
from collections import deque

import pytest

from bascule.broker.fan_out import LANE_MAX
from bascule.broker.policy import DROP, AddressPolicy
from bascule.broker.sender_line import ROUND_MS, SenderLine
from bascule.broker.turns import TURN_STEPS, Retry
from tests.unit.broker.test_fan_out import Topic

#: Rounds after which a line has dropped all senders that have gone, however many they are.
ROUNDS_MAX = 4


class Line:
    """A line whose senders ask by name. At most one sender goes on between two calls of ``free``."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.line = SenderLine(lambda: self.now_ms)
        self.numbers: dict[str, int] = {}
        self.places = 0

    def ask(self, name: str) -> bool:
        number = self.numbers.get(name, 0)
        if self.places and self.line.first(number):
            self.places -= 1
            self.line.leave(number)
            self.numbers.pop(name, None)
            return True
        self.numbers[name] = self.line.wait(number)
        return False

    def round(self, names: str) -> str:
        return "".join(name for name in names if self.ask(name))


def test_senders_go_on_in_the_order_in_which_they_came_whoever_asks_first() -> None:
    line = Line()
    assert line.round("abc") == ""
    gone = ""
    for waiting in ("cba", "cb", "c"):
        line.places = 1
        gone += line.round(waiting) or line.round(waiting)
    assert gone == "abc"
    assert len(line.line) == 0


def test_sender_that_comes_while_others_wait_goes_behind_them() -> None:
    line = Line()
    line.round("ab")
    line.places = 3
    assert line.round("cab") == "ab"
    assert line.round("c") == "c"


def test_lost_senders_do_not_block_the_line() -> None:
    line = Line()
    line.round("abcdefgh")
    line.places = 8
    rounds = 0
    gone = ""
    while "h" not in gone:
        gone += line.round("gh")
        rounds += 1
    assert gone == "gh"
    assert rounds <= ROUNDS_MAX


def test_line_of_senders_that_have_all_gone_is_dropped_in_time() -> None:
    line = Line()
    for number in range(3 * ROUNDS_MAX):
        line.places = 1
        line.ask(f"{number}")
        line.places = 0
        line.ask(f"lost {number}")
        line.now_ms += ROUND_MS
    assert len(line.line) <= 2 * ROUNDS_MAX


def test_sender_that_was_taken_for_lost_waits_behind_the_others() -> None:
    line = Line()
    line.round("s")
    gone = ""
    for _ in range(ROUNDS_MAX):
        line.places = 0 if gone else 1
        gone += line.round("xy")
    assert gone == "x"
    line.places = 1
    assert line.round("s") == ""
    assert line.round("ys") == "y"
    line.places = 1
    assert line.round("s") == "s"


@pytest.mark.parametrize("seed", range(200))
def test_no_living_sender_is_overtaken_and_each_goes_on(seed: int) -> None:
    """Senders come, ask once a round, and may be lost in each round; the order of asking changes where it may change: between newcomers."""
    chance = random.Random(seed)
    line, waiting, queued, number = Line(), deque[str](), deque[str](), 0
    for _ in range(100):
        line.places = chance.choice((0, 0, 1, LANE_MAX))
        for _ in range(len(waiting)):
            name = waiting.popleft()
            if chance.random() < 0.1:
                queued.remove(name)  # lost: the sender never asks again
            elif line.ask(name):
                assert name == queued.popleft()
            else:
                waiting.append(name)
        for _ in range(chance.choice((0, 0, 1, 3))):
            number += 1
            name = f"{number}"
            if line.ask(name):
                assert not queued
            else:
                waiting.append(name)
                queued.append(name)
    living = len(queued)
    for _ in range(living + ROUNDS_MAX):
        line.places = 1
        for _ in range(len(waiting)):
            name = waiting.popleft()
            if not line.ask(name):
                waiting.append(name)
    assert not waiting


class Client:
    """A client that sends messages one after another, and goes on with the one that waits, as a connection does."""

    def __init__(self, topic: Topic, name: str, count: int) -> None:
        self.topic = topic
        self.name = name
        self.left = count
        self.done = 0
        self.waiting: Retry | None = None

    def handle(self) -> None:
        if self.waiting is not None:
            self.waiting = self.waiting()
            if self.waiting is not None:
                return
            self.done += 1
        while self.done < self.left:
            self.waiting = self.topic.send(f"{self.name}{self.done}")
            if self.waiting is not None:
                return
            self.done += 1


def served(topic: Topic, clients: list[Client], turns: int) -> list[int]:
    for _ in range(turns):
        topic.turn()
        for client in clients:
            client.handle()
    return [client.done for client in clients]


@pytest.mark.parametrize(
    "policy",
    [AddressPolicy(auto_delete=False), AddressPolicy(auto_delete=False, max_messages=2, when_full=DROP)],
    ids=["not limited", "full queues drop messages"],
)
def test_each_sender_gets_its_share_while_messages_enter_many_queues(policy: AddressPolicy) -> None:
    topic = Topic(policy)
    topic.engine.turns.steps = TURN_STEPS
    done = served(topic, [Client(topic, name, 1_000) for name in "abcdef"], 60)
    assert min(done) >= 2
    assert max(done) - min(done) <= LANE_MAX


def test_lost_sender_does_not_keep_the_others_from_sending() -> None:
    topic = Topic()
    topic.engine.turns.steps = TURN_STEPS
    clients = [Client(topic, name, 1_000) for name in "abcdef"]
    served(topic, clients, 5)
    living = clients[3:]
    before = sum(client.done for client in living)
    assert sum(served(topic, living, 30)) >= before + len(living) * 2


def test_refused_sender_leaves_the_line() -> None:
    topic = Topic()
    for number in range(LANE_MAX):
        assert topic.send(f"{number}") is None
    retry = topic.send("refused", transaction=topic.engine.begin(b"1"))
    assert retry is not None
    assert len(topic.engine.deliveries.fan_out.line) == 1
    topic.engine.memory.blocked = "no memory is left"
    assert retry() is None
    assert topic.sender.answers[-1][1] is not None
    assert len(topic.engine.deliveries.fan_out.line) == 0
