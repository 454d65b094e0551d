"""Messages of an ingress with a user need the user's permissions. A message that is refused becomes a dead letter, exactly once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.broker import ingress_access
from bascule.broker.administration import return_dead_letters
from bascule.broker.ingress_access import Arrival
from bascule.broker.ingress_tail import IngressTaking
from bascule.broker.policy import BLOCK, AddressPolicy, Policy
from bascule.core.access import AccessRule, AccessRules
from bascule.core.destination import Routing
from bascule.core.permissions import AllowAll, Permission, Unauthorized
from bascule.core.roles import UserRoles
from bascule.jms.annotate import ORIGINAL_ADDRESS, ORIGINAL_EXPIRY, ORIGINAL_ROUTING, REASON
from bascule.jms.errors import MalformedMessage
from bascule.journal.records import KafkaOrigin, Send, SendFlag
from tests.unit.broker.conftest import Bench

USER = "stock"
DEAD = "DLQ"


class Taken:
    """Chunks of the ingress topic, taken in a bench whose permissions the test sets."""

    def __init__(self, bench: Bench, *rules: AccessRule) -> None:
        self.bench = bench
        self.permissions: AllowAll | AccessRules = AccessRules(rules, UserRoles({"role": [USER]}))
        self.refusals: list[Unauthorized] = []
        self.follow()

    def follow(self) -> None:
        """Set the permissions of the engine, which is another one after a restart."""
        access = self.bench.engine.intake.access
        access.permissions, access.on_refused = self.permissions, self.refusals.append

    def take(self, *arrivals: Arrival, first: int = 0) -> IngressTaking:
        """Take records with a message each, and return what has taken them."""
        bench = self.bench
        taking = IngressTaking(
            bench.engine, "bascule.ingress", 0, soon=lambda action: action(), taken=lambda: None, ending=lambda: False
        )  # fmt: skip
        taking.gather(deque((offset + 1, [arrival]) for offset, arrival in enumerate(arrivals, first)))
        return taking


def rule(match: str, *permissions: Permission) -> AccessRule:
    return AccessRule(match, dict.fromkeys(permissions, frozenset({"role"})))


def arrival(
    bench: Bench, content: Any, *, to: str = "q", routing: Routing = Routing.ANYCAST, keep: bool = True, user: str = USER, **fields: Any
) -> Arrival:
    send = Send(SendFlag.SOURCE, routing, 4, 0, 0, 0, to, (), (), (), KafkaOrigin("topic", 0, 7), bench.encode(content))
    return Arrival(send._replace(**fields), keep, user)


def test_message_that_its_user_may_not_send_is_a_dead_letter_with_permission_user_and_address(bench: Bench) -> None:
    taken = Taken(bench, rule("#", Permission.CONSUME))
    bench.queue()
    taken.take(arrival(bench, "no", expiry_ms=bench.now_ms + 5_000))
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == []
    assert bench.waiting(bench.queue(DEAD)) == ["no"]
    assert bench.annotation(DEAD, REASON) == "unauthorized: user 'stock' has no permission 'send' on address 'q'"
    assert bench.annotation(DEAD, ORIGINAL_ADDRESS) == "q"
    assert bench.annotation(DEAD, ORIGINAL_ROUTING) == Routing.ANYCAST
    assert bench.annotation(DEAD, ORIGINAL_EXPIRY) == bench.now_ms + 5_000
    assert [str(each) for each in taken.refusals] == ["user 'stock' has no permission 'send' on address 'q'"]
    assert bench.engine.counters.dead_lettered == 1


def test_messages_of_an_allowed_user_and_of_the_owner_reach_their_destination(bench: Bench) -> None:
    taken = Taken(bench, rule("q", Permission.SEND))
    bench.queue()
    bench.queue("other")
    taken.take(arrival(bench, 1), arrival(bench, 2, to="other", user=""), arrival(bench, 3))
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == [1, 3]
    assert bench.waiting(bench.queue("other")) == [2]
    assert taken.refusals == []


@pytest.mark.parametrize("routing", list(Routing))
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_creation_needs_the_permissions_of_a_client_that_sends(routing: Routing, keep: bool, there: bool) -> None:
    create = {Permission.CREATE_ADDRESS, *({Permission.CREATE_DURABLE_QUEUE} if routing is Routing.ANYCAST else ())}
    for missing in (None, *sorted(create)):
        bench = Bench(Policy())
        taken = Taken(bench, rule("to", Permission.SEND, *(create - {missing})))
        if there and routing is Routing.ANYCAST:
            bench.queue("to")
        elif there:
            bench.subscription("s", "to", subscription="s")
        taken.take(arrival(bench, "m", to="to", routing=routing, keep=keep))
        bench.broker.settle()
        refused = missing is not None and keep and not there
        assert [each.permission for each in taken.refusals] == ([missing] if refused else []), missing
        assert ("to" in bench.engine.addresses.anycast) is (routing is Routing.ANYCAST and not refused and (keep or there))


def test_decision_is_not_made_again_when_the_journal_is_loaded(bench: Bench) -> None:
    taken = Taken(bench, rule("allowed.#", Permission.SEND))
    bench.queue("allowed.q")
    bench.queue()
    taken.take(arrival(bench, 1, to="allowed.q"), arrival(bench, 2))
    bench.broker.settle()
    for permissions in (AllowAll(), AccessRules((), UserRoles({}))):
        bench.crash()
        taken.permissions = permissions
        taken.follow()
        assert bench.engine.ingress_positions == {0: 2}
        assert bench.waiting(bench.queue("allowed.q")) == [1]
        assert bench.waiting(bench.queue(DEAD)) == [2]
        assert bench.waiting(bench.queue()) == []


def test_permission_that_is_given_later_counts_for_messages_that_come_later(bench: Bench) -> None:
    taken = Taken(bench, rule("#", Permission.CONSUME))
    bench.queue()
    taken.take(arrival(bench, "before"))
    taken.permissions = AllowAll()
    taken.follow()
    taken.take(arrival(bench, "after"), first=1)
    bench.broker.settle()
    assert (bench.waiting(bench.queue(DEAD)), bench.waiting(bench.queue())) == (["before"], ["after"])


def test_full_destination_and_full_dead_letter_queue_hold_up_no_dead_letter() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1, when_full=BLOCK)))
    taken = Taken(bench, rule("#", Permission.CONSUME))
    bench.fill("full", to="q")
    bench.fill("full", to=DEAD)
    taking = taken.take(arrival(bench, 1), arrival(bench, 2))
    bench.broker.settle()
    assert taking.waits == ""
    assert bench.waiting(bench.queue(DEAD)) == ["full", 1, 2]


def test_refused_message_is_removed_without_a_dead_letter_address() -> None:
    bench = Bench(Policy(AddressPolicy(dead_letter_address="")))
    taken = Taken(bench)
    bench.queue()
    taken.take(arrival(bench, "no"))
    bench.broker.settle()
    assert len(taken.refusals) == 1
    assert bench.engine.ingress_positions == {0: 1}
    assert {queue.name: bench.waiting(queue) for queue in bench.engine.addresses.queues.values()} == {"q": []}


def test_refused_message_that_cannot_get_annotations_is_kept_as_it_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Taken(bench)
    one = arrival(bench, "large")
    bench.engine.local_transactions.bytes_max = len(one.send.body)
    taken.take(one)

    def unreadable(*_: Any) -> bytes:
        raise MalformedMessage("unreadable")

    monkeypatch.setattr(ingress_access, "annotated", unreadable)
    bench.engine.local_transactions.bytes_max = 1 << 20
    taken.take(arrival(bench, "malformed"), first=1)
    bench.broker.settle()
    assert bench.waiting(bench.queue(DEAD)) == ["large", "malformed"]


def test_annotations_of_dead_letters_are_counted_as_steps(bench: Bench) -> None:
    taken = Taken(bench)
    (allowed,) = [arrival(bench, "x" * 800, user="")]
    (refused,) = bench.engine.intake.access.decided([allowed._replace(user=USER)])
    assert refused.refusal is not None
    assert bench.engine.intake_cost([refused])[0] >= bench.engine.intake_cost([allowed])[0] + 100
    assert taken.refusals == [], "nothing is told before the message is taken"


def test_long_record_of_a_user_is_planned_and_refused_as_a_whole(bench: Bench) -> None:
    taken = Taken(bench)
    bench.engine.turns.steps = 400
    soon: list[Callable[[], object]] = []
    taking = IngressTaking(bench.engine, "bascule.ingress", 0, soon=soon.append, taken=lambda: None, ending=lambda: False)
    taking.gather(deque([(1, [arrival(bench, number) for number in range(100)])]))
    while soon:
        bench.engine.go_on()
        soon.pop()()
    bench.broker.settle()
    assert bench.waiting(bench.queue(DEAD)) == list(range(100))
    assert len(taken.refusals) == bench.engine.counters.dead_lettered == 100


def test_refused_message_can_be_returned_to_its_queue_but_not_to_a_topic(bench: Bench) -> None:
    taken = Taken(bench)
    bench.queue()
    taken.take(arrival(bench, "queue"), arrival(bench, "topic", to="t", routing=Routing.MULTICAST))
    bench.broker.settle()
    (*_, progress) = return_dead_letters(bench.engine, bench.queue(DEAD))
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["queue"]
    assert bench.waiting(bench.queue(DEAD)) == ["topic"]
    assert "never reached a subscription of topic 't'" in str(progress)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=8),
    stored=st.integers(0, 10),
    changes=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_each_message_is_in_one_queue_once_whenever_the_broker_is_killed(kinds: list[bool], stored: int, changes: list[bool]) -> None:
    """A broker is killed again and again, with any number of its records stored; its successor has other permissions.

    It takes the records behind its position again.
    """
    bench = Bench(Policy())
    taken = Taken(bench, rule("allowed", Permission.SEND))
    for name in ("allowed", "refused", DEAD):
        bench.queue(name)
    bench.broker.settle()
    messages = [arrival(bench, number, to="allowed" if allowed else "refused") for number, allowed in enumerate(kinds)]
    held: Counter[Any] = Counter()
    for allow_all in (*changes, False):
        for offset in range(bench.engine.ingress_positions.get(0, 0), len(messages)):
            taken.take(messages[offset], first=offset)
            bench.broker.flush()
        bench.crash(stored)
        taken.permissions = AllowAll() if allow_all else AccessRules((rule("allowed", Permission.SEND),), UserRoles({"role": [USER]}))
        taken.follow()
    position = bench.engine.ingress_positions.get(0, 0)
    for queue in ("allowed", "refused", DEAD):
        held.update(bench.waiting(bench.queue(queue)))
    assert held == Counter(range(position))
    assert all(kinds[content] for content in bench.waiting(bench.queue("allowed")))
