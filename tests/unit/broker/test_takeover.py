"""The takeover from a lost broker: what a standby does for each order of connections, messages and timers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from bascule.broker.errors import BrokerFault
from bascule.broker.takeover import (
    LATE_S,
    RECONNECT_MAX_S,
    RECONNECT_S,
    SEEK_S,
    STEADY_S,
    STORED_S,
    TEXT_MAX,
    MessageKind,
    PeerMessage,
    TakeoverProtocol,
    WatchEvent,
    WatchState,
    decode,
)
from bascule.core.effects import Severity

ANSWER_S = 0.5
#: More than enough for each broker of the model to find the elected one.
SETTLED_S = 40.0


@dataclass(order=True)
class Due:
    """An action of the model's clock."""

    at_s: float
    number: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class World:
    """A clock, a topic that delivers messages late, a group that elects, and connections between brokers."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.queue: list[Due] = []
        self.numbers = count()
        self.topic: list[PeerMessage] = []
        self.brokers: list[Broker] = []
        self.members: list[Broker] = []  # of the group; the first one is elected
        self.delay_s = 0.01
        self.elections = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> Due:
        due = Due(self.now_s + delay_s, next(self.numbers), action)
        self.queue.append(due)
        return due

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.queue and (due := min(self.queue)).at_s <= end_s:
            self.queue.remove(due)
            self.now_s = max(self.now_s, due.at_s)
            if not due.cancelled:
                due.action()
        self.now_s = end_s

    def store(self, message: PeerMessage) -> None:
        self.topic.append(message)
        for broker in self.brokers:
            broker.fetch()

    def broker(self, name: str) -> Broker:
        broker = Broker(self, name)
        self.brokers.append(broker)
        self.members.append(broker)
        broker.protocol.start()
        self.elect()
        return broker

    def elect(self) -> None:
        for broker in self.brokers:
            broker.turn(broker.alive and self.members[:1] == [broker])

    @property
    def elected(self) -> Broker:
        return self.members[0]


class Broker:
    """One broker of the model: bascule.broker.takeover.WatchEffects."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.lives = 0
        self.alive, self.suspended, self.hears = True, False, True
        self.is_elected = False
        self.read = len(world.topic)
        self.watched: tuple[Broker, int] | None = None
        self.connects = 0
        self.replaced: list[str] = []
        self.notes: list[str] = []
        self.reachable = True
        self.fetching = False
        self.late: list[Callable[[], None]] = []
        self.protocol = TakeoverProtocol(self, f"{name}#0", ANSWER_S)

    # -- effects

    def now_s(self) -> float:
        return self.world.now_s

    def after(self, delay_s: float, action: Callable[[], None]) -> Due:
        return self.world.after(delay_s, lambda: self._act(action))

    def _act(self, action: Callable[[], None]) -> None:
        """Run an action in this process. A suspended process runs it later."""
        protocol = self.protocol
        if self.suspended:
            self.late.append(action)
        elif self.alive and protocol is self.protocol:
            action()

    def send(self, message: PeerMessage) -> None:
        stored = decode(message.encode())
        assert stored == message
        self.world.after(self.world.random.random() * self.world.delay_s, lambda: self.world.store(message))

    def here(self) -> PeerMessage:
        return PeerMessage(MessageKind.HERE, f"{self.name}#{self.lives}", "", self.name, self.member, "host", 5)

    @property
    def member(self) -> str:
        return f"{self.name}-{self.lives}"

    def connect(self, attempt: int, elected: PeerMessage) -> None:
        self.disconnect()
        self.connects += 1
        target = next(each for each in self.world.brokers if each.name == elected.instance)

        def arrive() -> None:
            if not target.reachable or target.suspended:
                self.after(5.0, lambda: self.protocol.lost(attempt, refused=False))
            elif target.alive and target.is_elected and target.member == elected.member:
                self.watched = target, attempt
                self.protocol.connected(attempt)
            else:
                self.protocol.lost(attempt, refused=True)

        self.after(0.001, arrive)

    def disconnect(self) -> None:
        self.watched = None

    def dismiss(self) -> None:
        for standby, attempt in self._standbys():
            standby.protocol.dismissed(attempt)

    def _standbys(self) -> Iterator[tuple[Broker, int]]:
        for each in self.world.brokers:
            if each.watched is not None and each.watched[0] is self:
                attempt, each.watched = each.watched[1], None
                yield each, attempt

    def replace(self, elected: PeerMessage) -> None:
        self.replaced.append(elected.member)

        def removed() -> None:
            world = self.world
            for each in list(world.members):
                if each.member == elected.member:
                    world.members.remove(each)
                    if each.alive:  # Kafka fences it, and it joins again
                        each.lives += 1
                        world.members.append(each)
            world.elect()
            self.protocol.replaced()

        self.after(0.1, removed)

    def note(self, severity: Severity, event: str, detail: str) -> None:
        del severity, detail
        self.notes.append(event)

    # -- what happens to it

    def turn(self, elected: bool) -> None:
        if elected != self.is_elected:
            self.is_elected = elected
            if elected:
                self.world.elections += 1
                self.protocol.elected()
            else:
                self.protocol.not_elected()

    def fetch(self) -> None:
        if not self.fetching and self.hears:
            self.fetching = True
            self.world.after(self.world.random.random() * self.world.delay_s, self._fetched)

    def _fetched(self) -> None:
        self.fetching = False
        while self.hears and not self.suspended and self.read < len(self.world.topic):
            message = self.world.topic[self.read]
            self.read += 1
            if self.alive:
                self.protocol.received(message)

    def cut(self) -> None:
        """Cut the connection to the elected broker."""
        if self.watched is not None:
            attempt, self.watched = self.watched[1], None
            self.protocol.lost(attempt, refused=True)

    def kill(self) -> None:
        self.alive = self.is_elected = False
        for standby, attempt in list(self._standbys()):
            standby.protocol.lost(attempt, refused=True)

    def end_session(self) -> None:
        if self in self.world.members and not self.alive:
            self.world.members.remove(self)
            self.world.elect()

    def resume(self) -> None:
        self.suspended = False
        late, self.late = self.late, []
        for action in late:
            action()
        self.fetch()


def pair(seed: int = 0) -> tuple[World, Broker, Broker]:
    """Return a world in which the second broker watches the first."""
    world = World(seed)
    first, second = world.broker("one"), world.broker("two")
    world.run(3.0)
    assert second.protocol.state is WatchState.WATCHING
    return world, first, second


def test_standby_replaces_a_killed_broker_after_the_time_for_an_answer() -> None:
    world, first, second = pair()
    first.kill()
    world.run(ANSWER_S)
    assert not second.replaced
    world.run(0.2)
    assert second.replaced == ["one-0"]
    assert world.elected is second
    assert second.protocol.state is WatchState.ELECTED
    assert [message.kind for message in world.topic[-3:]] == [MessageKind.CHALLENGE, MessageKind.CLAIM, MessageKind.HERE]


def test_cut_connection_changes_nothing_and_is_opened_again() -> None:
    world, first, second = pair()
    second.cut()
    world.run(3.0)
    assert (world.elected, world.elections, second.replaced) == (first, 1, [])
    assert second.protocol.state is WatchState.WATCHING
    assert second.notes == ["challenge answered"]


def test_repeated_cuts_change_nothing_and_are_answered_by_growing_pauses() -> None:
    world, first, second = pair()
    connects = second.connects
    for _ in range(200):
        second.cut()
        world.run(0.1)
    assert (world.elected, world.elections, second.replaced) == (first, 1, [])
    assert second.connects - connects < 20 / RECONNECT_S / 10
    world.run(RECONNECT_MAX_S + 1)
    assert second.protocol.state is WatchState.WATCHING
    first.kill()
    world.run(1.0)
    assert world.elected is second


def test_pause_after_a_steady_connection_is_short_again() -> None:
    world, _, second = pair()
    for _ in range(5):
        second.cut()
        world.run(4.0)
    world.run(STEADY_S)
    second.cut()
    world.run(RECONNECT_S + 0.1)
    assert second.protocol.state is WatchState.WATCHING


def test_broker_killed_during_the_pause_after_a_cut_is_replaced() -> None:
    world, first, second = pair()
    second.cut()
    world.run(0.06)
    assert second.protocol.state is WatchState.PAUSING
    first.kill()
    world.run(1.5)
    assert world.elected is second


def test_suspended_broker_whose_connection_stays_keeps_its_place() -> None:
    world, first, second = pair()
    first.suspended = True
    world.run(SETTLED_S)
    assert world.elected is first
    assert second.protocol.state is WatchState.WATCHING
    assert not second.replaced


def test_suspended_broker_whose_connection_is_cut_is_replaced_and_does_not_replace_its_successor() -> None:
    world, first, second = pair()
    first.suspended = True
    second.cut()
    world.run(1.0)
    assert world.elected is second
    first.resume()
    world.run(SETTLED_S)
    assert (world.elected, world.elections) == (second, 2)
    assert first.protocol.state is WatchState.WATCHING


def test_standby_that_was_never_connected_replaces_nobody() -> None:
    world = World()
    first = world.broker("one")
    first.reachable = False
    second = world.broker("two")
    world.run(3.0)
    first.kill()
    world.run(SETTLED_S)
    assert not second.replaced
    assert second.protocol.state is WatchState.SEEKING
    first.end_session()
    assert second.is_elected


def test_standby_that_cannot_read_the_topic_replaces_nobody() -> None:
    world, first, second = pair()
    second.hears = False
    second.cut()
    world.run(SETTLED_S)
    assert world.elected is first
    assert not second.replaced
    second.hears = True
    second.fetch()
    world.run(STORED_S + 1.0)
    assert not second.replaced
    assert second.protocol.state is WatchState.WATCHING


def test_standby_that_reads_late_finds_the_answer_before_its_own_claim() -> None:
    world, first, second = pair()
    second.cut()
    while second.protocol.state is WatchState.CHALLENGING and not any(each.kind is MessageKind.HERE for each in world.topic[-1:]):
        world.run(0.0005)
    second.hears = False
    world.run(ANSWER_S + 0.1)
    second.hears = True
    second.fetch()
    world.run(3.0)
    assert world.elected is first
    assert not second.replaced


def test_standby_that_was_suspended_challenges_again() -> None:
    world, first, second = pair()
    first.hears = False
    second.cut()
    world.run(0.1)
    second.suspended = True
    world.run(ANSWER_S + LATE_S + 0.1)
    first.hears = True
    second.resume()
    first.fetch()
    world.run(3.0)
    assert (world.elected, second.replaced) == (first, [])


def test_killed_broker_that_was_restarted_at_once_keeps_its_place() -> None:
    world, first, second = pair()
    first.kill()
    world.run(0.1)
    first.lives, first.alive, first.protocol = 1, True, TakeoverProtocol(first, "one#1", ANSWER_S)
    first.protocol.start()
    world.elect()
    world.run(SETTLED_S)
    assert world.elected is first
    assert second.protocol.state is WatchState.WATCHING
    assert not second.replaced


def test_broker_stopped_in_order_is_not_challenged() -> None:
    world, first, second = pair()
    stored = len(world.topic)
    world.members.remove(first)
    world.elect()
    world.run(3.0)
    assert world.elected is second
    assert {message.kind for message in world.topic[stored:] if message.sender == "two#0"} == {MessageKind.HERE}
    assert first.protocol.state is WatchState.WATCHING


def test_of_two_standbys_the_one_that_claims_later_replaces_nobody_if_it_reads_the_claim_of_the_other() -> None:
    world, first, second = pair()
    third = world.broker("three")
    world.run(3.0)
    first.kill()
    world.run(SETTLED_S)
    assert world.elections == 2
    assert sorted(second.replaced + third.replaced)[:1] == ["one-0"]
    (standby,) = (each for each in (second, third) if each is not world.elected)
    assert standby.protocol.state is WatchState.WATCHING
    assert standby.watched is not None
    assert standby.watched[0] is world.elected


def test_closed_watch_connects_to_nobody() -> None:
    world, _, second = pair()
    second.protocol.close()
    assert second.watched is None
    world.run(SETTLED_S)
    assert world.elections == 1


@pytest.mark.parametrize("seed", range(100))
def test_in_any_order_of_faults_live_brokers_do_not_alternate_and_a_lost_one_is_replaced(seed: int) -> None:
    world = World(seed)
    world.delay_s = 0.05
    chance = world.random
    brokers = [world.broker(name) for name in ("one", "two", "three")]
    world.run(5.0)
    for _ in range(12):
        elections, elected = world.elections, world.elected
        deed = chance.choice(("cut", "cut all", "suspend standby", "none"))
        if deed != "none":
            for each in chance.sample(brokers, 3 if deed == "cut all" else 1):
                if deed == "suspend standby" and each is not elected:
                    each.suspended = True
                    world.after(chance.random() * 2, each.resume)
                each.cut()
        world.run(chance.random() * 3)
        # Every live elected broker answers within the time, so nothing changes hands.
        assert (world.elections, world.elected) == (elections, elected), deed
    world.run(SETTLED_S)
    lost = world.elected
    lost.kill()
    world.run(2.0)
    assert world.elected is not lost
    winner, elections = world.elected, world.elections
    world.run(SETTLED_S)
    assert (world.elected, world.elections) == (winner, elections)


@pytest.mark.parametrize(
    "value",
    [
        None, b"", b"{", b"[]", b"7", b'{"kind": "here"}', b'{"kind": "other", "sender": "a"}', b'{"kind": "here", "sender": 1}', b"\xff",
        b'{"kind": "here", "sender": "a", "port": 65536}', b'{"kind": "here", "sender": "a", "port": true}',
        b'{"kind": "here", "sender": "a", "port": -1}', b'{"kind": "here", "sender": "a", "more": 1}', b"[" * 100_000,
        b'{"kind": "here", "sender": "%s"}' % (b"a" * (TEXT_MAX + 1)),
    ],
)  # fmt: skip
def test_anything_else_in_the_topic_is_no_message(value: bytes | None) -> None:
    assert decode(value) is None


def test_transition_that_is_not_in_the_table_is_a_fault() -> None:
    _, _, second = pair()
    with pytest.raises(BrokerFault, match="'pause over' in state 'watching'"):
        second.protocol._move(WatchEvent.PAUSED)


def test_search_for_the_elected_broker_slows_down() -> None:
    world = World()
    alone = Broker(world, "alone")
    world.brokers.append(alone)
    alone.protocol.start()
    world.run(SEEK_S)
    world.run(600.0)
    assert len(world.topic) < 30
