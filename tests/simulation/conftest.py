"""Fixtures of the simulation's tests."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Run a test without the garbage collector, which would take a sixth of its time, and without a log that nobody reads."""
    gc.disable()
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
