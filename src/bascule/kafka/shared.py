"""Kafka clients that many short-lived readers and writers of one owner share: one asks for offsets, one writes barrier records."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bascule.kafka.appender import Appender
from bascule.kafka.history import offsets_client

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient


class SharedClients:
    """Clients made at their first use. Thread-safe.

    A client of its own would cost each reader and each writer a handful of threads, and some 15 ms until it is connected.
    """

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._kafka = kafka
        #: Writes barrier records.
        self.appender = Appender(kafka)
        self._offsets: AdminClient | None = None
        self._lock = threading.Lock()

    @property
    def offsets(self) -> AdminClient:
        """The client that asks for offsets. Raises Unavailable."""
        with self._lock:
            if self._offsets is None:
                self._offsets = offsets_client(self._kafka)
            return self._offsets

    def close(self) -> None:
        """Free the clients. A later use makes new ones."""
        self.appender.close()
        with self._lock:
            self._offsets = None
