"""Limits on the lines about refusals before a login: for each address, for all, and the counts of the others."""

from __future__ import annotations

import pytest

from bascule.server import refusal_limits
from bascule.server.refusal_limits import ALL_LINES_AT_ONCE, ALL_LINES_PER_S, LINES_AT_ONCE, QUIET_S, RefusalLimits, Unwritten


def test_address_gets_some_lines_at_once_and_then_one_in_a_second_with_the_number_of_the_others() -> None:
    limits = RefusalLimits()
    found = [limits.refused("TLS", "10.0.0.1", 5.0) for _ in range(LINES_AT_ONCE + 7)]
    assert found == [0] * LINES_AT_ONCE + [None] * 7
    assert limits.refused("TLS", "10.0.0.1", 5.9) is None
    assert limits.refused("TLS", "10.0.0.1", 6.0) == 8
    assert limits.refused("TLS", "10.0.0.1", 6.5) is None


def test_refusals_of_another_kind_or_address_have_their_own_lines() -> None:
    limits = RefusalLimits()
    for _ in range(100):
        limits.refused("TLS", "10.0.0.1", 5.0)
    assert limits.refused("login", "10.0.0.1", 5.0) == 0
    assert limits.refused("TLS", "10.0.0.2", 5.0) == 0


def test_host_with_many_addresses_of_ipv6_is_one_address() -> None:
    limits = RefusalLimits()
    found = [limits.refused("TLS", f"2001:db8::{number:x}", 5.0) for number in range(LINES_AT_ONCE + 1)]
    assert found[-1] is None


def test_quiet_address_is_reported_once_and_forgotten() -> None:
    limits = RefusalLimits()
    for _ in range(LINES_AT_ONCE + 3):
        limits.refused("TLS", "10.0.0.1", 5.0)
    limits.refused("TLS", "10.0.0.2", 5.0)
    assert list(limits.quiet(5.0 + QUIET_S - 0.1)) == []
    assert list(limits.quiet(5.0 + QUIET_S)) == [Unwritten("TLS", "10.0.0.1", 3)]
    assert list(limits.quiet(5.0 + QUIET_S)) == []
    assert not limits._buckets


def test_many_addresses_together_get_a_limited_number_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_limits, "ADDRESSES_MAX", 100)
    limits, refused = RefusalLimits(), 3 * ALL_LINES_AT_ONCE
    found = [limits.refused("TLS", f"10.{n // 256}.{n % 256}.1", 5.0) for n in range(refused)]
    assert found == [0] * ALL_LINES_AT_ONCE + [None] * (refused - ALL_LINES_AT_ONCE)
    assert len(limits._buckets) == 100
    found = [limits.refused("TLS", f"11.0.{n}.1", 6.0) for n in range(100)]
    assert found == [0] * round(ALL_LINES_PER_S) + [None] * (100 - round(ALL_LINES_PER_S))
    assert list(limits.quiet(6.0)) == [], "no line is left"
    unwritten = 2 * ALL_LINES_AT_ONCE
    assert list(limits.quiet(7.0)) == [Unwritten("TLS", "others", unwritten)]
    assert list(limits.rest()) == [Unwritten("TLS", "others", 100 - round(ALL_LINES_PER_S))]
    assert list(limits.rest()) == []
