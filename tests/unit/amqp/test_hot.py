import struct
from typing import Any

import pytest

from bascule.amqp import hot
from bascule.amqp.composite import Composite, decode_composite, encode_composite
from bascule.amqp.errors import DecodeError
from bascule.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Declared,
    Disposition,
    Flow,
    Modified,
    Received,
    Rejected,
    TransactionalState,
    Transfer,
)  # fmt: skip
from bascule.amqp.types import Array, Described, Symbol, ULong

BIG = 70_000
STATES = [None, ACCEPTED, RELEASED, Modified(True, True), Rejected(), Received(1, 2), TransactionalState(b"t" * 12, ACCEPTED)]
TRANSFERS = [
    Transfer(handle, delivery_id, b"tag", message_format, settled, more, state=state)
    for handle in (0, 7, BIG)
    for delivery_id in (0, 7, BIG)
    for message_format in (None, 0, BIG)
    for settled in (None, False, True)
    for more in (False, True)
    for state in STATES
]
DISPOSITIONS = [
    Disposition(role, first, last, settled, state)
    for role in (True, False)
    for first in (0, 7, BIG)
    for last in (None, 0, 9, BIG + 9)
    for settled in (True, False)
    for state in STATES
]
FLOWS = [
    Flow(BIG, 1, 0, 300, *rest)  # type: ignore[arg-type]
    for rest in ((), (0,), (5, BIG, 7), (5, 0, 1, None, True), (5, 0, 1, 2, True, True), (5, 0, 1, 2, False, True))
]


def test_fast_and_general_decoder_agree_on_transfers() -> None:
    for transfer in TRANSFERS:
        encoded = encode_composite(transfer)
        frame = hot.read_transfer(encoded + b"payload", 3, len(encoded) + 7)
        assert frame is not None, transfer
        expected = hot.transfer_frame(transfer, len(encoded))
        assert frame[:4] == expected[:4]
        assert frame[4][1:] == expected[4][1:]


def test_fast_and_general_decoder_agree_on_dispositions() -> None:
    for disposition in DISPOSITIONS:
        encoded = encode_composite(disposition)
        if (disposition.last, disposition.settled, disposition.state) == (None, False, None):
            continue  # without information, so the fast decoder leaves it to the general one
        assert hot.read_disposition(encoded, 3, len(encoded)) == hot.disposition_frame(disposition)


@pytest.mark.parametrize("outcome", [None, ACCEPTED, Modified(True)], ids=repr)
def test_frames_of_many_transactions_are_read_with_their_own_ids(outcome: Composite | None) -> None:
    ids = [b"%x.%x" % (5, number) for number in (*range(1, 600), *range(2**40, 2**40 + 9))]
    ids += [b"", b"\x00\x53\x34\xc0\x06\x01\xa0\x01"]
    wrong = []
    for txn_id in ids:
        state = TransactionalState(txn_id, outcome)
        transfer, disposition = Transfer(0, 7, b"tag", 0, False, state=state), Disposition(True, 7, None, True, state)
        encoded = encode_composite(transfer)
        frame = hot.read_transfer(encoded, 3, len(encoded))
        if frame is None or frame[4][1:] != hot.transfer_frame(transfer, 0)[4][1:]:
            wrong.append((txn_id, frame))
        encoded = encode_composite(disposition)
        if (settled := hot.read_disposition(encoded, 3, len(encoded))) != hot.disposition_frame(disposition):
            wrong.append((txn_id, settled))
    assert wrong == []


def test_transaction_id_that_is_cut_off_is_not_read() -> None:
    whole = encode_composite(Disposition(True, 7, None, True, TransactionalState(b"txn-1")))
    assert hot.read_disposition(whole, 3, len(whole)) is not None
    cut = whole[:-2]
    cut = cut[:4] + bytes([cut[4] - 2]) + cut[5:]  # the frame has its new size, and the state the old one
    with pytest.raises(DecodeError):
        hot.read_disposition(cut, 3, len(cut))


@pytest.mark.parametrize("size", [0, 1, 12, 128, 129, 255])
def test_fast_and_general_encoder_agree_on_states_of_transactions(size: int) -> None:
    for state in (Declared(b"t" * size), TransactionalState(b"t" * size, ACCEPTED), TransactionalState(b"t" * size, Rejected())):
        assert hot.state_bytes(state) == encode_composite(state)


@pytest.mark.parametrize("flow", FLOWS, ids=repr)
def test_fast_and_general_decoder_agree_on_flows(flow: Flow) -> None:
    encoded = encode_composite(flow)
    assert hot.read_flow(encoded, 3, len(encoded)) == flow


def test_state_of_many_items_in_few_bytes_is_read_by_the_general_decoder_and_not_cached() -> None:
    before = set(hot._disposition_tails)
    arrays = Described(ULong(0x99), [Array(0x40, (None,) * 255)] * 50)
    for disposition in (Disposition(True, 1, None, True, Described(Symbol("x:y"), [n] * 65)) for n in range(3)):
        encoded = encode_composite(disposition)
        with pytest.raises(DecodeError, match="items more than allowed"):
            hot.read_disposition(encoded, 3, len(encoded))
    encoded = encode_composite(Disposition(True, 1, None, True, arrays))
    assert len(encoded) < 300
    with pytest.raises(DecodeError):
        hot.read_disposition(encoded, 3, len(encoded))
    assert set(hot._disposition_tails) <= before


@pytest.mark.parametrize("size_bytes", [0, 5, 100_000])
def test_general_decoder_reads_fast_encoded_transfer(size_bytes: int) -> None:
    head = hot.transfer_head(9, 300, BIG, 5, True, False, size_bytes)
    assert struct.unpack_from(">IBBH", head) == (len(head) + size_bytes, 2, 0, 9)
    assert decode_composite(head[8:]) == (Transfer(300, BIG, BIG.to_bytes(4, "big"), 5, True), len(head) - 8)


@pytest.mark.parametrize("state", [*STATES, Declared(b"t" * 255), Rejected()], ids=repr)
def test_general_decoder_reads_fast_encoded_disposition(state: Composite | None) -> None:
    encoded = hot.disposition(9, True, 1, BIG, True, hot.state_bytes(state) if state is not None else b"")
    assert struct.unpack_from(">IBBH", encoded) == (len(encoded), 2, 0, 9)
    assert decode_composite(encoded[8:]) == (Disposition(True, 1, BIG, True, state), len(encoded) - 8)


def test_general_decoder_reads_fast_encoded_flows() -> None:
    session = hot.session_flow(3, 1, 2, 3, 4)
    assert decode_composite(session[8:]) == (Flow(1, 2, 3, 4), len(session) - 8)
    link = hot.link_flow(3, (1, 2, 3, 4), 5, 6, 7, 8, True, False)
    assert decode_composite(link[8:]) == (Flow(1, 2, 3, 4, 5, 6, 7, 8, True), len(link) - 8)


@pytest.mark.parametrize("reader", [hot.read_transfer, hot.read_disposition, hot.read_flow])
@pytest.mark.parametrize("performative", [TRANSFERS[-1], DISPOSITIONS[3], FLOWS[-1]], ids=["transfer", "disposition", "flow"])
def test_fast_decoder_never_reads_truncated_frame_as_whole(reader: Any, performative: Composite) -> None:
    encoded = encode_composite(performative)
    for end in range(4, len(encoded)):
        try:
            assert reader(encoded, 3, end) is None
        except (IndexError, struct.error, DecodeError):
            continue


# Recorded from Qpid JMS 2.x, the client whose speed matters most.
QPID_JMS = {
    "first send": "005314c008054343a001004342",
    "later send": "005314c00c0543700000018fa001004342",
    "send in a transaction": "005314d00000001e0000000852015202a0010043424240005334c00a01a00730313233343536",
    "declare": "005314c00905435205a001024342",
    "acknowledgement in a short transaction": "005315d0000000170000000541434341005334c00a02a003302e3100532445",
    "first acknowledgement": "005315c009054143434100532445",
    "later acknowledgement": "005315c0110541700000018f700000018f4100532445",
    "acknowledgement in a transaction": "005315d00000001e00000005417000001770700000177041005334c00902a002376200532445",
    "credit": "005313c016074370000007ff5207707fffffff52024370000003e8",
}


@pytest.mark.parametrize("encoded", QPID_JMS.values(), ids=QPID_JMS)
def test_fast_decoder_reads_frames_of_qpid_jms(encoded: str) -> None:
    data = bytes.fromhex(encoded)
    performative, end = decode_composite(data)
    assert end == len(data)
    match performative:
        case Transfer():
            frame = hot.read_transfer(data + b"payload", 3, end)
            assert frame is not None
            expected = hot.transfer_frame(performative, end)
            assert (frame[:4], frame[4][1:]) == (expected[:4], expected[4][1:])
        case Disposition():
            assert hot.read_disposition(data, 3, end) == hot.disposition_frame(performative)
        case _:
            assert hot.read_flow(data, 3, end) == performative
