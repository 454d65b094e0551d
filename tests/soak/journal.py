"""Reads the journal of a soak while it is written: it is trimmed during the traffic, so it cannot be read at the end."""

from __future__ import annotations

from typing import Self

from confluent_kafka import TopicPartition

from bascule.core.errors import Unavailable
from bascule.jms.lookup import selector_lookup
from bascule.kafka import clients
from bascule.kafka.errors import passing
from bascule.kafka.history import TopicHistory
from tests.soak.clients import ID, Guarded
from tests.soak.plan import Plan
from tests.support.history import Audit
from tests.support.history_audit import JournalAudit

PARTITION = 0
POLL_S = 0.2
READ_TO_THE_END_S = 60.0


class JournalWatch(Guarded):
    """An audit that runs during the soak. Start it before anything can be trimmed."""

    def __init__(self, bootstrap: str, plan: Plan) -> None:
        super().__init__(name="journal", target=self._read, daemon=True)
        #: Why the audit does not have the whole journal; "" if it has.
        self.gap = ""
        self._kafka = {"bootstrap.servers": bootstrap, "log_level": 2, "reconnect.backoff.max.ms": 200}
        self._topic = plan.topic("journal")
        self._audit = JournalAudit(lambda body: str(selector_lookup(body)(ID)))
        self._next = 0
        self._end: int | None = None

    def __enter__(self) -> Self:
        """Start reading."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading."""
        self._end = self._next
        self.join(READ_TO_THE_END_S)

    def _read(self) -> None:
        consumer = clients.consumer(
            {**self._kafka, "group.id": "unused", "enable.auto.commit": False, "auto.offset.reset": "error", "fetch.wait.max.ms": 50}
        )
        try:
            consumer.assign([TopicPartition(self._topic, PARTITION, self._next)])
            while self._end is None or self._next < self._end:
                for message in consumer.consume(1000, POLL_S):
                    failure, offset, value = message.error(), message.offset(), message.value()
                    if failure is None:
                        assert offset is not None
                        assert isinstance(value, bytes)
                        self._audit.take(offset, value)
                        self._next = offset + 1
                    elif not passing(failure):
                        self.gap = f"the journal was trimmed before offset {self._next} was read, or is not readable: {failure.str()}"
                        return
        finally:
            consumer.close()

    def finish(self) -> Audit | None:
        """Return what has been read from the journal so far; None if there is a gap."""
        try:
            self._end = TopicHistory(self._kafka, self._topic, PARTITION).latest()
        except Unavailable as error:
            self.gap = self.gap or str(error)
            return None
        self.join(READ_TO_THE_END_S)
        if self.is_alive():
            self.gap = f"the journal was read up to offset {self._next} of {self._end} only"
        elif self.failure:
            self.gap = "its reader failed"
        return None if self.gap else self._audit.result()
