"""Find a Java that can run Kafka and Spark; ``python -m bascule.embedded.java`` prints it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bascule.core.errors import Scope, Unavailable

#: Required by Kafka 4 and Spark 4.2.
OLDEST_VERSION = 17
#: Spark's launcher requires this module, which runtimes reduced by jlink lack.
SPARK_MODULE = "jdk.incubator.vector"
#: A JVM reports its version in 0.1 s; a loaded machine gets plenty of time.
ASK_TIMEOUT_S = 30.0

_HINT = "install a full JDK 17 or 21 (Debian: apt install openjdk-17-jdk-headless) and set JAVA_HOME to it, or put it on PATH"


class NoJdk(Unavailable):
    """No Java, or no suitable one, is installed."""

    retriable = False
    scope = Scope.PROCESS


@dataclass(frozen=True, slots=True)
class Java:
    """A Java installation; ``build`` is all that it reports about itself, and identifies a build."""

    home: Path
    version: int
    build: str
    modules: frozenset[str]

    @property
    def executable(self) -> Path:
        """Return the ``java`` launcher."""
        return self.home / "bin" / "java"


def find_java() -> Java:
    """Return the Java of ``JAVA_HOME``, or the one on ``PATH``, which is enough for Kafka. Raises NoJdk."""
    home = _java_home()
    java = _described(home)
    if java.version < OLDEST_VERSION:
        raise NoJdk(f"{java.executable} is Java {java.version}, but {OLDEST_VERSION} or newer is needed: {_HINT}")
    return java


def find_jdk() -> Java:
    """Return a full JDK, which Spark and single-file Java programs need. Raises NoJdk."""
    java = find_java()
    for module, purpose in ((SPARK_MODULE, "Spark"), ("jdk.compiler", "a Java program in one source file")):
        if module not in java.modules:
            raise NoJdk(f"{java.home} is a reduced Java without the module {module}, which {purpose} needs: {_HINT}")
    return java


def _java_home() -> Path:
    if chosen := os.environ.get("JAVA_HOME"):
        if not os.access(Path(chosen, "bin", "java"), os.X_OK):
            raise NoJdk(f"JAVA_HOME is {chosen}, which has no bin/java: {_HINT}")
        return Path(chosen)
    if (found := shutil.which("java")) is None:
        raise NoJdk(f"no Java found: JAVA_HOME is not set and PATH has no java: {_HINT}")
    home = Path(found).resolve().parent.parent
    if (home / "lib" / "modules").exists():
        return home
    # This is the launcher of a version manager; the real Java knows its directory.
    said = re.search(r"^ *java\.home = (.+)$", _ask(Path(found), "-XshowSettings:properties", "-version"), re.MULTILINE)
    if said is None:
        raise NoJdk(f"{found} does not report its installation directory: {_HINT}")
    return Path(said[1])


def _described(home: Path) -> Java:
    """Return version and modules from the ``release`` file, or from Java itself if the file is missing or incomplete."""
    release = home / "release"
    said = release.read_text() if release.is_file() else ""
    version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', said, re.MULTILINE)
    modules = re.search(r'^MODULES="([^"]*)"', said, re.MULTILINE)
    if version and modules:
        return Java(home, int(version[1]), build=said, modules=frozenset(modules[1].split()))
    java = home / "bin" / "java"
    answer = _ask(java, "-version")
    version = re.search(r'version "(?:1\.)?(\d+)', answer)
    if version is None:
        raise NoJdk(f"{java} does not report its version: {_HINT}")
    listed = re.findall(r"^([\w.]+)@", _ask(java, "--list-modules"), re.MULTILINE)
    return Java(home, int(version[1]), build=answer, modules=frozenset(listed))


def _ask(java: Path, *options: str) -> str:
    try:
        answer = subprocess.run(
            [java, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoJdk(f"{java} cannot be run ({error}): {_HINT}") from error
    return answer.stdout


def main() -> int:
    """Print the JDK on standard output, or report what is missing."""
    try:
        java = find_jdk()
    except NoJdk as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"JDK {java.version} in {java.home}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
