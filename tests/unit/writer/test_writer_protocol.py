"""The transactional writer without IO: failed requests, concurrent writers, and commits in doubt."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.writer.errors import PositionMoved, TransactionFault, TransitionMissing, Unwritable, WriteDenied
from bascule.writer.incarnation import Attempt, Identity, Incarnation, IncarnationEvent, IncarnationState
from bascule.writer.reading import store_barriers
from bascule.writer.transactional import Confirm, Writer

FENCED = TransactionFault("fenced", fenced=True)
LOST = TransactionFault("no answer")


class Done:
    """Work that runs to its end when it is started."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self.error: Exception | None = None
        self.value: Any = None
        try:
            self.value = run_blocking(work)
        except Exception as error:
            self.error = error

    ended = True

    @property
    def ready(self) -> bool:
        return self.error is None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    async def wait(self, timeout_s: float) -> Any:
        del timeout_s
        return self.result()


class Endless(Done):
    """Work that never ends."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        work.close()

    ended = False
    ready = False

    async def wait(self, timeout_s: float) -> Any:
        raise TimeoutError


class Refusal:
    """The error of a refused record."""

    def code(self) -> int:
        return 10

    def str(self) -> str:
        return "too large"


class Kafka:
    """Committed output, and the epochs of one transactional id. ``fail`` has the errors of the next requests of each kind."""

    def __init__(self) -> None:
        self.position: str | None = "a"
        self.outputs: list[str] = []
        self.end = 5
        self.named_end = 5
        self.seen_by_stale: str | None = None
        self.epoch = 0
        self.producer_id = 7
        self.tells_identity = True
        self.settled_clients = False
        self.fail: dict[str, list[Exception | None]] = {}
        self.calls: list[str] = []
        self.pauses_s: list[float] = []
        self.attempts: list[Attempt] = []
        self.time_s = 0.0
        self.make_pending: Callable[[Coroutine[Any, Any, Any]], Done] = Done
        self.after_doubt = False  # whether a failed commit has taken effect
        self.unknown_offsets = 0

    partitions = (3,)

    def called(self, what: str) -> None:
        self.calls.append(what)
        failing = self.fail.get(what, [])
        error = failing.pop(0) if failing else None
        if error is not None:
            raise error

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.time_s += seconds

    def random(self) -> float:
        return 0.5

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.make_pending(work)

    async def init(self, attempt: Attempt) -> dict[str, Any]:
        self.attempts.append(attempt)
        self.called("init")
        self.epoch += 1
        return {"epoch": self.epoch, "outputs": []}

    async def identity(self, producer: dict[str, Any]) -> Identity | None:
        return Identity(self.producer_id, producer["epoch"]) if self.tells_identity else None

    async def settled(self, producer: dict[str, Any], transactions: int) -> bool:
        producer["transactions"] = transactions
        return self.settled_clients

    def discard(self, producer: dict[str, Any]) -> None:
        self.calls.append("discard")

    async def explain(self, reason: str) -> Unavailable:
        return Unavailable(f"no transaction: {reason}")

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        self.called("barrier")
        self.end += 1
        if self.unknown_offsets:
            self.unknown_offsets -= 1
            self.time_s += 1.0
            return dict.fromkeys(partitions)
        return dict.fromkeys(partitions, self.end - 1)

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        self.called("stable end" if stable else "end")
        return {3: self.named_end}

    async def read_to(self, ends: Mapping[int, int]) -> Mapping[str, str]:
        self.called(f"read to {ends[3]}")
        found = self.position if ends[3] >= self.end or self.seen_by_stale is None else self.seen_by_stale
        return {} if found is None else {"key": found}

    async def begin(self, producer: dict[str, Any]) -> None:
        self.called("begin")

    async def hand_over(self, producer: dict[str, Any], outputs: Sequence[str], start: int, *, careful: bool) -> None:
        producer["outputs"] += outputs[start:]
        self.called("hand over")

    async def commit(
        self, producer: dict[str, Any], positions: Mapping[str, str | None], *, careful: bool, confirm: Confirm | None = None
    ) -> None:
        if confirm is not None:
            self.called("confirm")
            await confirm()
        if producer["epoch"] != self.epoch:
            raise FENCED
        try:
            self.called("commit")
        except TransactionFault:
            if self.after_doubt:
                self._commit(producer, positions)
            raise
        self._commit(producer, positions)

    def _commit(self, producer: dict[str, Any], positions: Mapping[str, str | None]) -> None:
        self.position = positions["key"]
        self.outputs += producer["outputs"]
        producer["outputs"] = []
        self.end += 2
        self.named_end = self.end

    async def abort(self, producer: dict[str, Any]) -> None:
        self.called("abort")


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


def writer(kafka: Kafka, *violations: Any, deadline_s: float = 10.0) -> Writer[Any, str, str]:
    return Writer(kafka, "key", deadline_s=deadline_s, violations=violations)


def write(writer: Writer[Any, str, str], outputs: Sequence[str], before: str | None, after: str | None) -> None:
    run_blocking(writer.write(outputs, before, after))


def test_output_and_position_are_written_together(kafka: Kafka) -> None:
    write(writer(kafka), ["x", "y"], "a", "b")
    assert (kafka.position, kafka.outputs) == ("b", ["x", "y"])


def test_transaction_that_is_not_confirmed_is_aborted_and_its_client_is_not_used_again(kafka: Kafka) -> None:
    writing = writer(kafka)

    async def refuse() -> None:
        raise Unavailable("the source has other records")

    with pytest.raises(Unavailable, match="other records"):
        run_blocking(writing.write(["x"], "a", "b", confirm=refuse))
    assert (kafka.position, kafka.outputs) == ("a", [])
    assert kafka.calls[-4:] == ["hand over", "confirm", "abort", "discard"]
    write(writing, ["y"], "a", "b")
    assert (kafka.position, kafka.outputs) == ("b", ["y"])


def test_first_incarnation_reads_position_behind_barrier(kafka: Kafka) -> None:
    kafka.named_end, kafka.seen_by_stale = 2, "old"
    write(writer(kafka), [], "a", "b")
    assert kafka.calls[:3] == ["init", "barrier", "read to 6"]


def test_barrier_at_unknown_offset_is_written_again(kafka: Kafka) -> None:
    kafka.unknown_offsets = 2
    write(writer(kafka), [], "a", "b")
    assert kafka.calls[:5] == ["init", "barrier", "barrier", "barrier", "read to 8"]


def test_barriers_at_unknown_offsets_are_repeated_until_timeout(kafka: Kafka) -> None:
    kafka.unknown_offsets = 100
    with pytest.raises(Unavailable, match=r"did not return the offsets of barrier records in \[3\] within 10 s"):
        run_blocking(store_barriers(kafka, 10.0))
    assert kafka.calls == ["barrier"] * 11


def test_next_incarnation_knows_position_without_reading(kafka: Kafka) -> None:
    moving = writer(kafka)
    write(moving, [], "a", "b")
    kafka.calls.clear()
    write(moving, [], "b", "c")
    assert kafka.calls == ["init", "begin", "hand over", "commit", "discard"]


def test_incarnation_with_each_request_answered_has_the_next_transaction(kafka: Kafka) -> None:
    kafka.settled_clients = True
    moving = writer(kafka)
    write(moving, ["x"], "a", "b")
    kafka.calls.clear()
    moving.prepare()
    run_blocking(moving.ahead(["y"], "b"))
    write(moving, ["y", "z"], "b", "c")
    assert kafka.calls == ["begin", "hand over", "hand over", "commit"]
    assert (kafka.position, kafka.outputs) == ("c", ["x", "y", "z"])


def test_incarnation_is_replaced_after_a_transaction_that_leaves_requests_unanswered(kafka: Kafka) -> None:
    kafka.settled_clients = True
    moving = writer(kafka)
    write(moving, [], "a", "b")
    kafka.settled_clients = False
    write(moving, [], "b", "c")
    kafka.calls.clear()
    write(moving, [], "c", "d")
    assert kafka.calls == ["init", "begin", "hand over", "commit", "discard"]


def test_incarnation_made_for_a_retry_is_not_kept(kafka: Kafka) -> None:
    kafka.settled_clients = True
    kafka.fail["commit"] = [LOST]
    moving = writer(kafka)
    write(moving, ["x"], "a", "b")
    assert kafka.calls[-1] == "discard"
    write(moving, [], "b", "c")
    assert kafka.attempts[-1] == Attempt()


def test_kept_incarnation_that_another_writer_has_fenced_writes_nothing(kafka: Kafka) -> None:
    kafka.settled_clients = True
    moving = writer(kafka)
    write(moving, ["x"], "a", "b")
    kafka.epoch, kafka.position = kafka.epoch + 1, "theirs"
    with pytest.raises(PositionMoved) as moved:
        write(moving, ["y"], "b", "c")
    assert moved.value.found == "theirs"
    assert kafka.outputs == ["x"]


@pytest.mark.parametrize("how", ["another init", "another producer id", "identity not told"])
def test_position_is_read_when_producer_epochs_are_not_consecutive(kafka: Kafka, how: str) -> None:
    moving = writer(kafka)
    write(moving, [], "a", "b")
    kafka.position, kafka.calls = "theirs", []
    if how == "another init":
        kafka.epoch += 1
    elif how == "another producer id":
        kafka.producer_id += 1
    else:
        kafka.tells_identity = False
    with pytest.raises(PositionMoved) as moved:
        write(moving, [], "b", "c")
    assert moved.value.found == "theirs"
    assert "barrier" in kafka.calls


def test_position_is_read_after_commit_in_doubt(kafka: Kafka) -> None:
    moving = writer(kafka)
    write(moving, [], "a", "b")
    kafka.calls.clear()
    kafka.fail["commit"], kafka.after_doubt = [LOST], True
    write(moving, ["x"], "b", "c")
    assert kafka.calls.count("barrier") == 1
    assert kafka.outputs == ["x"]


@pytest.mark.parametrize("took_effect", [False, True])
def test_commit_in_doubt_is_resolved_by_position(kafka: Kafka, took_effect: bool) -> None:
    kafka.fail["commit"], kafka.after_doubt = [LOST], took_effect
    write(writer(kafka), ["x"], "a", "b")
    assert (kafka.position, kafka.outputs) == ("b", ["x"])
    assert kafka.attempts == [Attempt(), Attempt(careful=True, long=True)]
    assert kafka.pauses_s == [0.1]


def test_fenced_writer_retries_after_random_pause_without_position_check(kafka: Kafka) -> None:
    kafka.fail["commit"] = [FENCED]
    write(writer(kafka), ["x"], "a", "b")
    assert kafka.attempts == [Attempt(), Attempt(long=True)]
    assert kafka.pauses_s == [0.05]


def test_position_of_other_writer_is_not_overwritten(kafka: Kafka) -> None:
    kafka.position = "theirs"
    with pytest.raises(PositionMoved):
        write(writer(kafka), ["x"], "a", "b")
    assert kafka.outputs == []


def test_existing_target_position_is_no_success_for_first_attempt(kafka: Kafka) -> None:
    kafka.position = "b"
    with pytest.raises(PositionMoved):
        write(writer(kafka), ["x"], "a", "b")


def test_refused_record_is_named_and_transaction_is_aborted(kafka: Kafka) -> None:
    moving = writer(kafka)
    kafka.fail["commit"] = [LOST, TransactionFault("refused", refused={1: Refusal()})]
    with pytest.raises(Unwritable, match="record 1: too large"):
        write(moving, ["x", "y"], "a", "b")
    assert "abort" in kafka.calls
    write(moving, ["x"], "a", "b")
    assert kafka.attempts[-1] == Attempt()


def test_denied_topic_ends_write_without_retry(kafka: Kafka) -> None:
    kafka.fail["commit"], kafka.fail["abort"] = [TransactionFault("no right", denied=True)], [LOST]
    with pytest.raises(WriteDenied, match="no right"):
        write(writer(kafka), ["x"], "a", "b")
    assert kafka.outputs == []


def test_write_fails_after_deadline(kafka: Kafka) -> None:
    kafka.fail["commit"] = [LOST] * 20
    with pytest.raises(Unavailable, match="did not commit for 1 s: no answer"):
        write(writer(kafka, deadline_s=1.0), ["x"], "a", "b")
    assert kafka.pauses_s == [0.1, 0.2, 0.4]


def test_failed_incarnation_is_retried_until_deadline(kafka: Kafka) -> None:
    kafka.fail["init"] = [LOST, Unavailable("no Kafka"), None]
    write(writer(kafka), [], "a", "b")
    assert kafka.pauses_s == [0.1, 0.2]
    kafka.fail["init"] = [LOST] * 20
    with pytest.raises(Unavailable, match="no transaction: no answer"):
        write(writer(kafka, deadline_s=0.3), [], "b", "c")


def test_missing_incarnation_is_reported_unavailable(kafka: Kafka) -> None:
    kafka.make_pending = Endless
    with pytest.raises(Unavailable, match="no transaction: Kafka does not answer in time"):
        write(writer(kafka), [], "a", "b")


def test_current_position_is_read_behind_barrier_after_init(kafka: Kafka) -> None:
    assert run_blocking(writer(kafka).current()) == "a"
    assert kafka.calls == ["init", "barrier", "read to 6"]


def test_current_position_moved_by_other_writer_is_read_again(kafka: Kafka) -> None:
    moving = writer(kafka)
    moving.prepare()
    kafka.position = "theirs"
    kafka.named_end, kafka.seen_by_stale = 5, "a"
    assert run_blocking(moving.current()) == "theirs"
    assert kafka.calls.count("barrier") == 3


def test_stale_read_from_former_leader_does_not_replace_known_position(kafka: Kafka) -> None:
    moving = writer(kafka)
    write(moving, [], "a", "b")
    kafka.named_end, kafka.seen_by_stale = 5, "a"
    kafka.calls.clear()
    moving.prepare()
    assert run_blocking(moving.current()) == "b"
    assert kafka.calls == ["init", "barrier", "read to 9"]


def test_outputs_produced_in_advance_are_produced_once(kafka: Kafka) -> None:
    moving = writer(kafka)
    moving.prepare()
    run_blocking(moving.ahead(["x"], "a"))
    run_blocking(moving.ahead(["x", "y"], "a"))
    write(moving, ["x", "y", "z"], "a", "b")
    assert kafka.outputs == ["x", "y", "z"]
    assert kafka.calls.count("begin") == 1


def test_nothing_is_produced_in_advance_from_other_position_or_without_incarnation(kafka: Kafka) -> None:
    moving = writer(kafka)
    run_blocking(moving.ahead(["x"], "a"))
    moving.prepare()
    run_blocking(moving.ahead(["x"], "other"))
    assert "begin" not in kafka.calls


def test_failure_of_advance_output_is_retried_in_write(kafka: Kafka) -> None:
    moving = writer(kafka)
    moving.prepare()
    kafka.fail["hand over"] = [LOST]
    run_blocking(moving.ahead(["x"], "a"))
    run_blocking(moving.ahead(["x", "y"], "a"))
    write(moving, ["x", "y"], "a", "b")
    assert kafka.outputs == ["x", "y"]


def test_aborted_advance_output_leaves_position_known(kafka: Kafka) -> None:
    moving = writer(kafka)
    moving.prepare()
    run_blocking(moving.ahead(["x"], "a"))
    run_blocking(moving.abandon())
    kafka.calls.clear()
    write(moving, ["y"], "a", "b")
    assert kafka.outputs == ["y"]
    assert "barrier" not in kafka.calls


def test_failed_abort_makes_position_unknown(kafka: Kafka) -> None:
    moving = writer(kafka)
    moving.prepare()
    run_blocking(moving.ahead(["x"], "a"))
    kafka.fail["abort"] = [LOST]
    run_blocking(moving.abandon())
    kafka.calls.clear()
    write(moving, [], "a", "b")
    assert "barrier" in kafka.calls


def test_closed_writer_discards_its_incarnation(kafka: Kafka) -> None:
    moving = writer(kafka)
    moving.close()
    moving.prepare()
    moving.close()
    assert kafka.calls[-1] == "discard"


def test_undefined_incarnation_transition_is_refused() -> None:
    incarnation: Incarnation[None] = Incarnation(None)
    with pytest.raises(TransitionMissing, match="COMMIT is not allowed in state NEW"):
        incarnation.move(IncarnationEvent.COMMIT)
    assert incarnation.state is IncarnationState.NEW


def test_incarnation_that_failed_with_other_error_is_recreated_by_next_call(kafka: Kafka) -> None:
    writer = Writer(kafka, "key")
    kafka.fail["barrier"] = [ValueError("no position")]
    with pytest.raises(ValueError, match="no position"):
        run_blocking(writer.current())
    assert run_blocking(writer.current()) == "a"
