"""Pages of the documentation as tests run them. The words after the language of a fenced block say what a test does with it.

```sh serve           a command that keeps running; its output is what it prints until it is ready
```sh run             commands, run in order by bash; the first that fails ends the test
```text shows         lines that the output of the block before contains, in this order; `…` is any text
```toml config        settings that must load
```toml same as FILE  the file, word for word
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w+)(?: +([^\n]*?))? *\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``purpose`` is empty for a block that is only to be read."""

    language: str
    purpose: str
    text: str
    line: int


def blocks(page: Path, purpose: str = "") -> list[Block]:
    """Return the blocks of a page, in order; only those for a purpose if one is given."""
    text = page.read_text()
    found = [Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start()) + 1) for match in _FENCE.finditer(text)]
    return [block for block in found if not purpose or block.purpose == purpose]


def typed(text: str, directory: Path, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    """Run commands of a page in a directory, with the programs of this environment, and return what they print."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=directory, env=os.environ | {"PATH": path} | dict(env or {}),
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pages() -> list[Path]:
    """Return every page written by hand: the top level, everything below docs/, and pages beside programs, except results of benchmarks."""
    beside = (page for folder in ("examples", "demo", "bench") for page in (ROOT / folder).glob("*.md"))
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *beside])


def missing(expected: str, output: str) -> str | None:
    """Return the first expected line that is not in the output, after the lines before it."""
    lines = iter(_plain(line) for line in output.splitlines())
    for wanted in filter(None, map(_plain, expected.splitlines())):
        pattern = ".*".join(map(re.escape, wanted.split("…")))
        if not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def _plain(line: str) -> str:
    return " ".join(line.split())
