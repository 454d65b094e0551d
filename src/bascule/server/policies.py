"""The settings of addresses and diverts in the form that the broker engine uses: its own names, and times in ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.matching import wants
from bascule.broker.policy import AddressPolicy, Policy
from bascule.config import Settings
from bascule.core.access import AccessRule, AccessRules
from bascule.core.permissions import AllowAll, Permission
from bascule.core.roles import UserRoles
from bascule.core.user_limits import LimitRule, LimitRules, UserResource
from bascule.jms.selector import compile_selector

#: More failed deliveries than any message can have.
_NEVER = 1 << 62


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _attempts(count: int) -> int:
    return count or _NEVER


#: Key of the file -> field of the engine, and the conversion of its value.
FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max_messages": ("max_messages", int),
    "max_bytes": ("max_bytes", int),
    "when_full": ("when_full", str),
    "max_delivery_attempts": ("deliveries_max", _attempts),
    "redelivery_delay_s": ("redelivery_delay_ms", _ms),
    "redelivery_multiplier": ("redelivery_multiplier", float),
    "redelivery_delay_max_s": ("redelivery_delay_max_ms", _ms),
    "expiry_s": ("expiry_ms", _ms),
    "max_expiry_s": ("expiry_max_ms", _ms),
    "dead_letter_address": ("dead_letter_address", str),
    "expiry_address": ("expiry_address", str),
    "duplicate_window_count": ("duplicate_count", int),
    "duplicate_window_s": ("duplicate_ms", _ms),
    "prefetch": ("prefetch_max", int),
    "exclusive": ("exclusive", bool),
    "auto_create": ("auto_create", bool),
    "auto_delete": ("auto_delete", bool),
    "auto_delete_after_s": ("auto_delete_ms", _ms),
    "subscription_expiry_s": ("subscription_expiry_ms", _ms),
}


def _turned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {FIELDS[key][0]: FIELDS[key][1](value) for key, value in values.items()}


def policy_of(settings: Settings, roles: UserRoles) -> Policy:
    """Return the policy that the settings describe."""
    broker = settings.broker
    return Policy(
        AddressPolicy(**_turned({key: getattr(broker, key) for key in FIELDS})),
        tuple((address.match, _turned(address.given())) for address in settings.address),
        transaction_ms_max=_ms(broker.transaction_timeout_s),
        queues_max=broker.max_queues,
        user_limits=user_limits_of(settings, roles),
        queues=tuple(queue.name for queue in settings.queue),
        topics=tuple(topic.name for topic in settings.topic),
    )


def user_limits_of(settings: Settings, roles: UserRoles) -> LimitRules:
    """Return the limits of users and roles."""
    broker = settings.broker
    of_all = {
        UserResource.CONNECTIONS: broker.max_connections_per_user,
        UserResource.SESSIONS: broker.max_sessions_per_user,
        UserResource.LINKS: broker.max_links_per_user,
        UserResource.TRANSACTIONS: broker.max_transactions_per_user,
        UserResource.PREPARED_BRANCHES: broker.max_prepared_branches_per_user,
        UserResource.QUEUES: broker.max_queues_per_user,
        UserResource.DURABLE_SUBSCRIPTIONS: broker.max_durable_subscriptions_per_user,
        UserResource.MESSAGES_PER_S: broker.max_messages_per_s_per_user,
    }
    rules = (LimitRule(frozenset(limit.users), frozenset(limit.roles), limit.given()) for limit in settings.limit)
    return LimitRules(of_all, rules, roles)


def permissions_of(settings: Settings, roles: UserRoles) -> AllowAll | AccessRules:
    """Return the permissions of clients. Without a rule, everything is allowed."""
    if not settings.permission:
        return AllowAll()
    rules = (
        AccessRule(rule.match, {Permission(name): frozenset(roles) for name, roles in rule.given().items()}) for rule in settings.permission
    )
    return AccessRules(rules, roles)


def diverts_of(settings: Settings) -> Diverts:
    """Return the settings of the configured diverts that the broker needs."""
    enabled = [divert for divert in settings.divert if divert.enabled]
    exclusive = tuple(
        ExclusiveDivert(divert.name, divert.from_address, partial(wants, compile_selector(divert.selector)), divert.from_kafka)
        for divert in enabled
        if divert.exclusive
    )
    patterns, names = (tuple(getattr(divert, field) for divert in enabled) for field in ("from_address", "name"))
    return Diverts(exclusive, patterns, settings.journal.replayable, names)
