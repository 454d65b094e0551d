"""What a reload must not lose: settings whose file is gone, half of the changes, secrets whose files were moved, and an early SIGHUP."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from bascule.config import Configuration
from bascule.core.errors import InvalidInput
from bascule.server.user_directory import EndedLogins, NextUsers
from bascule.threads.hangup import hold_hangups
from tests.unit.server.served import run_async
from tests.unit.server.test_reload import SOON_S, Reloading


@pytest.mark.parametrize("change", ["removed", "emptied", "unreadable"])
@pytest.mark.parametrize("named", [True, False])
def test_file_that_is_gone_or_empty_does_not_reset_the_settings(
    named: bool, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("BASCULE_CONFIG", raising=False)
        broker = Reloading(tmp_path, '[broker]\nmax_queues = 5\nusers = {ann = "hush"}\n', named=named)
        before = broker.node.settings
        if change == "emptied":
            broker.file.write_text(" \n")
        else:
            broker.file.unlink()
            if change == "unreadable":
                broker.file.symlink_to(tmp_path / "bascule.toml")  # a loop; root can read any file
        assert broker.node.reload is not None
        with pytest.raises(InvalidInput, match=r"bascule\.toml: "):
            await broker.node.reload.reload("test")
        assert broker.node.settings is before
        assert broker.node.users.check("ann", "hush")
        broker.file.unlink(missing_ok=True)
        answer = await broker.reload("# the defaults\n[broker]\nallow_anonymous = true\n")
        assert "broker.max_queues" in {each["setting"] for each in answer["applied"]}, "a file with text may set nothing"

    asyncio.run(run())


@run_async
async def test_error_that_nobody_expects_changes_nothing_and_is_audited_as_an_error(tmp_path: Path) -> None:
    broker = Reloading(tmp_path, f'[broker]\nmax_queues = 5\n[audit]\nfile = "{tmp_path}/audit"\n')
    reload, before = broker.node.reload, broker.node.settings
    assert reload is not None

    def fail() -> Configuration:
        raise RuntimeError("a defect")

    reload._load = fail
    await reload._reported()
    broker.node.audit.close()
    assert broker.node.settings is before
    assert "RuntimeError: a defect" in (tmp_path / "audit").read_text()


@run_async
async def test_reload_goes_on_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    broker = Reloading(tmp_path, '[broker]\nmax_queues = 5\nusers = {ann = "hush"}\n')
    reload, directory = broker.node.reload, broker.node.users
    assert reload is not None
    broker.write('[broker]\nmax_queues = 6\nusers = {ann = "loud"}\n')
    adopt, began, may_end = directory.adopt, threading.Event(), threading.Event()

    def slowly(users: NextUsers) -> dict[str, EndedLogins]:
        began.set()
        may_end.wait(SOON_S)
        return adopt(users)

    directory.adopt = slowly  # type: ignore[method-assign]
    asked = asyncio.get_running_loop().create_task(reload.reload("test"))
    await asyncio.to_thread(began.wait, SOON_S)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    may_end.set()
    await asyncio.gather(*reload._tasks)
    assert (directory.check("ann", "loud"), broker.node.settings.broker.max_queues) == (True, 6)


@run_async
async def test_moved_file_of_a_secret_that_needs_a_restart_does_not_hinder_other_settings(tmp_path: Path) -> None:
    text = '[broker]\nmax_queues = {}\n[kafka.client]\n"sasl.password" = "file:{}"\n'
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("hush")
    two.write_text("loud")
    broker = Reloading(tmp_path, text.format(5, one))
    one.unlink()
    for count in (6, 7):
        answer = await broker.reload(text.format(count, two))
        assert [each["setting"] for each in answer["needs_restart"]] == ['kafka.client."sasl.password"']
        settings = broker.node.settings
        assert (settings.broker.max_queues, settings.kafka.client) == (count, {"sasl.password": "hush"})


@run_async
async def test_sighup_before_the_broker_can_reload_is_followed_once_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    broker = Reloading(tmp_path, "[broker]\nmax_queues = 5\n")
    reload, before = broker.node.reload, signal.getsignal(signal.SIGHUP)
    assert reload is not None
    try:
        hold_hangups()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        broker.write("[broker]\nmax_queues = 6\n")
        reload.on_hangup()
        assert len(reload._tasks) == 1
        await asyncio.gather(*reload._tasks)
        assert broker.node.settings.broker.max_queues == 6
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
