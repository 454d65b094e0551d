"""The effects of ``kafka_protocol``: calls on Kafka, and the clocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bascule.core.kafka_records import Outgoing
from bascule.xa.kafka_records import LogEntry, Make, SideEnds, SideRecord


class AppendReceipt(Protocol):
    """An append in progress."""

    async def offset(self) -> int | None:
        """Return the offset when all in-sync replicas have the record, or None if it is stored at an unknown offset.

        Raises TooLarge, and Unavailable if the record may be stored or not.
        """


class BranchCalls(Protocol):
    """The effects. Each may raise XaError if there is no connection to Kafka."""

    def now_ms(self) -> int:
        """Return the wall clock, in milliseconds since the epoch: a monotonic clock may stop while its machine is suspended."""

    def monotonic_s(self) -> float:
        """Return the seconds of a monotonic clock."""

    def turn(self, slot: str) -> AbstractAsyncContextManager[object]:
        """Wait until nobody else in this process ends branches under a transactional id."""

    def get_ready(self, slot: str) -> None:
        """Prepare a Kafka transaction in the background."""

    async def reach(self, slot: str) -> None:
        """Return if a Kafka transaction can be started. Raises Unavailable, with the reason."""

    async def room(self, record: Outgoing) -> int:
        """Return the size of a record in bytes. Raises InvalidInput, TooLarge if its topic does not take it; Unavailable."""

    def append(self, record: Outgoing) -> AppendReceipt:
        """Send a record outside of Kafka transactions."""

    async def transact(self, slot: str, make: Make) -> None:
        """Write the records that ``make`` returns for the current log partition of ``slot``, in one Kafka transaction (``writer.table``).

        Raises RecordRefused, and Unavailable if the outcome is unknown.
        """

    async def table(self) -> Mapping[bytes, LogEntry]:
        """Return the log, read behind a barrier. Raises Unavailable."""

    async def side(self, partition: int, first: int, last: int) -> Iterable[SideRecord]:
        """Return the records of the side topic between two offsets, both included. Raises Unavailable, also during the iteration."""

    async def side_ends(self) -> SideEnds:
        """Return the ends of the side topic. Raises Unavailable, also if the topic is replaced meanwhile."""

    async def trim(self, ends: Mapping[int, int]) -> None:
        """Delete the records of the side topic before these offsets, as far as possible now."""
