"""The content of any journal record is read as it was written."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from bascule.broker import snapshot as snapshots
from bascule.broker.remembered_ids import ID_SIZE_BYTES, SEGMENT_BYTES, RememberedIds, Segment
from bascule.broker.snapshot import Snapshot
from bascule.journal.errors import RecordError
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import (
    DIGEST_SIZE,
    HEADER_SIZE,
    KafkaOrigin,
    Kind,
    Op,
    Send,
    SendFlag,
    ack_entry,
    count_entry,
    decode_ack,
    decode_count,
    decode_header,
    decode_ingress,
    decode_reserve,
    decode_send,
    encode_record,
    entries,
    ingress_entry,
    reserve_entry,
    send_entry,
)

i64 = st.integers(-(1 << 63), (1 << 63) - 1)
u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
digest = st.binary(min_size=DIGEST_SIZE, max_size=DIGEST_SIZE)
name = st.text(max_size=60)


@st.composite
def sends(draw: st.DrawFn) -> Send:
    digests = tuple(draw(st.lists(digest, max_size=2)))
    diverts = tuple(draw(st.lists(name, max_size=5)))
    source = draw(st.none() | st.builds(KafkaOrigin, name, st.integers(0, (1 << 31) - 1), i64))
    flags = draw(st.sampled_from([SendFlag.DURABLE, SendFlag.PIPELINES_ONLY, SendFlag.DURABLE | SendFlag.GROUPED]))
    flags |= (0, SendFlag.DUPLICATE_ID, SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID)[len(digests)]
    flags |= (SendFlag.DIVERTS if diverts else 0) | (SendFlag.SOURCE if source else 0)
    return Send(
        flags, draw(st.integers(0, 1)), draw(st.integers(0, 9)), draw(i64), draw(i64), draw(i64), draw(st.text(max_size=200)),
        tuple(draw(st.lists(u32, max_size=20))), digests, diverts, source, draw(st.binary(max_size=300)),
    )  # fmt: skip


@given(st.lists(sends(), max_size=5), u64, u64)
def test_messages_survive_encoding_in_a_journal_record(written: list[Send], epoch: int, sequence: int) -> None:
    value = encode_record(Kind.DATA, epoch, sequence, b"".join(map(send_entry, written)))
    assert decode_header(value) == (Kind.DATA, epoch, sequence)
    assert [decode_send(value, start, end) for _, start, end in entries(value)] == written


@given(u32, st.lists(u64, max_size=50), st.lists(st.tuples(u64, st.integers(0, 0xFFFF)), max_size=50), u64, i64)
def test_acknowledgements_counts_and_positions_survive_encoding_in_a_journal_record(
    queue: int, mids: list[int], counts: list[tuple[int, int]], mid: int, offset: int
) -> None:
    body = ack_entry(queue, mids) + count_entry(queue, counts) + reserve_entry(queue, mid) + ingress_entry(3, offset)
    value = encode_record(Kind.STATE, 0, 1, body)
    (_, ack, ack_end), (_, count, count_end), (_, reserve, _), (_, ingress, _) = entries(value)
    assert decode_ack(value, ack, ack_end) == (queue, tuple(mids))
    assert decode_count(value, count, count_end) == (queue, counts)
    assert decode_reserve(value, reserve) == (queue, mid)
    assert decode_ingress(value, ingress) == (3, offset)


@given(st.binary(max_size=300), st.booleans())
def test_bytes_that_are_no_record_raise_only_record_errors(body: bytes, framed: bool) -> None:
    value = encode_record(Kind.DATA, 0, 1, body) if framed else body
    with suppress(RecordError):
        decode_header(value)
        for op, start, end in entries(value):
            assert HEADER_SIZE <= start <= end <= len(value)
            if op == Op.SEND:
                assert len(decode_send(value, start, end).body) <= end - start


@st.composite
def windows_of(draw: st.DrawFn) -> RememberedIds:
    """Return the ids of one window: some full segments, and a few more."""
    segments = [Segment.of(draw(digest).ljust(SEGMENT_BYTES, b".")) for _ in range(draw(st.integers(0, 2)))]
    return RememberedIds(segments, draw(digest) * 3 * draw(st.integers(0, 2)), draw(st.sampled_from([0, ID_SIZE_BYTES])))


@given(
    st.lists(st.tuples(st.lists(u64, max_size=20), st.lists(st.tuples(u64, u32), max_size=5)), max_size=5),
    st.dictionaries(name, windows_of(), max_size=5),
    st.dictionaries(st.integers(0, 100), st.integers(0, 1 << 60), max_size=5),
)
def test_snapshots_survive_encoding_and_decoding(
    queues: list[tuple[list[int], list[tuple[int, int]]]], windows: dict[str, RememberedIds], ingress: dict[int, int]
) -> None:
    taken = Snapshot(
        5, 9, 12, 3, OffsetMap([1, 4], [0, 2]), [{"id": number} for number in range(len(queues))], ingress,
        [mids for mids, _ in queues], [counts for _, counts in queues], windows,
    )  # fmt: skip
    encoded = snapshots.encode(taken).joined()
    found = snapshots.decode(encoded)
    assert snapshots.encode(found).joined() == encoded, "packed numbers are encoded like others"
    found.mids = [list(mids) for mids in found.mids]
    assert found == taken
