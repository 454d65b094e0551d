"""Rules give permissions to roles; the most specific rule decides alone."""

from __future__ import annotations

import pytest

from bascule.broker.policy import Policy
from bascule.core.access import ANY_ROLE, PATTERN_WORDS_MAX, AccessRule, AccessRules
from bascule.core.permissions import AllowAll, Permission, Unauthorized
from bascule.core.roles import UserRoles

P = Permission
RULES = AccessRules(
    [
        AccessRule("#", {P.SEND: frozenset({"staff"}), P.BROWSE: frozenset({"staff"})}),
        AccessRule("orders.#", {P.SEND: frozenset({"sales"}), P.CONSUME: frozenset({"shipping", "sales"})}),
        AccessRule("orders.*", {P.SEND: frozenset({"chief"})}),
        AccessRule("orders.eu", {P.SEND: frozenset({ANY_ROLE})}),
    ],
    UserRoles({"sales": ["ann"], "shipping": ["bob"], "staff": ["ann", "bob"], "chief": ["eve"]}),
)


def may(user: str, permission: Permission, address: str) -> bool:
    """Return the answer of ``authorize``, which must be the answer of ``decide``."""
    try:
        RULES.authorize(user, permission, address)
        found = True
    except Unauthorized:
        found = False
    assert RULES.decide(user, permission, address).allowed is found
    return found


@pytest.mark.parametrize(
    ("user", "permission", "address", "allowed", "rule"),
    [
        ("ann", P.SEND, "stock", True, "#"),
        ("eve", P.SEND, "stock", False, "#"),
        ("ann", P.SEND, "orders.us.west", True, "orders.#"),
        ("bob", P.SEND, "orders.us.west", False, "orders.#"),
        ("bob", P.CONSUME, "orders", True, "orders.#"),
        ("ann", P.BROWSE, "orders.us.west", False, "orders.#"),
        ("eve", P.SEND, "orders.us", True, "orders.*"),
        ("ann", P.SEND, "orders.us", False, "orders.*"),
        ("ann", P.CONSUME, "orders.us", False, "orders.*"),
        ("nobody", P.SEND, "orders.eu", True, "orders.eu"),
        ("eve", P.CONSUME, "orders.eu", False, "orders.eu"),
    ],
)
def test_most_specific_rule_decides_and_inherits_nothing(user: str, permission: Permission, address: str, allowed: bool, rule: str) -> None:
    assert may(user, permission, address) is allowed
    assert RULES.decide(user, permission, address).rule == rule


@pytest.mark.parametrize(("first", "second"), [("orders.*", "*.eu"), ("orders.#", "#.eu"), ("orders.*.eu", "*.uk.eu")])
@pytest.mark.parametrize("swapped", [False, True])
def test_of_equally_specific_rules_the_one_with_the_earlier_fixed_word_decides_in_any_order(first: str, second: str, swapped: bool) -> None:
    rules = [AccessRule(first, {P.SEND: frozenset({"sales"})}), AccessRule(second, {P.SEND: frozenset({ANY_ROLE})})]
    access = AccessRules(reversed(rules) if swapped else rules, UserRoles({"sales": ["ann"]}))
    address = "orders.uk.eu" if first.count(".") == 2 else "orders.eu"
    assert access.decide("ann", P.SEND, address) == (
        True, first, f"[[permission]] {first!r} gives 'send' to sales; user 'ann' has sales"
    )  # fmt: skip
    assert not access.decide("bob", P.SEND, address).allowed


@pytest.mark.parametrize(
    ("first", "second", "address"),
    [("#.a.#", "#.b.#", "x.a.b"), ("#.a.#", "#.b.#", "x.b.y.a"), ("x.#.a.#", "x.#.b.#", "x.b.a"), ("#.*", "*.#", "a.b")],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_of_equal_patterns_with_many_words_the_later_rule_decides(first: str, second: str, address: str, swapped: bool) -> None:
    matches = [second, first] if swapped else [first, second]
    assert AccessRules([AccessRule(match, {}) for match in matches], UserRoles({})).decide("ann", P.SEND, address).rule == matches[-1]
    policy = Policy(rules=tuple((match, {"deliveries_max": number}) for number, match in enumerate(matches)))
    assert policy.of(address).deliveries_max == 1


def test_address_that_no_rule_matches_is_denied_to_everybody() -> None:
    rules = AccessRules([AccessRule("orders.#", {P.SEND: frozenset({ANY_ROLE})})], UserRoles({}))
    rules.authorize("ann", P.SEND, "orders")
    with pytest.raises(Unauthorized, match="user 'ann' has no permission 'send' on address 'stock'"):
        rules.authorize("ann", P.SEND, "stock")
    assert rules.decide("ann", P.SEND, "stock").reason == "no [[permission]] matches address 'stock', so no client has a permission on it"


def test_decision_names_rule_roles_and_the_roles_of_the_user() -> None:
    assert RULES.decide("bob", P.SEND, "orders.us.west").reason == (
        "[[permission]] 'orders.#' gives 'send' to sales; user 'bob' has shipping, staff"
    )
    assert RULES.decide("tom", P.EDIT, "stock").reason == "[[permission]] '#' gives 'edit' to nobody; user 'tom' has no role"


def test_without_rules_everything_is_allowed_and_said() -> None:
    assert AllowAll().decide("tom", P.EDIT, "stock") == (True, None, "there is no [[permission]], so everything is allowed")
    assert AllowAll().owns("tom", "ann")


@pytest.mark.parametrize(("user", "owner", "owns"), [("ann", "ann", True), ("ann", "", True), ("bob", "ann", False)])
def test_durable_subscription_belongs_to_the_user_who_made_it(user: str, owner: str, owns: bool) -> None:
    assert RULES.owns(user, owner) is owns


def test_roles_of_a_token_add_to_those_of_its_user_which_may_change() -> None:
    roles = UserRoles({})
    rules = AccessRules([AccessRule("#", {P.SEND: frozenset({"sales"}), P.CONSUME: frozenset({"shipping"})})], roles)
    client = rules.with_roles(frozenset({"sales"}))
    client.authorize("ann", P.SEND, "orders")
    with pytest.raises(Unauthorized):
        rules.authorize("ann", P.SEND, "orders")
    roles.assign({"ann": ["shipping"]})
    client.authorize("ann", P.CONSUME, "orders")
    roles.assign({})
    with pytest.raises(Unauthorized):
        client.authorize("ann", P.CONSUME, "orders")


def test_roles_that_change_count_from_the_next_decision_on_and_add_to_the_lasting_ones() -> None:
    roles = UserRoles({"sales": ["ann"]})
    rules = AccessRules([AccessRule("#", {P.SEND: frozenset({"sales"}), P.CONSUME: frozenset({"shipping"})})], roles)
    roles.assign({"ann": ["shipping"], "bob": ["sales"]})
    rules.authorize("ann", P.SEND, "a")
    rules.authorize("ann", P.CONSUME, "a")
    rules.authorize("bob", P.SEND, "a")
    roles.assign({})
    rules.authorize("ann", P.SEND, "a")
    for user, permission in (("ann", P.CONSUME), ("bob", P.SEND)):
        with pytest.raises(Unauthorized):
            rules.authorize(user, permission, "a")


NEWS = AccessRules(
    [
        AccessRule("#", {P.CONSUME: frozenset({"board"})}),
        AccessRule("news.#", {P.CONSUME: frozenset({"readers", "board"})}),
        AccessRule("news.secret", {P.CONSUME: frozenset({"board"})}),
        AccessRule("news.uk", {P.CONSUME: frozenset({"readers", "board"})}),
        AccessRule("sport.*", {P.CONSUME: frozenset({"readers"})}),
    ],
    UserRoles({"readers": ["ann"], "board": ["eve"], "all": ["bob"]}),
)


@pytest.mark.parametrize(
    ("user", "address", "allowed", "rule"),
    [
        ("ann", "news.de", True, "news.#"),
        ("ann", "news.#", False, "news.secret"),
        ("ann", "news.*", False, "news.secret"),
        ("ann", "*.secret", False, "#"),
        ("ann", "#", False, "#"),
        ("ann", "news.uk.#", True, "news.#"),
        ("ann", "news.uk.*", True, "news.#"),
        ("ann", "sport.*", True, "sport.*"),
        ("ann", "sport.#", False, "#"),
        ("eve", "news.#", True, "news.#"),
        ("eve", "#", False, "sport.*"),
    ],
)
def test_subscription_with_wildcards_needs_the_permission_on_each_address_that_it_matches(
    user: str, address: str, allowed: bool, rule: str
) -> None:
    decision = NEWS.decide(user, P.CONSUME, address)
    assert (decision.allowed, decision.rule) == (allowed, rule)
    if allowed:
        NEWS.authorize(user, P.CONSUME, address)
    else:
        with pytest.raises(Unauthorized):
            NEWS.authorize(user, P.CONSUME, address)


def test_subscription_with_wildcards_is_denied_if_no_rule_matches_all_its_addresses() -> None:
    rules = AccessRules([AccessRule("news.*", {P.CONSUME: frozenset({ANY_ROLE})})], UserRoles({}))
    rules.authorize("ann", P.CONSUME, "news.*")
    with pytest.raises(Unauthorized):
        rules.authorize("ann", P.CONSUME, "news.#")
    long = ".".join(["*"] * (PATTERN_WORDS_MAX + 1))
    everything = AccessRules([AccessRule("#", {P.CONSUME: frozenset({ANY_ROLE})})], UserRoles({}))
    everything.authorize("ann", P.CONSUME, long.removeprefix("*."))
    with pytest.raises(Unauthorized):
        everything.authorize("ann", P.CONSUME, long)
    reason = "no [[permission]] matches each address of 'news.#', so no client has a permission on it"
    assert rules.decide("ann", P.CONSUME, "news.#") == (False, None, reason)
