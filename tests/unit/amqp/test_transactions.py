import pytest

from bascule.amqp import performatives as p
from bascule.amqp.codec import encode
from bascule.amqp.errors import DECODE_ERROR, TRANSACTION_UNKNOWN_ID, DecodeError
from bascule.amqp.events import DeclareReceived, Discharged, Dispositioned, Transferred
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Discharge, Error, Rejected, TransactionalState
from bascule.amqp.transactions import decode_control, encode_control
from bascule.amqp.types import Described, Symbol, ULong
from tests.support.costs import calls_of
from tests.unit.amqp.pair import Pair, events_of


def test_transaction_is_declared_used_and_discharged() -> None:
    pair = Pair()
    session = pair.session()
    control, coordinator = pair.producer(session, Coordinator(("amqp:local-transactions",)))
    assert coordinator.is_coordinator
    control.send(encode_control(Declare()))
    [declared] = events_of(DeclareReceived, pair.run().at_server)
    coordinator.settle(declared.delivery_id, p.Declared(b"txn-1"))
    [disposition] = events_of(Dispositioned, pair.run().at_client)
    assert disposition.state == p.Declared(b"txn-1")

    sender, receiver = pair.producer(session)
    sender.send(b"message", state=TransactionalState(b"txn-1"), context="sent")
    [transfer] = events_of(Transferred, pair.run().at_server)
    assert (transfer.txn_id, transfer.payload) == (b"txn-1", b"message")
    receiver.settle(transfer.delivery_id, TransactionalState(b"txn-1", ACCEPTED))
    [disposition] = events_of(Dispositioned, pair.run().at_client)
    assert (disposition.state, disposition.txn_id, disposition.deliveries[0].context) == (ACCEPTED, b"txn-1", "sent")

    consumer, provider = pair.consumer(session, credit=1)
    provider.send(b"to acknowledge", context="taken")
    [transfer] = events_of(Transferred, pair.run().at_client)
    consumer.settle(transfer.delivery_id, TransactionalState(b"txn-1", ACCEPTED))
    [disposition] = events_of(Dispositioned, pair.run().at_server)
    assert (disposition.state, disposition.txn_id, disposition.settled, disposition.deliveries[0].context) == (
        ACCEPTED,
        b"txn-1",
        True,
        "taken",
    )

    control.send(encode_control(Discharge(b"txn-1", True)))
    control.send(encode_control(Declare()))
    first, second = pair.run().at_server
    assert isinstance(first, Discharged)
    assert (first.txn_id, first.fail) == (b"txn-1", True)
    assert isinstance(second, DeclareReceived)
    coordinator.settle(first.delivery_id, Rejected(Error(TRANSACTION_UNKNOWN_ID)))
    coordinator.settle(second.delivery_id, p.Declared(b"txn-2"))
    assert [type(event.state) for event in events_of(Dispositioned, pair.run().at_client)] == [Rejected, p.Declared]


def test_malformed_control_message_is_rejected() -> None:
    pair = Pair()
    control, _ = pair.producer(target=Coordinator())
    control.send(b"\xff")
    control.send(encode(Described(ULong(0x77), "text")))
    dispositions = events_of(Dispositioned, pair.run().at_client)
    assert {event.state.error.condition for event in dispositions} == {DECODE_ERROR}
    assert sum(len(event.deliveries) for event in dispositions) == 2


def test_control_message_may_have_sections_before_its_body() -> None:
    header = encode(Described(ULong(0x70), [True]))
    assert decode_control(header + encode_control(Discharge(b"1", False))) == Discharge(b"1", False)
    assert decode_control(encode_control(Declare())) == Declare()


@pytest.mark.parametrize("txn_id", [b"", b"0.1", b"i" * 200, b"i" * 255], ids=len)
@pytest.mark.parametrize("fail", [True, False])
def test_usual_and_unusual_encodings_of_a_control_message_mean_the_same(txn_id: bytes, fail: bool) -> None:
    usual = encode_control(Discharge(txn_id, fail))
    header = encode(Described(ULong(0x70), [True]))
    assert decode_control(usual) == decode_control(header + usual) == Discharge(txn_id, fail)
    for cut in range(len(usual)):
        with pytest.raises(DecodeError):
            decode_control(usual[:cut])


# Recorded from Qpid JMS 2.10.
@pytest.mark.parametrize(
    ("payload", "control"),
    [("00537700533145", Declare()), ("005377005332c00702a003302e3242", Discharge(b"0.2", False))],
    ids=["declare", "discharge"],
)
def test_control_messages_of_qpid_jms_are_read(payload: str, control: Declare | Discharge) -> None:
    assert decode_control(bytes.fromhex(payload)) == control
    assert calls_of(lambda: decode_control(bytes.fromhex(payload))) < 15


@pytest.mark.parametrize("payload", ["005377005332c00702a003302e3243", "005377005332c00703a003302e3242", "005377005332c00702a104302e3242"])
def test_discharge_with_wrong_fields_is_refused(payload: str) -> None:
    with pytest.raises(DecodeError):
        decode_control(bytes.fromhex(payload))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "payload",
    [
        b"\x40" * 5_000,
        encode(Described(ULong(0x70), [])) * 2_000,
        encode(Described(ULong(0x75), b"x")) * 2_000 + encode_control(Declare()),
        b"\x00\x53\x77" + b"\x00\x44" * 5_000,
        b"\x00" + encode([None] * 5_000),
        encode(Described(ULong(0x77), [None] * 50_000)),
        b"\x00\x53\x70\x45" * 2 + b"\x00",
    ],
    ids=["nulls", "headers", "data", "descriptors", "a list as descriptor", "a long list", "cut off"],
)
def test_costly_control_message_is_refused_at_once(payload: bytes) -> None:
    def refused() -> None:
        with pytest.raises(DecodeError):
            decode_control(payload)

    assert calls_of(refused) < 300


def test_control_message_may_have_a_large_section_before_its_body() -> None:
    annotations = encode(Described(ULong(0x72), {Symbol(f"x-{number}"): number for number in range(3_000)}))
    assert calls_of(lambda: decode_control(annotations + encode_control(Declare()))) < 100


def test_control_message_without_body_raises_decode_error() -> None:
    with pytest.raises(DecodeError):
        decode_control(encode(Described(ULong(0x70), [True])))
