"""Settings of addresses as the engine gets them."""

from __future__ import annotations

from bascule.broker.policy import AddressPolicy
from bascule.config import Settings
from bascule.config.address import AddressSettings as Keys
from bascule.core.roles import UserRoles
from bascule.server.policies import FIELDS, policy_of

NO_ROLES = UserRoles({})


def test_policy_without_settings_equals_engine_defaults() -> None:
    assert policy_of(Settings(), NO_ROLES).defaults == AddressPolicy()


def test_address_settings_and_policy_fields_correspond_one_to_one() -> None:
    assert set(FIELDS) == set(Keys.model_fields)
    assert {field for field, _ in FIELDS.values()} == set(AddressPolicy.__dataclass_fields__)


def test_most_specific_address_table_wins_for_each_key_before_broker_defaults() -> None:
    made = policy_of(
        Settings.model_validate({
            "broker": {"max_delivery_attempts": 5, "transaction_timeout_s": 1.5, "max_queues": 7},
            "address": [
                {"match": "orders.eu", "when_full": "reject"},
                {"match": "orders.#", "max_messages": 10, "redelivery_delay_s": 0.25, "when_full": "drop-oldest-nonpersistent"},
                {"match": "orders.*", "max_bytes": "1 MiB", "expiry_s": 2},
            ],
            "queue": [{"name": "q"}],
            "topic": [{"name": "t"}],
        }),
        NO_ROLES,
    )  # fmt: skip
    eu = made.of("orders.eu")
    assert (eu.when_full, eu.max_messages, eu.max_bytes, eu.expiry_ms) == ("reject", 10, 1 << 20, 2000)
    assert (eu.redelivery_delay_ms, eu.deliveries_max) == (250, 5)
    assert made.of("orders.eu.north").when_full == "drop-oldest-nonpersistent"
    assert made.of("other") == made.defaults
    assert (made.transaction_ms_max, made.queues_max, made.queues, made.topics) == (1500, 7, ("q",), ("t",))


def test_max_delivery_attempts_zero_means_no_limit() -> None:
    assert policy_of(Settings.model_validate({"broker": {"max_delivery_attempts": 0}}), NO_ROLES).of("a").deliveries_max > 1 << 60
