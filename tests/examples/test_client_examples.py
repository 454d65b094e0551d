"""The guide of the Python client and its examples do what the guide shows."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT, Block, blocks, missing
from tests.support.system import System

GUIDE = ROOT / "docs" / "guides" / "python-client.md"
SHOWN_URL = "amqp://127.0.0.1:5672"
pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("client"), prefix="client") as running:
        yield running


def ran(block: Block, names: dict[str, object]) -> str:
    """Return the output of a block."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile("\n" * block.line + block.text, str(GUIDE), "exec"), names)
    return said.getvalue()


def test_code_blocks_of_the_client_guide_print_the_output_shown(system: System) -> None:
    names: dict[str, object] = {}
    said = ""
    assert blocks(GUIDE, "run")
    assert blocks(GUIDE, "shows")
    for block in blocks(GUIDE):
        if block.language == "python" and block.purpose == "run":
            said = ran(Block(block.language, block.purpose, block.text.replace(SHOWN_URL, system.url), block.line), names)
        elif block.purpose == "shows":
            line = missing(block.text, said)
            assert line is None, f"line {block.line}: not shown: {line}\n{said}"


@pytest.mark.parametrize(
    ("example", "shown"),
    [
        ("orders.py", "10 stored\n" + "".join(f"order {n} {{'number': {n}, 'region': 'EU'}}\n" for n in range(1, 10, 2))),
        ("client_transfer.py", "order 0, checked\norder 1, checked\norder 2, checked\n"),
        ("client_requests.py", "{'item': 'apple', 'price': 12.5}\nno price for the moon\n"),
        ("client_asyncio.py", "attic 24.8\ncellar 24.9\n"),
    ],
)
def test_client_example_prints_the_expected_output(system: System, example: str, shown: str) -> None:
    command: list[str | Path] = [sys.executable, ROOT / "examples" / example, system.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", shown)
