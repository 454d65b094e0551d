"""Apache Maven, pinned and fetched like the jars, for the Maven project ``java/xa``.

python -m tests.support.maven    # build once, so that Maven has its plugins and no test waits for a download
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from bascule.core.errors import Unavailable
from bascule.embedded.jars import JarStore
from bascule.embedded.java import find_jdk
from tests.support.java import SOURCE_DIR
from tests.support.speed import SLOWNESS

#: Longest build, with the download of plugins.
BUILD_TIMEOUT_S = 240.0 * SLOWNESS
#: Characters of the output's end that the message of a failed build contains.
SHOWN_CHARACTERS_MAX = 8_000
XA_PROJECT = SOURCE_DIR / "xa"


class BuildFailed(Unavailable):
    """Raised when Maven ended with an error. The text is the end of its output."""


@dataclass(frozen=True, slots=True)
class Tests:
    """The numbers of a module's tests, by the reports of Surefire."""

    run: int
    skipped: int


def build(output: Path, goal: str, **properties: str) -> dict[str, Tests]:
    """Run a goal of the project with all its files below ``output``, and return the tests of each module. Raises BuildFailed."""
    java = find_jdk()
    maven = JarStore().unpacked("maven") / "bin" / "mvn"
    command = [str(maven), "-B", "-q", f"-Doutput={output}", goal, *(f"-D{name}={value}" for name, value in properties.items())]
    log_file = output / "maven.log"
    output.mkdir(parents=True, exist_ok=True)
    with log_file.open("w") as log:
        done = subprocess.run(
            command, cwd=XA_PROJECT, env={**os.environ, "JAVA_HOME": str(java.home)}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, check=False, timeout=BUILD_TIMEOUT_S,
        )  # fmt: skip
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)} failed\n{log_file.read_text()[-SHOWN_CHARACTERS_MAX:]}")
    return {each.name: _tests_of(each) for each in sorted(output.iterdir()) if each.is_dir()}


def _tests_of(module: Path) -> Tests:
    suites = [ElementTree.parse(file).getroot() for file in (module / "surefire-reports").glob("TEST-*.xml")]
    return Tests(sum(int(each.attrib["tests"]) for each in suites), sum(int(each.attrib["skipped"]) for each in suites))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory), "package")
