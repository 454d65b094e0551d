"""Small messages between processes: each process reads all messages of a topic from now on, its own included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.appender import Appender, await_stored
from bascule.threads.background import in_background
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: How long, in seconds, the thread waits for a message; only its end waits for it.
POLL_S: Final = 0.25
#: How long, in seconds, messages in flight may delay the end of a process. Without Kafka it would otherwise be half a minute.
CLOSE_S: Final = 5.0
_SETTINGS: Final[Mapping[str, Any]] = {
    "group.id": "bascule.broadcast.unused",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "latest",
    "queued.max.messages.kbytes": 1024,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
}


class Broadcast:
    """Sends messages to a topic of one partition, and receives those of all processes until it is closed.

    ``on_message(value)`` is called from another thread, in the order of the topic.
    """

    def __init__(self, kafka: Mapping[str, Any], topic: str, on_message: Callable[[bytes | None], None]) -> None:
        self._topic = topic
        self._on_message = on_message
        self._appender = Appender(kafka)
        self._consumer = clients.consumer({**kafka, **_SETTINGS})
        self._closing = threading.Event()
        self._thread = lasting_thread(self._run, "broadcast", on_failure=end_process)
        self._thread.start()

    def send(self, value: bytes) -> None:
        """Append a message, without waiting. A failure is only logged, since the sender does not receive its own message."""
        in_background(lambda: self._send(value), "broadcast-send")

    def _send(self, value: bytes) -> None:
        try:
            await_stored(self._appender.append(Outgoing(self._topic, None, value, partition=0)))
        except Exception as error:
            log.debug("message not stored", topic=self._topic, error=error)

    def _run(self) -> None:
        clients.assign(self._consumer, [TopicPartition(self._topic, 0, OFFSET_END)])
        while not self._closing.is_set():
            try:
                message = self._consumer.poll(POLL_S)
            except KafkaException as error:
                log.debug("message not read", topic=self._topic, error=error)
                continue
            if message is not None and message.error() is None:
                self._on_message(message.value())
        self._consumer.close()

    def close(self) -> None:
        """Stop; blocks until messages in flight are stored, or given up after ``CLOSE_S``."""
        self._closing.set()
        self._thread.join()
        self._appender.close(CLOSE_S)
