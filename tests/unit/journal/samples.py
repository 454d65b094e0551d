"""One record of every kind, which together have every kind of entry. The golden files hold these records."""

from __future__ import annotations

from bascule.core.xid import Xid
from bascule.journal.branches import Ended, Ending, PreparedEntry, ended_entry, prepared_entry
from bascule.journal.records import (
    KafkaOrigin,
    Kind,
    Op,
    Send,
    SendFlag,
    ack_entry,
    count_entry,
    encode_record,
    ingress_entry,
    json_entry,
    mid_of,
    queue_deleted_entry,
    reserve_entry,
    send_entry,
)

PLAIN = Send(SendFlag.DURABLE, 0, 4, 1_700_000_000_000, 0, 0, "orders", (1,), (), (), None, b"\x00\x53\x77\xa1\x05hello")
FULL = Send(
    SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID | SendFlag.DIVERTS | SendFlag.SOURCE,
    1, 9, 1_700_000_000_001, 1_700_000_060_000, 1_700_000_030_000, "news.zürich", (2, 3, 70_000),
    (bytes(range(16)), bytes(range(16, 32))), ("to-kafka", "audit"), KafkaOrigin("airport.alerts", 3, 1 << 40), b"\x00\x53\x75\xa0\x00",
)  # fmt: skip
PIPELINES_ONLY = Send(SendFlag.PIPELINES_ONLY, 1, 0, 1_700_000_000_002, 0, 0, "t", (), (), (), None, b"")

QUEUE = {"id": 4, "name": "q", "address": "q", "routing": 0, "selector": "", "no_local": "", "subscription": ""}
START = {"exclusive": ["audit"], "host": "a", "pid": 1, "version": "0.1.0"}
DATA = (send_entry(PLAIN), send_entry(FULL), send_entry(PIPELINES_ONLY), ack_entry(1, [mid_of(41, 3)]))
STATE = (
    json_entry(Op.QUEUE_CREATED, QUEUE),
    queue_deleted_entry(4),
    ack_entry(1, [mid_of(42, 0), mid_of(42, 1)]),
    count_entry(2, [(mid_of(42, 1), 3), (mid_of(42, 2), 1)]),
    reserve_entry(2, mid_of(298, 65535)),
    ingress_entry(0, 1 << 40),
    json_entry(Op.SNAPSHOT, {"id": "7-42", "bytes": 100}),
)

XID = Xid(0x42415343, b"shop/0199a1b2c3d4", "geschäft".encode())
IN_BRANCH = Send(SendFlag.DURABLE | SendFlag.DUPLICATE_ID, 0, 4, 0, 0, 0, "orders", (), (bytes(range(16)),), (), None, PLAIN.body)
BRANCH = PreparedEntry(
    XID, 1_700_000_000_003, "client-ü", (IN_BRANCH,), ((1, [(mid_of(41, 3), 0), (mid_of(41, 4), 2)]), (2, [(mid_of(40, 0), 1)]))
)
ENDS = [Ended(XID, ending, 1_700_000_000_004) for ending in Ending]
BRANCHES = (
    prepared_entry(*BRANCH),
    *(ended_entry(*ended) for ended in ENDS),
)

SUBSCRIPTION_USE = {"queue": 3, "unused_since_ms": 1_700_000_000_005}
INGRESS_TOPIC = {"id": "Zo2dYZ8sQ5ChnpLx5bZQvA", "positions": [[0, 17]]}

RECORDS: dict[str, bytes] = {
    "epoch": encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, START)),
    "data": encode_record(Kind.DATA, 7, 42, b"".join(DATA)),
    "branches": encode_record(Kind.STATE, 7, 44, b"".join(BRANCHES)),
    "ingress-topic": encode_record(Kind.STATE, 7, 45, json_entry(Op.INGRESS_TOPIC, INGRESS_TOPIC)),
    "subscription-use": encode_record(Kind.STATE, 7, 46, json_entry(Op.SUBSCRIPTION_USE, SUBSCRIPTION_USE)),
    "state": encode_record(Kind.STATE, 7, 43, b"".join(STATE)),
}
