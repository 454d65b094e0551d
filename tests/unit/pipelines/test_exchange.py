"""The exchange of messages and records between a resident task and waiting tasks, over a real socket."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bascule.core.errors import Unavailable
from bascule.pipelines import exchange
from bascule.pipelines.exchange import SOURCE, AskedMessage, MadeRow, NotTransformed, Transformer, answer, asked_messages, connected
from bascule.pipelines.waiting import Truncated, check_end

MESSAGES = [AskedMessage(7, 0, 1, index, "a", 0, b"body") for index in range(3)]
RECORD: MadeRow = (7, 0, None, True, b"key", b"value", [("name", "text"), ("none", None)])
MANY_BYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "task")


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def answer_too_much(path: str, divert: str, size_bytes: int) -> None:
    """Answer with records beyond the limit. The resident task may close the connection before the end of the answer."""
    with suppress(BrokenPipeError, ConnectionResetError):
        answer(path, divert, "job", iter([(size_bytes, [RECORD])]))


def test_messages_reach_waiting_task_and_its_records_come_back(path: str) -> None:
    seen: list[list[AskedMessage]] = []
    with Transformer(path, ["one"]) as transformer:
        source = in_thread(lambda: seen.append(asked_messages(path, "one", "job")))
        sink = in_thread(lambda: answer(path, "one", "job", iter([(9, [RECORD]), (9, [RECORD])])))
        found = transformer.records({"one": MESSAGES}, MANY_BYTES)
        source.join()
        sink.join()
    assert seen == [MESSAGES]
    assert found == {"one": [RECORD, RECORD]}


def test_caller_works_while_messages_are_transformed(path: str) -> None:
    handed_over, worked = threading.Event(), threading.Event()

    def source() -> None:
        asked_messages(path, "one", "job")
        handed_over.set()

    def parts() -> Iterator[tuple[int, list[MadeRow]]]:
        assert worked.wait(30), "the answer is not awaited before the work"
        yield 9, [RECORD]

    def work() -> None:
        assert handed_over.wait(30), "the messages are handed over before the work"
        worked.set()

    with Transformer(path, ["one"]) as transformer:
        threads = [in_thread(source), in_thread(lambda: answer(path, "one", "job", parts()))]
        while len(transformer._waiting["one"].ends.get("job", {})) < 2:
            transformer._accept(1.0)
        assert transformer.records({"one": MESSAGES}, MANY_BYTES, work) == {"one": [RECORD]}
        for thread in threads:
            thread.join()


def test_divert_is_ready_when_both_ends_of_a_waiting_task_have_connected(path: str) -> None:
    with (
        Transformer(path, ["one", "two"]) as transformer,
        connected(path, SOURCE, "one", "a"),
        connected(path, exchange.SINK, "one", "b"),
    ):
        assert not transformer.ready(["one"], 0.05), "the ends of different tasks"
        with connected(path, exchange.SINK, "one", "a"):
            assert transformer.ready(["one"], 30)
            assert transformer.ready([], 0.0)
            assert not transformer.ready(["one", "two"], 0.05)


def test_caller_works_once_before_it_waits_for_a_task_that_is_not_ready(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LOOK_S", 0.01)
    worked: list[int] = []
    threads: list[threading.Thread] = []

    def work() -> None:
        worked.append(1)
        threads.append(in_thread(lambda: asked_messages(path, "one", "job")))
        threads.append(in_thread(lambda: answer(path, "one", "job", iter(()))))

    with Transformer(path, ["one"]) as transformer:
        assert transformer.records({"one": MESSAGES}, MANY_BYTES, work) == {"one": []}
        for thread in threads:
            thread.join()
    assert worked == [1]


def test_answer_without_its_end_is_not_taken_for_an_answer(path: str) -> None:
    def parts() -> Iterator[tuple[int, list[MadeRow]]]:
        yield 9, [RECORD]
        raise Truncated("the transformation failed")

    def sink() -> None:
        with pytest.raises(Truncated):
            answer(path, "one", "job", parts())

    with Transformer(path, ["one"]) as transformer:
        threads = [in_thread(lambda: asked_messages(path, "one", "job")), in_thread(sink)]
        with pytest.raises(NotTransformed, match="without an answer"):
            transformer.records({"one": MESSAGES}, MANY_BYTES)
        for thread in threads:
            thread.join()


def test_ends_of_different_jobs_are_not_paired(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "READY_S", 0.0)
    with Transformer(path, ["one"]) as transformer:
        ends = [connected(path, exchange.SOURCE, "one", "a"), connected(path, exchange.SINK, "one", "b")]
        with pytest.raises(NotTransformed, match="no waiting task"):
            transformer.records({"one": MESSAGES}, MANY_BYTES)
        for end in ends:
            end.close()


def test_task_that_ended_while_it_waited_is_passed_over(path: str) -> None:
    with Transformer(path, ["one"]) as transformer:
        for role in (exchange.SOURCE, exchange.SINK):
            connected(path, role, "one", "killed").close()
        threads = [in_thread(lambda: asked_messages(path, "one", "next")), in_thread(lambda: answer(path, "one", "next", iter(())))]
        assert transformer.records({"one": MESSAGES}, MANY_BYTES) == {"one": []}
        for thread in threads:
            thread.join()


def test_records_beyond_the_limit_are_refused(path: str) -> None:
    with Transformer(path, ["one"]) as transformer:
        threads = [
            in_thread(lambda: asked_messages(path, "one", "job")),
            in_thread(lambda: answer_too_much(path, "one", MANY_BYTES + 1)),
        ]
        with pytest.raises(NotTransformed, match="more than"):
            transformer.records({"one": MESSAGES}, MANY_BYTES)
        for thread in threads:
            thread.join()


def test_limit_of_records_counts_for_all_diverts_together(path: str) -> None:
    part = MANY_BYTES // 2 + 1
    with Transformer(path, ["one", "two"]) as transformer:
        threads = [in_thread(lambda divert=divert: asked_messages(path, divert, "job")) for divert in ("one", "two")]  # type: ignore[misc]
        threads += [in_thread(lambda divert=divert: answer_too_much(path, divert, part)) for divert in ("one", "two")]  # type: ignore[misc]
        with pytest.raises(NotTransformed, match="divert 'two': the transformation produced more than"):
            transformer.records({"one": MESSAGES, "two": MESSAGES}, MANY_BYTES)
        for thread in threads:
            thread.join()


def test_answer_that_takes_too_long_is_given_up_and_its_late_records_belong_to_no_other_batch(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LOOK_S", 0.01)
    monkeypatch.setattr(exchange, "ANSWER_S", 0.05)
    given_up = threading.Event()

    def late() -> Iterator[tuple[int, list[MadeRow]]]:
        assert given_up.wait(30)
        yield 9, [RECORD]

    def sink() -> None:
        with pytest.raises(ConnectionError):
            answer(path, "one", "slow", late())

    with Transformer(path, ["one"]) as transformer:
        threads = [in_thread(lambda: asked_messages(path, "one", "slow")), in_thread(sink)]
        with pytest.raises(NotTransformed, match="no answer within"):
            transformer.records({"one": MESSAGES}, MANY_BYTES)
        given_up.set()
        for thread in threads:
            thread.join()
        monkeypatch.setattr(exchange, "ANSWER_S", 30.0)
        threads = [in_thread(lambda: asked_messages(path, "one", "next")), in_thread(lambda: answer(path, "one", "next", iter(())))]
        assert transformer.records({"one": MESSAGES}, MANY_BYTES) == {"one": []}
        for thread in threads:
            thread.join()


def test_batch_is_received_in_longer_than_the_interval_of_looks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LOOK_S", 0.05)
    large = [AskedMessage(7, 0, 1, 0, "a", 0, b"x" * (8 << 20))]
    begin = threading.Event()
    seen: list[int] = []

    def source() -> None:
        with connected(path, SOURCE, "one", "job") as connection:
            assert begin.wait(30)
            seen.append(len(exchange.receive(connection)))

    with Transformer(path, ["one"]) as transformer:
        threads = [in_thread(source), in_thread(lambda: answer(path, "one", "job", iter(())))]
        # Longer than LOOK_S: with that as its timeout, the send would fail before the source begins to read.
        timer = threading.Timer(0.3, begin.set)
        timer.start()
        assert transformer.records({"one": large}, MANY_BYTES) == {"one": []}
        for thread in threads:
            thread.join()
    assert seen == [1]


def test_slow_tasks_hold_the_transaction_of_the_caller_for_a_bounded_time_together(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    diverts = ["one", "two", "three", "four"]
    monkeypatch.setattr(exchange, "SENDS_S", 0.2)
    large = [AskedMessage(7, 0, 1, 0, "a", 0, b"x" * (8 << 20))]
    begin = {divert: threading.Event() for divert in diverts}
    taken: list[str] = []

    def source(divert: str) -> None:
        with connected(path, SOURCE, divert, "job") as connection:
            assert begin[divert].wait(30)
            exchange.receive(connection)
            taken.append(divert)

    with Transformer(path, diverts) as transformer:
        threads = [in_thread(lambda divert=divert: source(divert)) for divert in diverts]  # type: ignore[misc]
        threads += [in_thread(lambda divert=divert: answer(path, divert, "job", iter(()))) for divert in diverts]  # type: ignore[misc]
        assert transformer.ready(diverts, 30)
        threading.Timer(0.3, begin["one"].set).start()  # longer than all hand-overs may take
        at_end: list[list[str]] = []

        def meanwhile() -> None:
            at_end.append(list(taken))
            for divert in diverts:
                begin[divert].set()

        assert transformer.records(dict.fromkeys(diverts, large), MANY_BYTES, meanwhile) == {divert: [] for divert in diverts}
        for thread in threads:
            thread.join()
    # The others begin to read only when the caller has ended its transaction.
    assert at_end in ([["one"]], [[]])


def test_end_of_unknown_divert_is_closed_and_affects_no_other(path: str) -> None:
    with Transformer(path, ["one"]) as transformer:
        stranger = connected(path, SOURCE, "other", "job")
        threads = [in_thread(lambda: asked_messages(path, "one", "job")), in_thread(lambda: answer(path, "one", "job", iter(())))]
        assert transformer.records({"one": MESSAGES}, MANY_BYTES) == {"one": []}
        for thread in threads:
            thread.join()
        with stranger, pytest.raises(EOFError):
            exchange.receive(stranger)


def test_socket_that_cannot_be_used_is_reported_as_a_failure_of_the_exchange(tmp_path: Path) -> None:
    with pytest.raises(NotTransformed, match="could not listen for waiting tasks") as raised:
        Transformer(str(tmp_path / ("x" * 200)), ["one"])
    assert raised.value.end == 0, "no record has to be carried in another way"


def test_resident_task_that_waits_ends_with_spark(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LOOK_S", 0.01)

    def ended() -> None:
        raise Unavailable("Spark has ended")

    with Transformer(path, ["one"], ended) as transformer, pytest.raises(Unavailable):
        transformer.records({"one": MESSAGES}, MANY_BYTES)


def test_source_ends_with_the_resident_task(path: str) -> None:
    with Transformer(path, ["one"]):
        end = connected(path, SOURCE, "one", "job")
    with end, pytest.raises((EOFError, ConnectionError)):
        exchange.receive(end)


@pytest.mark.parametrize(("rest", "whole"), [(b"\xff\xff\xff\xfc", True), (b"\xff", True), (b"", False), (b"\0\0\0\1", False)])
def test_rows_of_a_batch_are_complete_only_if_spark_says_so(rest: bytes, whole: bool) -> None:
    stream = io.BufferedReader(io.BytesIO(rest))
    if whole:
        check_end(stream)
        assert stream.read() == rest
    else:
        with pytest.raises(Truncated):
            check_end(stream)


def test_value_in_many_parts_is_received_whole() -> None:
    one, other = socket.socketpair()
    with one, other:
        body = b"x" * (3 << 20)
        thread = in_thread(lambda: exchange.send(one, body))
        assert exchange.receive(other) == body
        thread.join()
