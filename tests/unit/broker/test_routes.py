"""Routes: the queues, diverts and settings of an address, whatever the number of patterns."""

from __future__ import annotations

from bascule.broker.addresses import AddressBook, Diverts, ExclusiveDivert
from bascule.broker.memory import MemoryAccount
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.core.destination import Routing
from tests.support.costs import calls_of


def book_of(count: int) -> AddressBook:
    """Return an address book with ``count`` patterns of each kind, and some that match ``news.uk.7``."""
    rules = (("news.#", {"max_messages": 1}), *((f"*.{number}.#", {"max_messages": 9}) for number in range(count)))
    policy = Policy(rules=(*rules, ("news.*.7", {"max_bytes": 5}), ("news.uk.7", {"expiry_ms": 3})))
    patterns = tuple(f"#.x.{number}.*" for number in range(count))
    book = AddressBook(policy, MemoryAccount(1 << 20))
    exclusive = tuple(ExclusiveDivert(pattern, pattern, bool) for pattern in (*patterns, "*.uk.*"))
    book.use(Diverts(exclusive, (*patterns, "#.7"), (*patterns, "#.8")))
    for number, address in enumerate((*(f"*.*.*.{number}" for number in range(count)), "news.#", "#.uk.*", "news.uk.7")):
        book.add(BrokerQueue(number, f"s{number}", address, Routing.MULTICAST, AddressPolicy(), durable=True))
    return book


def test_route_has_all_matching_queues_in_the_order_of_their_creation() -> None:
    book = book_of(10)
    route = book.route("news.uk.7", Routing.MULTICAST)
    assert [queue.address for queue in route.queues] == ["news.#", "#.uk.*", "news.uk.7"]
    assert [divert.name for divert in route.exclusive] == ["*.uk.*"]
    assert route.diverted
    settings = book.policy.of("news.uk.7")
    assert (settings.max_messages, settings.max_bytes, settings.expiry_ms) == (1, 5, 3)
    assert "#.uk.*" in book
    assert "news.uk.8" not in book
    for queue in route.queues[:2]:
        book.remove(queue)
    assert [queue.address for queue in book.route("news.uk.7", Routing.MULTICAST).queues] == ["news.uk.7"]
    assert "#.uk.*" not in book


def test_more_specific_setting_wins_in_any_order_of_rules() -> None:
    rules = (("a.b", {"max_bytes": 4}), ("a.*", {"max_bytes": 3}), ("a.#", {"max_bytes": 2}), ("#", {"max_bytes": 1}))
    for ordered in (rules, rules[::-1]):
        policy = Policy(rules=ordered)
        assert [policy.of(address).max_bytes for address in ("a.b", "a.c", "a.c.d", "b")] == [4, 3, 2, 1]


def test_temporary_topic_matches_no_pattern() -> None:
    book = AddressBook(Policy(), MemoryAccount(1 << 20))
    for number, address in enumerate(("#", "temp.*", "temp.x")):
        book.add(BrokerQueue(number, f"s{number}", address, Routing.MULTICAST, AddressPolicy(), durable=False))
    assert [queue.address for queue in book.route("temp.x", Routing.MULTICAST).queues] == ["temp.x"]


def test_route_lookup_cost_does_not_grow_with_number_of_patterns() -> None:
    few, many = book_of(30), book_of(5_000)
    for book in (few, many):
        book.policy.of("first")  # sorts the rules once
    costs = [calls_of(lambda book=book: book.route("news.uk.7", Routing.MULTICAST)) for book in (few, many)]  # type: ignore[misc]
    assert costs[1] <= costs[0] + 30
