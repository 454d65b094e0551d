"""The harnesses of the fuzzer, without the fuzzer: they accept their seeds, and find planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bascule.core.address_index import AddressIndex
from bascule.server.connection import ClientConnection
from tests.fuzz.__main__ import left_behind, replay
from tests.fuzz.harnesses import HARNESSES, Costly, frames, judged, seeds
from tests.support.costs import COST_S_MAX, LEFT_BYTES_MAX
from tests.unit.support.test_stalls import busy


@pytest.mark.parametrize("name", HARNESSES)
def test_harness_finds_no_fault_in_its_seeds_and_their_mutations(name: str) -> None:
    with HARNESSES[name]() as harness:
        for data in seeds(name)[:12]:
            harness.feed(data)
            harness.feed(data[: len(data) // 2] + data[len(data) // 3 :])
            harness.feed(data.replace(b"\xa1", b"\xa3").replace(b"a", b"\xed"))


def test_any_input_is_divided_into_frames() -> None:
    assert list(frames(b"\0\x02ab\0\0\0\xffc")) == [
        b"\0\0\0\x0a\x02\0\0\0ab", b"\0\0\0\x08\x02\0\0\0", b"\0\0\0\x09\x02\0\0\0c"
    ]  # fmt: skip
    assert list(frames(b"\0")) == [b"\0\0\0\x08\x02\0\0\0"]


def planted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Callable[[], object]) -> None:
    """Do something before each call of a method."""
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        fault()
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def test_input_that_is_costly_each_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ClientConnection, "data_received", lambda: busy(2 * COST_S_MAX))
    with pytest.raises(Costly):
        replay("server", seeds("server")[0])


@pytest.mark.interpreted
def test_input_that_is_costly_only_once_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2 * COST_S_MAX])
    planted(monkeypatch, AddressIndex, "matching", lambda: busy(next(times, 0.0)))
    replay("matching", b"a = 1\0a.*")


@pytest.mark.interpreted
def test_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AddressIndex, "matching", lambda *_: [])
    with HARNESSES["matching"]() as harness, pytest.raises(AssertionError):
        judged(harness, b"a = 1\0a.*")


@pytest.mark.interpreted
def test_memory_leaked_by_inputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []
    inputs = seeds("matching")[:8]
    assert left_behind("matching", inputs) == []
    planted(monkeypatch, AddressIndex, "matching", lambda: kept.append(bytes(LEFT_BYTES_MAX // 8)))
    (finding,) = left_behind("matching", inputs)
    assert "bytes of memory leaked by 8 inputs" in finding
