"""The longest turn of the engine in states that the limits just allow: processor time of each turn, without sockets and Kafka.

    python -m bench.extremes [--scale 1.0] [--only NAME]

Each state is built first, and then changed by one command and the turns behind it. The table has the longest turn of each state, in ms of
processor time, and the turns above 50 ms. The exit code tells whether each turn was short enough. A scale of 0.1 builds states a tenth as
large.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from bascule.broker.collecting import Collector
from bascule.broker.duplicates import WINDOWS_MAX
from bascule.broker.errors import ResourceLimit
from bascule.broker.memory import measuring
from bascule.broker.policy import BLOCK, DROP, AddressPolicy, Policy
from bascule.broker.policy_change import change_policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.ready import SELECTORS_MAX
from bascule.broker.turns import TURN_STEPS, Work
from bascule.core.build import build
from bascule.core.destination import Routing
from bascule.jms.selector import compile_selector
from bascule.journal.records import MESSAGES_PER_RECORD_MAX
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes
from bench.run import markdown

#: Longest processor time of one turn.
TURN_MS_MAX: Final = 50.0
#: The defaults of ``broker.max_queues``, and of ``broker.max_links_per_user`` for two users.
QUEUES: Final = 65_000
CONSUMERS: Final = 200_000
#: The memory of the broker in these states: the limits of this benchmark are those on numbers.
MEMORY_BYTES: Final = 16 << 30


class Extreme:
    """A broker in memory whose turns are measured."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.now_ms = 1_000_000
        self.broker = BrokerInMemory(clock=lambda: self.now_ms, policy=Policy(AddressPolicy(auto_delete=False)), memory_bytes=MEMORY_BYTES)
        self.engine = self.broker.engine
        self.sender = Sender()
        self.longest: list[tuple[float, str]] = []

    def many(self, count: int) -> int:
        """Return a number of the state, scaled."""
        return max(1, int(count * self.scale))

    def send(self, address: str, number: int = 0, *, topic: bool = False, transaction: Any = None, **options: Any) -> None:
        """Send a message."""
        routing = Routing.MULTICAST if topic else Routing.ANYCAST
        self.broker.send(address, message_bytes(number, **options), self.sender, number, routing=routing, transaction=transaction)

    def queue(self, name: str = "q") -> BrokerQueue:
        """Return a queue."""
        return self.engine.queue(name)

    def consumers(self, queue: BrokerQueue, count: int, credit: int, selector: Callable[[int], str] | None = None) -> list[Receiver]:
        """Attach consumers."""
        found = []
        for number in range(count):
            receiver = Receiver(credit)
            options = {} if selector is None else {"selector": compile_selector(selector(number))}
            receiver.consumer = self.engine.attach(queue, receiver, **options)
            self.engine.wake(queue, receiver.consumer)
            found.append(receiver)
        return found

    def settle(self) -> None:
        """Run turns until nothing is left to do, unmeasured."""
        self.broker.settle()

    def bound(self) -> None:
        """Give the following turns the steps of a broker, and leave the state to no garbage collection."""
        self.settle()
        self.engine.turns.steps = TURN_STEPS
        self.engine.turns.begin_turn()
        gc.collect()
        gc.disable()  # a broker bounds the objects of a collection: see server/garbage.py

    def collect(self) -> Collector:
        """Begin to collect a snapshot in turns; a broker makes the snapshot from it in another thread."""
        collector = Collector(self.engine, self.broker.offsets)

        def work() -> Work:
            yield from collector.walk()
            self.engine.journaling.between_records(lambda: self.turn("last piece of a snapshot", collector.finish))

        self.turn("begin of a snapshot", lambda: self.engine.turns.begin(work()))
        return collector

    def turn(self, what: str, act: Callable[[], object]) -> None:
        """Measure one piece."""
        begun_s = time.process_time()
        act()
        self.longest.append(((time.process_time() - begun_s) * 1000, what))

    def run(self, what: str, act: Callable[[], object], turns: int = 400) -> None:
        """Measure a command and the turns behind it."""
        self.turn(what, act)
        for _ in range(turns):
            if not (self.broker.in_flight or self.engine.pending or self.engine.journaling.batch.size_bytes):
                return
            self.turn(f"turn after: {what}", self.broker.flush)
            if self.broker.in_flight:
                self.turn(f"confirmation after: {what}", lambda: self.broker.confirm(1))


def windows(state: Extreme) -> None:
    """Change all duplicate windows between the copy of the windows and the last piece of a snapshot."""
    count = state.many(WINDOWS_MAX)
    for number in range(count):
        window = state.engine.windows.window(f"w{number}")
        window.add_all([b"%016d" % each for each in range(30)], state.now_ms)
    state.bound()
    collector = Collector(state.engine, state.broker.offsets)
    for _ in collector.walk():
        pass
    for number in range(count):
        state.engine.windows.window(f"w{number}").add(b"new%013d" % number, state.now_ms)
    state.turn("last piece of a snapshot", collector.finish)


def windows_in_turns(state: Extreme) -> None:
    """Take a snapshot while 300 windows change in each turn."""
    count = state.many(WINDOWS_MAX)
    for number in range(count):
        window = state.engine.windows.window(f"w{number}")
        window.add_all([b"%016d" % each for each in range(1_000)], state.now_ms)
    state.bound()
    collector = state.collect()
    number = 0
    while not collector.stopped:
        for _ in range(300):
            number += 7
            state.engine.windows.window(f"w{number % count}").add(b"new%013d" % number, state.now_ms)
        state.turn("turn of a snapshot", state.broker.flush)
        state.broker.confirm(len(state.broker.in_flight))


def queues_changed(state: Extreme) -> None:
    """Take a snapshot of very many queues while messages arrive in others."""
    count = state.many(QUEUES)
    for number in range(count):
        state.queue(f"q{number}")
    state.bound()
    collector = state.collect()
    number = 0
    while not collector.stopped:
        for _ in range(300):
            number += 7
            state.send(f"q{number % count}", number)
        state.turn("turn of a snapshot", state.broker.flush)
        state.broker.confirm(len(state.broker.in_flight))


def many_selectors(state: Extreme) -> None:
    """Deliver, return and measure messages of a queue with a view for each of very many selectors."""
    queue = state.queue()
    taker = state.broker.attach(queue, 0)
    for number in range(state.many(SELECTORS_MAX)):
        receiver = Receiver(5)
        receiver.consumer = state.engine.attach(queue, receiver, compile_selector(f"n = {number + 10}"))
        state.engine.wake(queue, receiver.consumer)
    state.settle()
    for number in range(4):
        state.send("q", number, properties={"n": number})
    state.bound()
    state.run("search of the selectors", lambda: None, 4_000)
    state.run("delivery", lambda: state.broker.give(taker, 2))
    state.run("search after it", lambda: None, 4_000)
    state.run("return", lambda: state.engine.give_back(taker.consumer, taker.messages[0], failed=False), 4_000)
    state.turn("memory", lambda: [*measuring(state.engine, {})])
    state.run("arrival", lambda: state.send("q", 1, properties={"n": 5}), 4_000)


def many_starved(state: Extreme) -> None:
    """Send messages to a queue with very many starved consumers, of which one has a selector."""
    queue = state.queue()
    state.consumers(queue, 1, 5, lambda _: "n = 1")
    state.consumers(queue, state.many(CONSUMERS) - 1, 5)
    state.bound()
    state.run("consumers that ask", lambda: None, 4_000)
    for number in range(3):
        state.run("message", partial(state.send, "q", number), 4_000)


def many_consumers_deleted(state: Extreme) -> None:
    """Delete a queue with very many consumers, each with an unsettled message."""
    queue = state.queue()
    count = state.many(CONSUMERS)
    for number in range(count):
        state.send("q", number)
    state.settle()
    state.consumers(queue, count, 1)
    state.bound()
    state.run("deletion", lambda: state.engine.delete_queue(queue), 4_000)


def settings_changed(state: Extreme) -> None:
    """Change the settings of a queue with very many consumers."""
    queue = state.queue()
    state.consumers(queue, state.many(CONSUMERS), 1)
    state.bound()
    state.run("changed settings", partial(change_policy, state.engine, Policy(AddressPolicy(auto_delete=False, prefetch_max=7))), 4_000)


def groups_left(state: Extreme) -> None:
    """Let the holder of all groups leave, with 100,000 messages set aside for it."""
    queue = state.queue()
    holder = state.broker.attach(queue, 1)
    for number in range(state.many(100_000)):
        state.send("q", number, group="g")
    state.settle()
    other = state.broker.attach(queue, 1)
    state.bound()
    state.run("messages set aside", lambda: state.broker.give(other, 1), 4_000)
    state.run("leaving", lambda: state.engine.detach(holder.consumer), 4_000)


def many_subscriptions(state: Extreme) -> None:
    """Send a message to a topic with as many subscriptions as there may be queues."""
    for number in range(state.many(QUEUES)):
        state.engine.create_queue(f"s{number}", "t", Routing.MULTICAST, subscription=f"s{number}")
    state.bound()
    state.run("first message", lambda: state.send("t", 1, topic=True), 4_000)
    state.run("message", lambda: state.send("t", 2, topic=True), 4_000)
    consumers = [state.broker.attach(queue, 2) for queue in [*state.engine.addresses.queues.values()][:2]]
    state.run("message with consumers", lambda: state.send("t", 3, topic=True), 4_000)
    del consumers


class WaitingProducer:
    """A producer that asks for credit as a link does, and waits if there is no room."""

    def __init__(self, state: Extreme) -> None:
        self._engine = state.engine
        self.asked = 0

    def ask(self) -> None:
        """Ask for credit, or wait."""
        self.asked += 1
        if not self._engine.share_of_room("t", Routing.MULTICAST, 1_000):
            self._engine.when_room("t", Routing.MULTICAST, self, self.ask)


def waiting_producers(state: Extreme) -> None:
    """Give room to one of 2,000 full subscriptions, and then to all, while 500 producers wait for room in all of them."""
    policy = Policy(AddressPolicy(auto_delete=False, when_full=BLOCK, max_messages=1))
    state.engine.destinations.policy = policy
    queues = [
        state.engine.create_queue(f"s{number}", "t", Routing.MULTICAST, subscription=f"s{number}") for number in range(state.many(2_000))
    ]
    consumers = [state.broker.attach(queue, 1) for queue in queues]
    state.send("t", 1, topic=True)
    state.settle()
    producers = [WaitingProducer(state) for _ in range(state.many(500))]
    for _ in producers:
        state.engine.attach_producer("t", Routing.MULTICAST)
    state.bound()
    for producer in producers:
        state.turn("producer that begins to wait", producer.ask)
    consumers.insert(0, consumers.pop())
    for consumer in consumers[:10]:
        state.run("acknowledgement", partial(state.engine.acknowledge, consumer.consumer, consumer.messages[0]), 4_000)
    for consumer in consumers[10:]:
        state.turn("last acknowledgements", partial(state.engine.acknowledge, consumer.consumer, consumer.messages[0]))
    state.run("turns behind them", lambda: None, 4_000)
    print(f"{sum(producer.asked for producer in producers)} requests for credit by {len(producers)} producers")


def full_subscriptions(state: Extreme) -> None:
    """Send a message to a topic whose 2,000 full subscriptions have to drop 200 messages each to make room for it."""
    state.engine.destinations.policy = Policy(AddressPolicy(auto_delete=False, when_full=DROP, max_bytes=1 << 20))
    count = state.many(2_000)
    for number in range(count):
        state.engine.create_queue(f"s{number}", "t", Routing.MULTICAST, subscription=f"s{number}")
    for number in range(200):
        state.send("t", number, topic=True, durable=False)
    state.settle()
    for queue in state.engine.addresses.queues.values():
        queue.settings = replace(queue.settings, max_bytes=1)
    state.bound()
    state.run("message", lambda: state.send("t", 1, topic=True, durable=False), 4_000)
    for queue in state.engine.addresses.queues.values():
        queue.settings = replace(queue.settings, max_bytes=1, max_messages=1)
    state.run("message", lambda: state.send("t", 2, topic=True, durable=False), 4_000)


def selective_subscriptions(state: Extreme) -> None:
    """Send a message to a topic whose subscriptions have as many selectors as there may be."""
    refused: list[ResourceLimit] = []
    for address in ("t", "#"):
        for number in range(state.many(QUEUES)):
            try:
                state.engine.create_queue(
                    f"{address}{number}", address, Routing.MULTICAST, subscription=f"{address}{number}",
                    selector=f"n = {number + 10}",
                )  # fmt: skip
            except ResourceLimit as error:
                refused.append(error)
                break
    print(f"{len(state.engine.addresses.queues)} subscriptions; {refused}")
    state.bound()
    for _ in range(3):
        state.run("message", lambda: state.send("t", 1, topic=True, properties={"n": 1}), 4_000)


def large_commit(state: Extreme) -> None:
    """Commit as many messages as one record may hold, with duplicate ids."""
    transaction = state.engine.begin(b"t")
    for number in range(min(MESSAGES_PER_RECORD_MAX - 1, state.many(MESSAGES_PER_RECORD_MAX))):
        state.send("q", number, transaction=transaction, properties={"_AMQ_DUPL_ID": f"id{number}"})
    state.bound()
    planned: list[bool] = []
    while not planned or not planned[-1]:
        state.turn("plan of a commit", state.engine.go_on)
        state.turn("request of a commit", lambda: planned.append(state.engine.plan_commit(transaction)))
    state.run("commit", lambda: state.engine.commit(transaction, lambda *_: None), 4_000)


def deep_purge(state: Extreme) -> None:
    """Delete a queue with 1,000,000 messages, and measure the memory before."""
    queue = state.queue()
    state.broker.log.records.clear()
    for number in range(state.many(1_000_000)):
        state.send("q", number)
        if not number % 10_000:
            state.settle()
    state.bound()
    state.turn("memory", lambda: max(_timed(measuring(state.engine, {}))))
    state.run("deletion", lambda: state.engine.delete_queue(queue), 4_000)


def _timed(work: Iterator[int]) -> list[float]:
    found = [0.0]
    while True:
        begun_s = time.process_time()
        if next(work, None) is None:
            return found
        found.append(time.process_time() - begun_s)


STATES: Final = (
    windows, windows_in_turns, queues_changed, many_selectors, many_starved, many_consumers_deleted, settings_changed, groups_left,
    many_subscriptions, waiting_producers, full_subscriptions, selective_subscriptions, large_commit, deep_purge,
)  # fmt: skip


def main() -> int:
    """Measure the states. The exit code tells whether each turn was short enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"{build()} build", flush=True)
    long = 0
    rows = [["state", "longest turns, ms"]]
    for build_state in STATES:
        if options.only and options.only not in build_state.__name__:
            continue
        gc.enable()
        gc.collect()
        state = Extreme(options.scale)
        begun_s = time.monotonic()
        build_state(state)
        worst: dict[str, float] = {}
        for ms, what in state.longest:
            worst[what] = max(worst.get(what, 0.0), ms)
            long += ms > TURN_MS_MAX
        shown = "; ".join(f"{what}: {ms:.1f}" for what, ms in sorted(worst.items(), key=lambda pair: -pair[1])[:4])
        rows.append([build_state.__name__, shown])
        print(f"{build_state.__name__} ({time.monotonic() - begun_s:.0f} s): {shown}", flush=True)
        del state
    print(markdown(rows))
    return int(long > 0)


if __name__ == "__main__":
    sys.exit(main())
