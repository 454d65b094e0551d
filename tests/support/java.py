"""The Java programs of ``java/``, compiled once into the cache, so that a start takes a quarter of a second instead of two."""

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

SOURCE_DIR = Path(__file__).parents[2] / "java"
#: The set of ``jars.lock`` with Apache Qpid JMS.
JARS = "qpid-jms"
#: The same client for JMS 2.0. Only the package name of its interfaces differs.
JAVAX_JARS = "qpid-jms-javax"
#: A test peer needs little memory, and the second compiler does not pay off in a short life.
SMALL_JVM = ("-Xms64m", "-Xmx1536m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


class NotCompiled(Unavailable):
    """Raised when a Java program has errors. The text is that of the compiler."""


def sources_of(program: str) -> list[Path]:
    """Return ``java/PROGRAM.java``, or all files of the directory ``java/program``."""
    alone = SOURCE_DIR / f"{program}.java"
    return [alone] if alone.exists() else sorted((SOURCE_DIR / program.lower()).glob("*.java"))


def compiled(program: str, jars: str = JARS) -> Path:
    """Return the directory with a program's classes; compile if sources or jars have changed. Raises NotCompiled, NoJdk."""
    return compiled_sources(program, sources_of(program), jars)


def compiled_sources(name: str, sources: Sequence[Path], *jars: str) -> Path:
    """Return the directory with the classes of some sources, cached under ``name``. Raises NotCompiled, NoJdk."""
    path = _joined(*(file for each in jars for file in classpath(each)))
    package = "javax.jms" if JAVAX_JARS in jars else "jakarta.jms"
    texts = {source.name: source.read_text().replace("jakarta.jms", package) for source in sources}
    digest = hashlib.sha256(repr((path, texts)).encode()).hexdigest()
    classes = default_cache_dir() / "classes" / f"{name}-{digest[:16]}"
    if classes.exists():
        return classes
    classes.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=classes.parent))
    try:
        _compile(path, texts, made)
    except BaseException:
        shutil.rmtree(made)
        raise
    try:
        made.rename(classes)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return classes


def _compile(path: str, texts: dict[str, str], into: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, text in texts.items():
            Path(directory, name).write_text(text)
        javac = find_jdk().home / "bin" / "javac"
        done = subprocess.run([javac, "-cp", path, "-d", into, *texts], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotCompiled(f"{', '.join(texts)}: not compiled\n{done.stderr}")


def java_command(program: str, *arguments: str, jvm: Sequence[str] = SMALL_JVM, jars: str = JARS) -> list[str]:
    """Return the command line that runs a program of ``java/`` with Qpid JMS."""
    return [str(find_jdk().executable), *jvm, "-cp", _joined(compiled(program, jars), *classpath(jars)), program, *arguments]


def _joined(*files: Path) -> str:
    return os.pathsep.join(map(str, files))
