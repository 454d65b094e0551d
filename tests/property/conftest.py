"""Fixtures of tests with generated input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.provider import Provider


@pytest.fixture(scope="session")
def provider() -> Iterator[Provider]:
    """Yield a provider of tokens with one key."""
    with Provider() as running:
        yield running
