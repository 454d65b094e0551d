"""Load of the state of the next epoch, on a journal in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from bascule.broker import snapshot as snapshots
from bascule.broker.engine import Engine
from bascule.broker.following import ANSWER_TIMEOUT_S, Closed, FollowingProtocol
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies
from bascule.core.effects import Severity, run_blocking
from bascule.core.errors import BasculeError, Unavailable
from bascule.journal.errors import DamagedRecord
from bascule.journal.reading import Trimmed
from bascule.journal.records import Op, json_entry
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes, snapshot_of

RECORDS_AT_ONCE = 2


class Topics:
    """The topics of a broker in memory: see bascule.broker.following.FollowingEffects. ``time_s`` advances with each read."""

    def __init__(self, broker: BrokerInMemory) -> None:
        self.broker = broker
        self.first = 0
        self.kept: dict[str, bytes] = {}
        self.store: dict[int, bytes] = {}
        self.end: int | None = None
        self.over = False
        self.other_topic = False
        self.lost = 0  # number of lost records at the end of the journal
        self.former_snapshots: Mapping[str, bytes] | None = None  # the snapshots that a former leader has
        self.former_store: Mapping[int, bytes] | None = None
        self.former_ends = 0  # how often a former leader that has lost records is asked for the end
        self.on_sleep: Callable[[], None] = lambda: None
        self.time_s = 0.0
        self.notes: list[str] = []
        self.before_read: Callable[[int], None] = lambda _: None
        self.empty_reads = 0

    def now_s(self) -> float:
        return self.time_s

    def wanted_end(self) -> int | None:
        return self.end

    def closing(self) -> bool:
        return self.over

    def fresh_engine(self) -> Engine:
        return Engine(Journaling(lambda *_: None), Bodies(None, 1 << 30), lambda: 1000)

    async def recreated(self) -> bool:
        return self.other_topic

    async def sleep(self, delay_s: float) -> None:
        self.time_s += delay_s
        self.on_sleep()

    async def snapshots(self, *, behind_barrier: bool) -> Mapping[str, bytes]:
        return dict(self.kept if behind_barrier or self.former_snapshots is None else self.former_snapshots)

    async def stored(self, *, behind_barrier: bool) -> Mapping[int, bytes]:
        return dict(self.store if behind_barrier or self.former_store is None else self.former_store)

    async def range(self) -> tuple[int, int]:
        if self.former_ends:
            self.former_ends -= 1
            return self.first, len(self.broker.log.records) - 3
        return self.first, len(self.broker.log.records) - self.lost

    async def read(self, offset: int) -> Sequence[tuple[int, bytes | None]]:
        self.before_read(offset)
        self.time_s += 1.0
        if offset < self.first:
            raise Trimmed(f"offset {offset}")
        if self.empty_reads:
            self.empty_reads -= 1
            return []
        values = [value for _, value in self.broker.log.records]
        return list(enumerate(values))[offset : offset + RECORDS_AT_ONCE]

    def bulk(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, severity: Severity, event: str, detail: str) -> None:
        self.notes.append(f"{event}: {detail}")

    # -- helpers of tests ---------------------------------------------------------------------------------------------------

    def load(self) -> Loader:
        self.protocol = FollowingProtocol(self, "journal")
        return run_blocking(self.protocol.run())

    def send(self, *names: str) -> None:
        for name in names:
            self.broker.send("q", message_bytes(name), Sender(), name)
            self.broker.settle()

    def snapshot(self, *, announced: bool = True) -> str:
        engine = self.broker.engine
        taken = snapshot_of(engine, self.broker.offsets)
        self.kept[taken.id] = snapshots.encode(taken).joined()
        if announced:
            engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
            self.broker.settle()
        return taken.id

    def ends(self) -> Topics:
        """Let the load end with the existing records."""
        self.end = len(self.broker.log.records)
        return self


def waiting(loader: Loader) -> list[bytes | None]:
    return [message.body for message in loader.engine.queue("q").ready]


def bodies(*names: str) -> list[bytes]:
    return [message_bytes(name) for name in names]


def trim_to_a_snapshot(topics: Topics) -> str:
    """Acknowledge all waiting messages, send "c", make a snapshot, and trim the journal. Return the snapshot's id."""
    receiver = topics.broker.attach(topics.broker.engine.queue("q"), 10)
    topics.broker.settle()
    for message in receiver.messages:
        topics.broker.engine.acknowledge(receiver.consumer, message)
    topics.broker.settle()
    topics.send("c")
    topics.kept.clear()
    name = topics.snapshot()
    topics.first = snapshots.decode(topics.kept[name]).first_offset()
    return name


@pytest.fixture
def topics() -> Topics:
    return Topics(BrokerInMemory())


def test_whole_journal_is_loaded_without_a_snapshot(topics: Topics) -> None:
    topics.send("a", "b", "c")
    loader = topics.ends().load()
    assert waiting(loader) == bodies("a", "b", "c")
    assert topics.protocol.next_offset == topics.end


def test_newest_announced_snapshot_is_loaded_with_later_records(topics: Topics) -> None:
    topics.send("a")
    first = topics.snapshot()
    topics.send("b")
    second = topics.snapshot()
    topics.send("c")
    unannounced = topics.snapshot(announced=False)
    loader = topics.ends().load()
    assert waiting(loader) == bodies("a", "b", "c")
    assert loader.snapshot is not None
    assert loader.snapshot.id == second
    assert any(f"{unannounced} was never announced" in note for note in topics.notes)
    assert first in topics.kept


def test_damaged_snapshot_is_skipped(topics: Topics) -> None:
    topics.send("a")
    topics.snapshot()
    topics.kept["9-9"] = b"damaged"
    assert waiting(topics.ends().load()) == bodies("a")
    assert any(note.startswith("damaged snapshot: snapshot 9-9") for note in topics.notes)


def test_records_behind_the_start_record_are_not_applied(topics: Topics) -> None:
    topics.send("a", "b")
    topics.ends()
    topics.send("c")
    assert waiting(topics.load()) == bodies("a", "b")


def test_load_follows_the_journal_until_its_end_is_known(topics: Topics) -> None:
    topics.send("a")
    reads = 0

    def later(_: int) -> None:
        nonlocal reads
        reads += 1
        if reads == 5:
            topics.send("b")
        if reads == 8:
            topics.ends()

    topics.before_read = later
    assert waiting(topics.load()) == bodies("a", "b")


def test_foreign_record_is_counted_and_skipped(topics: Topics) -> None:
    topics.broker.log.append(b"?", b"not of Bascule")
    topics.send("a")
    assert waiting(topics.ends().load()) == bodies("a")
    assert topics.protocol.foreign == 1


def test_damaged_record_ends_load_and_error_has_offset(topics: Topics) -> None:
    topics.send("a")
    key, value = topics.broker.log.records[-1]
    topics.broker.log.records[-1] = (key, value[:-1] + b"!")
    with pytest.raises(DamagedRecord, match=f"journal journal, offset {len(topics.broker.log.records) - 1}: "):
        topics.ends().load()


def test_snapshot_that_needs_trimmed_records_is_reported_as_outdated(topics: Topics) -> None:
    topics.send("a", "b")
    topics.snapshot()
    topics.first = len(topics.broker.log.records) - 1
    with pytest.raises(DamagedRecord, match="no usable snapshot covers the records before"):
        topics.ends().load()
    assert any("needs journal offset" in note for note in topics.notes)


def test_load_without_snapshot_fails_when_first_record_is_trimmed(topics: Topics) -> None:
    topics.send("a", "b")
    topics.first = 1
    with pytest.raises(DamagedRecord, match="no usable snapshot covers the records before"):
        topics.ends().load()


def test_journal_trimmed_during_a_load_is_loaded_from_a_newer_snapshot(topics: Topics) -> None:
    topics.send("a")
    topics.snapshot()
    queue = topics.broker.engine.queue("q")

    def trim(_: int) -> None:
        topics.before_read = lambda _: None
        receiver = topics.broker.attach(queue, 1)
        topics.broker.settle()
        topics.broker.engine.acknowledge(receiver.consumer, receiver.messages[0])
        topics.send("b")
        topics.first = len(topics.broker.log.records) - 1
        topics.snapshot()
        topics.ends()

    topics.before_read = trim
    assert waiting(topics.load()) == bodies("b")
    assert any(note.startswith("load restarted") for note in topics.notes)


def test_load_fails_when_newer_epoch_has_trimmed_journal(topics: Topics) -> None:
    topics.send("a")
    topics.ends()
    topics.broker.start()
    topics.snapshot()
    topics.first = topics.end or 0
    topics.before_read = lambda _: None
    with pytest.raises(Unavailable, match="another broker has started a newer epoch, so this epoch must not serve"):
        topics.load()


def _lose_end(topics: Topics) -> None:
    """Remove two records of the journal, and store the start record in place of one of them."""
    del topics.broker.log.records[-3:]
    topics.broker.start()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda topics: setattr(topics, "other_topic", True), "was recreated"),
        (_lose_end, "has lost records at its end"),
    ],
    ids=["recreated", "cut off"],
)
def test_damaged_or_recreated_journal_is_refused(topics: Topics, spoil: Callable[[Topics], None], reason: str) -> None:
    topics.send("a", "b")
    topics.snapshot()
    spoil(topics)
    with pytest.raises(DamagedRecord, match=reason):
        topics.ends().load()


def test_journal_that_lost_its_end_stays_damaged_after_later_epochs_have_written(topics: Topics) -> None:
    topics.send("a", "b")
    topics.snapshot()
    del topics.broker.log.records[-3:]
    for _ in range(5):
        topics.broker.start()
    with pytest.raises(DamagedRecord, match=r"epoch \d begins before the end of snapshot .*: the journal has lost records"):
        topics.ends().load()


def test_load_restarts_when_stale_leader_returned_old_snapshots(topics: Topics) -> None:
    topics.send("a")
    topics.snapshot()
    topics.former_snapshots = dict(topics.kept)
    topics.send("b")
    trim_to_a_snapshot(topics)
    assert waiting(topics.ends().load()) == bodies("c")
    assert any(note.startswith("load restarted") for note in topics.notes)


def test_load_is_correct_when_stale_leader_returned_old_store(topics: Topics) -> None:
    topics.send("a")
    name = trim_to_a_snapshot(topics)
    taken = snapshots.decode(topics.kept[name])
    mid = taken.mids[0][0]
    taken.stored = [mid]
    topics.kept[name] = snapshots.encode(taken).joined()
    topics.store, topics.former_store = {mid: topics.broker.log.records[topics.first][1]}, {}
    topics.first = taken.next_offset
    assert waiting(topics.ends().load()) == bodies("c")


def test_stale_journal_end_of_former_leader_is_read_again(topics: Topics) -> None:
    topics.send("a", "b")
    topics.snapshot()
    topics.former_ends = 3
    assert waiting(topics.ends().load()) == bodies("a", "b")
    assert topics.former_ends == 0


def test_persistent_former_leader_of_the_journal_is_reported_as_unavailable(topics: Topics) -> None:
    topics.send("a", "b")
    topics.snapshot()
    topics.former_ends = 1_000
    with pytest.raises(Unavailable, match=r"reports . as its end; this node is cut off from the other nodes"):
        topics.ends().load()
    assert topics.time_s > ANSWER_TIMEOUT_S


def test_standby_reports_no_damage_before_it_is_elected(topics: Topics) -> None:
    topics.send("a", "b")
    topics.snapshot()
    topics.former_ends = 1_000
    sleeps = 0

    def elect() -> None:
        nonlocal sleeps
        sleeps += 1
        if sleeps == 100:
            topics.former_ends = 0
            topics.ends()

    topics.on_sleep = elect
    assert waiting(topics.load()) == bodies("a", "b")
    assert sleeps == 100


def test_standby_that_retries_its_load_can_be_closed(topics: Topics) -> None:
    topics.send("a")
    topics.snapshot()
    topics.lost = 3
    topics.on_sleep = lambda: setattr(topics, "over", True)
    with pytest.raises(Closed):
        topics.load()


def test_snapshot_with_missing_stored_message_is_not_used(topics: Topics) -> None:
    topics.send("a")
    name = topics.snapshot()
    taken = snapshots.decode(topics.kept[name])
    taken.stored = list(taken.mids[0])
    topics.kept[name] = snapshots.encode(taken).joined()
    assert waiting(topics.ends().load()) == bodies("a")  # from the whole journal
    assert any(note.startswith("outdated snapshot: snapshot cannot be used: message") for note in topics.notes)


def test_missing_records_before_the_known_end_fail_the_load(topics: Topics) -> None:
    topics.send("a")
    topics.empty_reads = int(ANSWER_TIMEOUT_S) + 2
    with pytest.raises(Unavailable, match="no record for 30 s at offset 0 of "):
        topics.ends().load()


def test_load_ends_when_broker_closes(topics: Topics) -> None:
    topics.send("a")
    topics.over = True
    with pytest.raises(Closed) as raised:
        topics.load()
    assert isinstance(raised.value, BasculeError)
