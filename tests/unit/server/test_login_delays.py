"""Delays after failed logins: how long, for whom, and for whom not."""

from __future__ import annotations

import itertools

import pytest

from bascule.server import login_delays
from bascule.server.login_delays import (
    ADDRESS_DELAY_S,
    ADDRESS_FREE_FAILURES,
    DELAY_S_MAX,
    ENTRIES_MAX,
    FIRST_DELAY_S,
    FORGET_S,
    FREE_FAILURES,
    USER_DELAY_S,
    USER_FREE_FAILURES,
    LoginDelays,
    network_of,
)

HOME, AWAY = "192.0.2.1", "198.51.100.1"


def guessed(delays: LoginDelays, count: int, user: str = "ann", address: str = AWAY, now_s: float = 0.0) -> None:
    for _ in range(count):
        delays.failed(user, address, now_s)


def test_first_wrong_passwords_cause_no_delay_and_each_further_one_doubles_it() -> None:
    delays, now_s, waited = LoginDelays(), 0.0, []
    for _ in range(FREE_FAILURES + 7):
        delay_s = delays.delay_s("ann", AWAY, now_s)
        assert delay_s is not None
        waited.append(delay_s)
        now_s += delay_s
        delays.failed("ann", AWAY, now_s)
    assert waited == [0.0] * FREE_FAILURES + [FIRST_DELAY_S * factor for factor in (1, 2, 4, 8, 16, 16, 16)]


def test_logins_at_once_of_a_pair_that_guesses_wait_one_after_the_other_and_the_rest_is_refused() -> None:
    delays = LoginDelays()
    guessed(delays, FREE_FAILURES + 1)
    delays_s = [delays.delay_s("ann", AWAY, 0.0) for _ in range(20)]
    pause_s = 2 * FIRST_DELAY_S
    allowed = int(DELAY_S_MAX / pause_s)
    assert delays_s == [pause_s * number for number in range(1, allowed + 1)] + [None] * (20 - allowed)


def test_address_that_guesses_for_many_users_has_ten_logins_a_second() -> None:
    delays = LoginDelays()
    for number in range(ADDRESS_FREE_FAILURES):
        assert delays.delay_s(f"user{number}", AWAY, 0.0) == 0.0
        delays.failed(f"user{number}", AWAY, 0.0)
    found = [delays.delay_s(f"other{number}", AWAY, 0.0) for number in range(3)]
    assert found == pytest.approx([ADDRESS_DELAY_S, 2 * ADDRESS_DELAY_S, 3 * ADDRESS_DELAY_S])
    refused = sum(delays.delay_s(f"more{number}", AWAY, 0.0) is None for number in range(1000))
    assert refused > 900
    assert delays.delay_s("ann", HOME, 0.0) == 0.0


def test_attacker_at_other_addresses_can_delay_a_user_only_for_a_moment() -> None:
    delays = LoginDelays()
    for number in range(10 * USER_FREE_FAILURES):
        address = f"198.51.100.{number % 250}"
        delays.delay_s("ann", address, 0.0)
        delays.failed("ann", address, 0.0)
    assert [delays.delay_s("ann", HOME, 0.0) for _ in range(50)] == [USER_DELAY_S] * 50
    delays.succeeded("ann", HOME)
    assert delays.delay_s("ann", HOME, 0.0) == 0.0, "an address from which the user has logged in does not wait at all"


def test_application_with_a_wrong_password_keeps_other_users_at_its_address_not_out() -> None:
    delays = LoginDelays()
    for now_s in range(100):
        for _ in range(10):
            if delays.delay_s("broken", AWAY, float(now_s)) is not None:
                delays.failed("broken", AWAY, float(now_s))
    found = delays.delay_s("ann", AWAY, 99.0)
    assert found is not None
    assert found <= 2 * ADDRESS_DELAY_S


def test_right_password_ends_the_delay_of_its_pair_and_not_of_the_address() -> None:
    delays = LoginDelays()
    guessed(delays, ADDRESS_FREE_FAILURES)
    delays.succeeded("ann", AWAY)
    assert delays.delay_s("ann", AWAY, 0.0) == 0.0
    assert delays.delay_s("bob", AWAY, 0.0) == pytest.approx(ADDRESS_DELAY_S)


def test_pair_that_has_logged_in_and_guesses_later_is_delayed_like_any_other() -> None:
    delays = LoginDelays()
    delays.succeeded("ann", AWAY)
    guessed(delays, FREE_FAILURES)
    assert delays.delay_s("ann", AWAY, 0.0) == FIRST_DELAY_S


def test_wrong_passwords_are_forgotten_after_a_time() -> None:
    delays = LoginDelays()
    guessed(delays, ADDRESS_FREE_FAILURES)
    assert delays.delay_s("ann", AWAY, FORGET_S) == USER_DELAY_S
    assert delays.delay_s("ann", AWAY, FORGET_S + 0.1) == 0.0
    assert delays.failed("ann", AWAY, FORGET_S + 0.1)[:3] == (1, 1, 1)


def test_begin_of_each_delay_is_reported_once() -> None:
    delays = LoginDelays()
    begins = [number for number in range(1, 200) if delays.failed("ann", AWAY, 0.0).begins]
    assert begins == sorted({FREE_FAILURES, ADDRESS_FREE_FAILURES, USER_FREE_FAILURES})


def test_tables_are_bounded_and_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_delays, "ENTRIES_MAX", 3)
    assert ENTRIES_MAX == 10_000
    delays = LoginDelays()
    for number in range(5):
        guessed(delays, FREE_FAILURES, f"user{number}", f"10.0.0.{number}")
        delays.succeeded(f"friend{number}", HOME)
    assert [len(each) for each in (delays._pairs, delays._addresses, delays._users, delays._trusted)] == [3, 3, 3, 3]
    assert delays.delay_s("user0", "10.0.0.0", 0.0) == 0.0
    assert delays.delay_s("user4", "10.0.0.4", 0.0) == FIRST_DELAY_S
    guessed(delays, 1, "x" * 4000)
    assert max(len(key) for key in itertools.chain(delays._pairs, delays._users)) < 100


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"), ("not an address", "not an address"),
    ],
)  # fmt: skip
def test_host_is_an_ipv4_address_or_an_ipv6_network(address: str, network: str) -> None:
    assert network_of(address) == network
