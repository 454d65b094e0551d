"""Clients of Kafka that nobody uses any more are gone, with their threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


@pytest.mark.parametrize("make", [lambda: Topics(NOBODY), lambda: TopicHistory(NOBODY, "t", 0)], ids=["topics", "history"])
def test_a_client_is_gone_with_its_last_user_without_a_search_for_cycles(make: Callable[[], Any]) -> None:
    gc.disable()
    try:
        gone = weakref.ref(make())
        assert gone() is None
    finally:
        gc.enable()
