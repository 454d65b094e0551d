"""An epoch on a journal in a real Kafka, for sequences of events that break naive systems."""

from __future__ import annotations

import asyncio
from contextlib import closing

from bascule.broker.addresses import Diverts
from bascule.broker.containment import ErrorContainment
from bascule.broker.epoch_effects import SMALL_RECORD_BYTES
from bascule.broker.policy import Policy
from bascule.broker.retention import OwnersRetention
from bascule.config.settings import Journal
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.sections import scan
from bascule.kafka.log import PartitionReader
from bascule.server import topics
from bascule.server.epoch import Epoch, JournalPlace
from bascule.testing.broker import Sender, message_bytes
from tests.support.system import wait_for

#: They are not small, so that several records are in flight.
MESSAGES = {name: message_bytes(name.ljust(SMALL_RECORD_BYTES), message_id=f"ID:{name}") for name in ("first", "failed", "third", "fourth")}


class Journaled:
    """A journal, and its epochs, which answer ``sender``."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.kafka = {"bootstrap.servers": kafka.bootstrap}
        names = JournalTopics(prefix)
        topics.ensure(self.kafka, names, Journal())
        self.place = JournalPlace(
            self.kafka, names, "sequences", append_timeout_s=15, snapshot_records=1000,
            session_timeout_s=60, retention=OwnersRetention(0), pinned_bytes_max=0,
        )  # fmt: skip
        self.sender = Sender()
        self.ends: list[BasculeError] = []

    def standby(self) -> Epoch:
        return Epoch(
            self.place, Policy(), Diverts(), None, 1 << 30,
            on_ended=self.ends.append, on_confirmed=lambda: None, on_ticked=lambda: None, on_stalled=self.ends.append,
            errors=ErrorContainment(),
        )  # fmt: skip

    async def epoch(self) -> Epoch:
        epoch = self.standby()
        await epoch.start()
        return epoch

    def end(self) -> int:
        """Return the offset of the next record."""
        with closing(PartitionReader(self.kafka, self.place.topics.journal, 0)) as reader:
            return reader.range()[1]

    def send(self, epoch: Epoch, *names: str) -> None:
        """Send messages, each in a record of its own, without waiting."""
        for name in names:
            self.decide(epoch, name)
            epoch.flush()

    def decide(self, epoch: Epoch, name: str) -> None:
        body = MESSAGES[name]
        epoch.engine.send("q", Routing.ANYCAST, body, scan(body), "client", self.sender, name)

    async def answered(self, *names: str) -> None:
        await asyncio.to_thread(wait_for, lambda: self.sender.accepted_tokens == list(names), "the answers")


def waiting(epoch: Epoch) -> list[bytes]:
    return [epoch.engine.bodies.read(message) for message in epoch.engine.queue("q").ready]
