"""The Java programs of ``java/``: compiled once into the cache, so that a start takes a quarter of a second instead of two."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bascule.core.errors import Unavailable
from bascule.embedded.jars import classpath, default_cache_dir
from bascule.embedded.java import find_jdk

SOURCE_DIR = Path(__file__).parents[3] / "java"
#: The set of ``jars.lock`` with Apache Qpid JMS.
JARS = "qpid-jms"
#: A test peer needs little; the second compiler costs more than it brings in a short life.
SMALL_JVM = ("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


class NotCompiled(Unavailable):
    """A Java program has errors; the text is the compiler's."""


def compiled(program: str) -> Path:
    """The directory with the classes of ``java/PROGRAM.java``; compiles when source or jars have changed. Raises NotCompiled, NoJdk."""
    source = SOURCE_DIR / f"{program}.java"
    jars = os.pathsep.join(map(str, classpath(JARS)))
    classes = default_cache_dir() / "classes" / f"{program}-{hashlib.sha256(source.read_bytes() + jars.encode()).hexdigest()[:16]}"
    if classes.exists():
        return classes
    classes.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=classes.parent))
    javac = find_jdk().home / "bin" / "javac"
    done = subprocess.run([javac, "-cp", jars, "-d", made, source], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(made)
        raise NotCompiled(f"{source} does not compile:\n{done.stderr}")
    try:
        made.rename(classes)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return classes


def java_command(program: str, *arguments: str, jvm: Sequence[str] = SMALL_JVM) -> list[str]:
    """The command line that runs ``java/PROGRAM.java`` with Qpid JMS."""
    path = os.pathsep.join(map(str, [compiled(program), *classpath(JARS)]))
    return [str(find_jdk().executable), *jvm, "-cp", path, program, *arguments]
