"""The encoding of the journal's records: every version of Bascule reads old records, and writes a format version byte for byte the same.

``BASCULE_REWRITE_GOLDEN=1`` rewrites the golden files. Use it for a new kind of entry, never for a changed one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bascule.journal.branches import decode_ended, decode_prepared
from bascule.journal.records import Kind, Op, decode_ack, decode_header, decode_json, decode_send, entries
from tests.unit.journal.samples import BRANCH, ENDS, FULL, PIPELINES_ONLY, PLAIN, RECORDS

GOLDEN = Path(__file__).parents[2] / "golden" / "journal-v1"


@pytest.mark.parametrize("name", RECORDS)
def test_encoded_records_equal_the_golden_files(name: str) -> None:
    path = GOLDEN / f"{name}.bin"
    if os.environ.get("BASCULE_REWRITE_GOLDEN"):
        path.write_bytes(RECORDS[name])
    assert RECORDS[name].hex() == path.read_bytes().hex()


def test_golden_files_cover_each_sample_and_each_kind_of_record() -> None:
    files = list(GOLDEN.glob("*.bin"))
    assert {path.stem for path in files} == set(RECORDS)
    assert {decode_header(path.read_bytes()).kind for path in files} == set(Kind)


def test_golden_files_cover_every_operation() -> None:
    found = {op for path in GOLDEN.glob("*.bin") for op, _, _ in entries(path.read_bytes())}
    assert found == set(Op)


def test_messages_of_format_version_1_are_read() -> None:
    value = (GOLDEN / "data.bin").read_bytes()
    assert decode_header(value) == (Kind.DATA, 7, 42)
    found = list(entries(value))
    assert [decode_send(value, start, end) for op, start, end in found if op == Op.SEND] == [PLAIN, FULL, PIPELINES_ONLY]
    assert decode_ack(value, *found[-1][1:]) == (1, (41 << 16 | 3,))


def test_epoch_record_names_the_exclusive_diverts() -> None:
    value = (GOLDEN / "epoch.bin").read_bytes()
    ((op, start, end),) = entries(value)
    assert op == Op.EPOCH
    assert decode_json(value, start, end)["exclusive"] == ["audit"]


def test_branches_of_format_version_1_are_read() -> None:
    value = (GOLDEN / "branches.bin").read_bytes()
    (_, *prepared), *ended = entries(value)
    assert decode_prepared(value, *prepared) == BRANCH
    assert [decode_ended(value, start, end) for _, start, end in ended] == ENDS
