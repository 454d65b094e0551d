"""The documentation does what it says: its commands run, its settings load, its excerpts are the files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bascule.config import load
from bascule.embedded.java import find_jdk
from bascule.embedded.process import free_port
from tests.examples.pages import ROOT, Block, blocks, missing, pages
from tests.support.console import Console
from tests.support.speed import SLOWNESS

START = ROOT / "docs" / "start.md"
README = ROOT / "README.md"
#: Time for Kafka, broker and Spark to start on a loaded machine.
READY_TIMEOUT_S = 240.0 * SLOWNESS
RUN_TIMEOUT_S = 180.0 * SLOWNESS
#: Longest time from the start of `bascule up` until the console shows the first message. README has the measured one.
FIRST_MESSAGE_S = 60.0
#: Maximum number of lines: an example is read at a glance.
LINES_MAX = 60
#: The ports in the pages, and the settings that choose others.
PORTS = {"5672": "BASCULE_BROKER__PORT", "9092": "BASCULE_EMBEDDED__PORT", "8672": "BASCULE_ADMIN__PORT"}


class Reader:
    """A user who types what a page says, on a machine where other ports are free."""

    def __init__(self, directory: Path) -> None:
        (directory / "examples").symlink_to(ROOT / "examples")
        self.directory = directory
        self.ports = {said: str(free_port()) for said in PORTS}
        path = os.pathsep.join([str(Path(sys.executable).parent), str(find_jdk().home / "bin"), os.environ["PATH"]])
        self.env = os.environ | {PORTS[said]: port for said, port in self.ports.items()} | {"PATH": path}

    def typed(self, text: str) -> str:
        for said, port in self.ports.items():
            text = text.replace(f":{said}", f":{port}")
        return text

    def run(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.typed(block.text)],
            cwd=self.directory, env=self.env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"line {block.line}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    @contextmanager
    def serving(self, block: Block) -> Iterator[str]:
        """Run a command until Ctrl-C. Return its output up to the ready line."""
        log = self.directory / "serve.log"
        with log.open("w") as output:
            command = ["bash", "-c", f"exec {self.typed(block.text)}"]
            process = subprocess.Popen(command, cwd=self.directory, env=self.env, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while "ready " not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text() + self.logs()
                time.sleep(0.1)
            yield log.read_text()
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()

    def console(self) -> Console:
        """Return the console at the address that the README names."""
        (url,) = re.findall(r"`(http://\S+)/console/`", README.read_text())
        return Console(self.typed(url), self.directory / "bascule-data")

    def logs(self) -> str:
        return "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in self.directory.glob("bascule-data/logs/*.log"))


@pytest.mark.services
@pytest.mark.timeout(600)
def test_commands_of_the_first_steps_print_the_output_shown_and_the_console_shows_the_first_message(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    (serve,) = blocks(START, "serve")
    assert blocks(START, "run")
    assert blocks(START, "shows")
    begun_s = time.monotonic()
    with reader.serving(serve) as output:
        reader.run(first_message())
        reader.console().shows("Messages", '{"flight": 11}', path="messages?queue=flights")
        taken_s = time.monotonic() - begun_s
        sys.stdout.write(f"first message in the console {taken_s:.1f} s after the start of `bascule up`\n")
        assert taken_s < FIRST_MESSAGE_S * SLOWNESS
        for block in blocks(START):
            if block.purpose == "run":
                output = reader.run(without(first_message(), block))
            elif block.purpose == "shows":
                line = missing(reader.typed(block.text), output)
                assert line is None, f"line {block.line}: not shown: {line}\n{output}{reader.logs()}"


def first_message() -> Block:
    """Return the first command that the README lets a user type after `bascule up`; the first steps begin with it, too."""
    first, start = (blocks(page, "run")[0] for page in (README, START))
    (command, *_), begin = first.text.splitlines(keepends=True), start.text
    assert begin.startswith(command)
    assert [block.text for block in blocks(README, "serve")] == [block.text for block in blocks(START, "serve")]
    return replace(first, text=command)


def without(done: Block, block: Block) -> Block:
    """Return a block without the command that is done already."""
    return replace(block, text=block.text.removeprefix(done.text))


def test_commands_of_the_readme_all_occur_in_the_first_steps() -> None:
    known = [line for purpose in ("serve", "run") for block in blocks(START, purpose) for line in block.text.splitlines()]
    readme = blocks(README)
    typed = [line for block in readme if block.purpose in ("serve", "run") for line in block.text.splitlines()]
    assert typed
    assert [line for line in typed if line not in known] == []


def excerpts() -> Mapping[str, tuple[Block, Path]]:
    found = {}
    for page in pages():
        for block in blocks(page):
            if block.purpose.startswith("same as "):
                found[f"{page.relative_to(ROOT)}:{block.line}"] = (block, ROOT / block.purpose.removeprefix("same as "))
    return found


def test_every_example_is_short_and_named_on_a_page() -> None:
    files = [file for file in (ROOT / "examples").iterdir() if file.is_file()]
    text = "".join(page.read_text() for page in pages())
    assert [file.name for file in files if f"examples/{file.name}" not in text or len(file.read_text().splitlines()) > LINES_MAX] == []


@pytest.mark.parametrize(("block", "file"), excerpts().values(), ids=excerpts())
def test_excerpt_equals_its_file(block: Block, file: Path) -> None:
    assert block.text == file.read_text()


def settings() -> Mapping[str, str]:
    shown = {f"{page.relative_to(ROOT)}:{block.line}": block.text for page in pages() for block in blocks(page, "config")}
    return shown | {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "examples").glob("*.toml")}


@pytest.mark.parametrize("text", settings().values(), ids=settings())
def test_settings_shown_on_pages_can_be_loaded(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kafka-password", "kafka-secret", "view-token"):
        (tmp_path / name).write_text("secret\n")
    (tmp_path / "bascule.toml").write_text(text)
    load(tmp_path / "bascule.toml")
