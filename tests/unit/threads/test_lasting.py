"""A thread or task never fails silently: its owner gets the error, or the process ends with a log line."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from bascule.threads.background import in_background
from bascule.threads.lasting import EXIT_CODE, lasting_task, lasting_thread
from tests.support.speed import SLOWNESS
from tests.unit.server.served import run_async

WAIT_S = 30.0 * SLOWNESS
FAILING = """
import logging, threading
from bascule.threads.lasting import end_process, lasting_thread
from tests.support.speed import SLOWNESS
logging.basicConfig()
def target():
    {body}
def told(error):
    raise ValueError("owner cannot be told")
lasting_thread(target, "journal-delivery", on_failure={on_failure}).start()
threading.Event().wait({wait_s})
"""


def process(body: str, on_failure: str = "end_process", wait_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    script = FAILING.format(body=body, on_failure=on_failure, wait_s=wait_s)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * WAIT_S, check=False)


@pytest.mark.parametrize("error", ["AssertionError('no offset')", "SystemExit(0)", "KeyboardInterrupt()"])
def test_error_in_lasting_thread_ends_the_process_with_a_log_line(error: str) -> None:
    ended = process(f"raise {error}")
    assert ended.returncode == EXIT_CODE
    assert "thread failed thread=journal-delivery" in ended.stderr
    assert error.removesuffix("()") in ended.stderr


def test_process_ends_when_failure_callback_of_thread_raises() -> None:
    ended = process("raise OSError('gone')", on_failure="told")
    assert ended.returncode == EXIT_CODE
    assert "owner cannot be told" in ended.stderr


def test_process_continues_after_thread_ends_without_error() -> None:
    assert process("pass", wait_s=0.2).returncode == 0


def test_owner_of_failed_thread_receives_its_error(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []

    def target() -> None:
        raise ValueError("bad answer")

    thread = lasting_thread(target, "worker", on_failure=failures.append)
    with caplog.at_level(logging.CRITICAL):
        thread.start()
        thread.join(WAIT_S)
    assert [str(error) for error in failures] == ["bad answer"]
    assert "thread failed thread=worker" in caplog.text


@run_async
async def test_owner_of_failed_task_receives_its_error_while_somebody_refers_to_the_task(caplog: pytest.LogCaptureFixture) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        raise ValueError("bad answer")

    task = lasting_task(work(), "worker", on_failure=failed.set_result)
    assert str(await asyncio.wait_for(failed, WAIT_S)) == "bad answer"
    assert task.get_name() == "worker"
    assert "task failed task=worker" in caplog.text


@run_async
async def test_end_of_cancelled_or_finished_task_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    tasks = [lasting_task(asyncio.sleep(pause_s), "worker", on_failure=failures.append) for pause_s in (0, WAIT_S)]
    await tasks[0]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert (failures, caplog.text) == ([], "")


def test_lasting_thread_is_a_daemon_thread() -> None:
    assert lasting_thread(lambda: None, "worker", on_failure=lambda _: None).daemon


@pytest.mark.parametrize("error", [ValueError("bad answer"), SystemExit(1)])
def test_error_of_background_work_is_set_on_its_future(error: BaseException) -> None:
    def work() -> None:
        raise error

    assert in_background(work, "worker").exception(WAIT_S) is error


def test_background_work_runs_in_a_named_daemon_thread() -> None:
    thread = in_background(threading.current_thread, "asks").result(WAIT_S)
    assert (thread.name, thread.daemon) == ("asks", True)
