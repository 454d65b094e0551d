"""Violations of the transactional writer that the simulation plants: each does the harm that its rule prevents."""

from __future__ import annotations

import pytest

from bascule.writer.reading import ReadingViolation
from bascule.writer.transactional import WriterViolation
from tests.unit.writer.test_writer_protocol import LOST, Kafka, write, writer


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


def test_simulated_violation_without_barrier_uses_stale_position(kafka: Kafka) -> None:
    kafka.seen_by_stale = "old"
    kafka.named_end = 2
    write(writer(kafka, ReadingViolation.NO_BARRIER), ["x"], "old", "b")
    assert kafka.outputs == ["x"]


def test_simulated_violation_reads_only_to_last_stable_offset(kafka: Kafka) -> None:
    write(writer(kafka, ReadingViolation.LAST_STABLE_OFFSET), [], "a", "b")
    assert "stable end" in kafka.calls


def test_simulated_violation_trusts_barrier_at_unknown_offset(kafka: Kafka) -> None:
    kafka.unknown_offsets = 1
    write(writer(kafka, ReadingViolation.UNKNOWN_OFFSET_TRUSTED), [], "a", "b")
    assert "read to 0" in kafka.calls


def test_simulated_violation_reads_position_before_init(kafka: Kafka) -> None:
    write(writer(kafka, WriterViolation.READ_BEFORE_INIT), [], "a", "b")
    assert kafka.calls[:3] == ["end", "read to 5", "init"]


def test_simulated_violation_assumes_epoch_continuity(kafka: Kafka) -> None:
    moving = writer(kafka, WriterViolation.CONTINUITY_ASSUMED)
    write(moving, [], "a", "b")
    kafka.epoch, kafka.position = kafka.epoch + 1, "theirs"
    write(moving, ["x"], "b", "c")
    assert kafka.position == "c"


def test_simulated_violation_skips_position_check_after_commit_in_doubt(kafka: Kafka) -> None:
    kafka.fail["commit"], kafka.after_doubt = [LOST], True
    write(writer(kafka, WriterViolation.NO_LOOK_AFTER_DOUBT), ["x"], "a", "b")
    assert kafka.outputs == ["x", "x"]


def test_simulated_violation_skips_position_comparison(kafka: Kafka) -> None:
    kafka.position = "theirs"
    write(writer(kafka, WriterViolation.NOT_COMPARED), ["x"], "a", "b")
    assert kafka.outputs == ["x"]


def test_simulated_violation_keeps_incarnation_with_unanswered_requests(kafka: Kafka) -> None:
    moving = writer(kafka, WriterViolation.KEPT_UNSETTLED)
    write(moving, [], "a", "b")
    write(moving, [], "b", "c")
    assert kafka.calls.count("init") == 1
