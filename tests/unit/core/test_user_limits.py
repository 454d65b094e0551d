"""Limits of users and roles: which rule decides, and what the reason names."""

from __future__ import annotations

import pytest

from bascule.core.user_limits import UNLIMITED, LimitRule, LimitRules, UserLimit, UserResource

ROLES = {"partners": ["ann", "bob"], "staff": ["bob", "cid"]}


def rule(most: int, *, users: str = "", roles: str = "", resource: UserResource = UserResource.LINKS) -> LimitRule:
    return LimitRule(frozenset(users.split()), frozenset(roles.split()), {resource: most})


DECISIONS = {
    "no rule": ([], "ann", UserLimit(50, "broker.max_links_per_user")),
    "of a role": ([rule(5, roles="partners")], "ann", UserLimit(5, "max_links in [[limit]] of role 'partners'")),
    "of a role that the user lacks": ([rule(5, roles="staff")], "ann", UserLimit(50, "broker.max_links_per_user")),
    "the higher one of two roles": (
        [rule(5, roles="partners"), rule(7, roles="staff")], "bob", UserLimit(7, "max_links in [[limit]] of role 'staff'"),
    ),
    "no limit for one of two roles": (
        [rule(5, roles="partners"), rule(0, roles="staff")], "bob", UserLimit(0, "max_links in [[limit]] of role 'staff'"),
    ),
    "of the user before those of the roles": (
        [rule(5, users="bob"), rule(7, roles="staff")], "bob", UserLimit(5, "max_links in [[limit]] of user 'bob'"),
    ),
    "of the user, higher than for all": ([rule(500, users="bob")], "bob", UserLimit(500, "max_links in [[limit]] of user 'bob'")),
    "for another resource": ([rule(5, users="bob", resource=UserResource.QUEUES)], "bob", UserLimit(50, "broker.max_links_per_user")),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "user", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_limit_of_a_user_is_that_of_the_deciding_rule_and_names_it(rules: list[LimitRule], user: str, expected: UserLimit) -> None:
    assert LimitRules({UserResource.LINKS: 50}, rules, ROLES).of(user, UserResource.LINKS) == expected


def test_limit_on_message_bytes_is_named_after_its_setting() -> None:
    assert UNLIMITED.of("ann", UserResource.MESSAGE_BYTES) == UserLimit(0, "broker.max_message_bytes")
