"""The election of the active broker: a consumer group assigns the journal's partition to it.

Kafka's group membership detects a dead broker within the session timeout. The election only decides which broker tries to serve. The
fence in the journal prevents two brokers from being believed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bascule.core.errors import BasculeError, InvalidInput, Scope
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.instance import InstanceFence, SameInstance, fenced
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: Callbacks are called by polling: the maximum delay, in seconds, of a change.
POLL_S = 0.1
#: Longest time, in seconds, between two heartbeats. With a heartbeat a member learns that another member has left.
HEARTBEAT_MAX_S = 0.25
#: How long, in seconds, to wait for the answer of the group; without an answer the session times out.
LEAVE_S = 2.0
LEAVE_POLL_S = 0.02
CONFIRM_S = 5.0
#: Timeout, in seconds, for leaving the group and closing the client; both are quick if Kafka answers.
CLOSE_TIMEOUT_S = 5.0
#: A client that has the name of this broker for longer, in seconds, is another broker: a standby that removes this one joins under the
#: name and leaves, each within five seconds.
NAME_KEPT_S = 10.0
#: The session, not the polling thread, shows whether this process lives. But the client also waits this long for an answer to its request
#: to join before it retries. The client requires at least the session timeout.
_POLL_INTERVAL_MS = 60 * 1000
#: Errors that a retry cannot mend, with an explanation.
_REFUSED = {
    KafkaError.INVALID_SESSION_TIMEOUT: "broker.session_timeout_s must lie between Kafka's group.min.session.timeout.ms (6 s by default)"
    " and group.max.session.timeout.ms (30 min)",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the user may not read the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user may not read the topic",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "other clients use the group for another purpose",
}
_SETTINGS: Mapping[str, Any] = {
    # The active broker continues to serve while others join or leave.
    "partition.assignment.strategy": "cooperative-sticky",
    "group.protocol": "classic",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "latest",
    # Only the membership is used: nothing is read.
    "queued.min.messages": 1,
    "queued.max.messages.kbytes": 1,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "log_level": 0,
}


def member_settings(kafka: Mapping[str, Any], group: str, instance: str, session_timeout_s: float) -> dict[str, Any]:
    """Return the settings of a client that is a member of the group under a name."""
    return {
        **kafka,
        **_SETTINGS,
        "group.id": group,
        "group.instance.id": instance,
        "session.timeout.ms": int(session_timeout_s * 1000),
        "max.poll.interval.ms": max(_POLL_INTERVAL_MS, int(session_timeout_s * 1000)),
        "heartbeat.interval.ms": int(min(session_timeout_s / 12, HEARTBEAT_MAX_S) * 1000),
    }


def leave(consumer: Consumer, timeout_s: float) -> bool:
    """Leave the group, and return whether the client has left it in time.

    A member with a static name does not leave by closing, so that it may return. Without this wait, a client that is closed before it has
    asked to leave keeps its place until its session ends, and Kafka may elect it.
    """
    consumer.unsubscribe()
    deadline_s = time.monotonic() + timeout_s
    while consumer.memberid():
        if time.monotonic() > deadline_s:
            return False
        consumer.poll(LEAVE_POLL_S)
    return True


class NotAllowed(InvalidInput):
    """Kafka does not let this broker stand for election."""

    scope = Scope.PROCESS


class Election:
    """Takes part in the election until it is closed. ``on_change(elected)``, ``on_doubt`` and ``on_error`` are called from another thread.

    ``instance`` names this broker across restarts: a broker that was killed and restarted has its former role at once. While Kafka does
    not answer, nothing changes, because a broker loses an election only when Kafka elects another one. Whether Kafka has done so is in
    doubt (``on_doubt(why)``) from the end of the session, by the local clock, until Kafka answers again (``on_doubt("")``).
    """

    def __init__(
        self, kafka: Mapping[str, Any], group: str, topic: str, instance: str, session_timeout_s: float,
        *, on_change: Callable[[bool], None], on_error: Callable[[BasculeError], None], on_doubt: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._settings = member_settings(kafka, group, instance, session_timeout_s)
        self._kafka = kafka
        self._consumer = clients.consumer(self._settings)
        self._session_timeout_s = session_timeout_s
        self._fence = InstanceFence()
        self._group = group
        self._instance = instance
        self._topic = topic
        self._on_change = on_change
        self._on_doubt = on_doubt
        self._on_error = on_error
        self._elected = False
        #: The id that Kafka has given this member, as of the last assignment.
        self.member = ""
        self._asked: SimpleQueue[Future[bool]] = SimpleQueue()
        self._closing = threading.Event()
        self._resigning = False
        self._thread = lasting_thread(self._run, "election", on_failure=end_process)
        self._thread.start()

    def _run(self) -> None:
        self._stand()
        while not self._closing.is_set():
            self._answer()
            message = self._consumer.poll(POLL_S)
            error = message.error() if message is not None else None
            failure = self._fatal(error) if error is not None else None
            if failure is not None:
                self._on_error(failure)
                break
        else:
            if self._resigning:
                self._leave()
        self._consumer.close()

    def _fatal(self, error: KafkaError) -> BasculeError | None:
        if error.code() in _REFUSED:
            return NotAllowed(f"no election in group {self._group} over topic {self._topic}: {error.str()}: {_REFUSED[error.code()]}")
        if fenced(error):
            why = f"Kafka has given the name {self._instance!r} to another client"
            self._on_doubt(why)
            try:
                self._fence.meet()
            except SameInstance:
                if self._name_is_kept():
                    return SameInstance(f"another process runs as {self._instance!r}; give each process a data directory of its own")
            log.warning("standing for election again", reason=why)
            self._stand_again()
        return None

    def _name_is_kept(self) -> bool:
        """Return whether the client that has taken the name of this broker keeps it. A standby that has removed this broker does not."""
        admin, deadline_s = clients.admin(self._kafka), time.monotonic() + NAME_KEPT_S
        try:
            while time.monotonic() < deadline_s and not self._closing.is_set():
                group = admin.describe_consumer_groups([self._group], request_timeout=CONFIRM_S)[self._group].result(CONFIRM_S)
                if self._instance not in (member.group_instance_id for member in group.members):
                    return False
                self._closing.wait(POLL_S)
        except (KafkaException, TimeoutError):
            return False  # if another broker has the name, it takes the name again
        return not self._closing.is_set()

    def _stand(self) -> None:
        self._consumer.subscribe([self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def _stand_again(self) -> None:
        self._consumer.close()
        self._consumer = clients.consumer(self._settings)
        self._stand()

    def _leave(self) -> None:
        leave(self._consumer, LEAVE_S)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        self.member = consumer.memberid() or ""
        if partitions:
            consumer.pause(partitions)
            self._on_doubt("")
        self._tell(bool(consumer.assignment()))

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_unassign(partitions)
        self._tell(False)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Handle the end of the session by the local clock. Whether another broker was elected is known when Kafka answers again."""
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException:
            consumer.unassign()
        self._on_doubt(f"Kafka has not answered for {self._session_timeout_s:g} s: another broker may serve")

    def _tell(self, elected: bool) -> None:
        if elected != self._elected:
            self._elected = elected
            self._on_change(elected)

    def confirm(self) -> bool:
        """Ask Kafka whether this broker is elected. Returns False also if Kafka does not answer in time."""
        answer: Future[bool] = Future()
        self._asked.put(answer)
        try:
            return answer.result(CONFIRM_S)
        except TimeoutError:
            return False

    def _answer(self) -> None:
        """Answer in the polling thread: two threads must not use the client."""
        while not self._asked.empty():
            answer = self._asked.get()
            partitions = self._consumer.assignment()
            try:
                if partitions:
                    # Kafka accepts a commit only from a member of the current generation.
                    offsets = [TopicPartition(each.topic, each.partition, 0) for each in partitions]
                    self._consumer.commit(offsets=offsets, asynchronous=False)
                answer.set_result(bool(partitions))
            except KafkaException:
                answer.set_result(False)

    def close(self, *, resign: bool) -> None:
        """Stop. ``resign`` hands over at once; otherwise Kafka keeps the place until the session ends, for a restart.

        Without Kafka the client would wait for an answer for half a minute or longer; in this case it is abandoned.
        """
        self._resigning = resign
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("Kafka does not answer, another broker is elected when the session ends")
