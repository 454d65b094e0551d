"""Decisions of the active broker about the users of diverts."""

from __future__ import annotations

from bascule.broker.divert_access import DivertAccess, DivertUser, changed_decisions, refusal_of
from bascule.core.access import AccessRule, AccessRules
from bascule.core.permissions import AllowAll, Permission
from bascule.core.roles import UserRoles

ORDERS = DivertUser("ann", "orders.#")
REFUSED = "user 'ann' has no permission 'consume' on address 'orders.#'"


def rules(*matches: str, permission: Permission = Permission.CONSUME) -> AccessRules:
    return AccessRules([AccessRule(match, {permission: frozenset({"role"})}) for match in matches], UserRoles({"role": ["ann"]}))


def test_user_of_a_divert_needs_consume_on_every_address_of_the_divert() -> None:
    for permissions, reason in (
        (AllowAll(), ""), (rules("#"), ""), (rules("orders.#"), ""), (rules("orders.eu"), REFUSED), (rules(), REFUSED),
        (rules("#", permission=Permission.BROWSE), REFUSED),
        (AccessRules([AccessRule("#", {Permission.CONSUME: frozenset({"*"})}), AccessRule("orders.secret", {})], UserRoles({})), REFUSED),
    ):  # fmt: skip
        assert changed_decisions({"x": ORDERS}, {}, permissions, 7) == {"x": DivertAccess(*ORDERS, reason, 7)}


def test_only_changed_decisions_are_stored_and_those_of_other_diverts_are_deleted() -> None:
    stored = {"x": DivertAccess(*ORDERS, "", 1), "gone": DivertAccess("bob", "q", "no", 1)}
    assert changed_decisions({"x": ORDERS}, stored, rules("#"), 7) == {"gone": None}
    assert changed_decisions({"x": ORDERS}, stored, rules(), 7) == {"gone": None, "x": DivertAccess(*ORDERS, REFUSED, 7)}
    changed = DivertUser("ann", "q")
    assert changed_decisions({"x": changed, "gone": DivertUser("bob", "q")}, stored, AllowAll(), 7) == {
        "x": DivertAccess(*changed, "", 7), "gone": DivertAccess("bob", "q", "", 7),
    }  # fmt: skip


def test_only_a_decision_for_the_same_user_and_addresses_counts() -> None:
    assert refusal_of(ORDERS, DivertAccess(*ORDERS)) == ""
    assert refusal_of(ORDERS, DivertAccess(*ORDERS, REFUSED)) == REFUSED
    for other in (None, DivertAccess("bob", "orders.#"), DivertAccess("ann", "#")):
        assert refusal_of(ORDERS, other).startswith("no active broker has decided whether user 'ann' may consume from 'orders.#'")
