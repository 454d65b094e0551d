"""The Java parts from Maven Central: named sets, pinned by size and SHA-256 in ``jars.lock``, fetched once into a cache.

    python -m bascule.embedded.jars fetch kafka spark-kafka
    python -m bascule.embedded.jars path qpid-jms

Settings: ``BASCULE_MAVEN_REPOSITORY`` is the address of a repository in Maven's layout (a mirror), ``BASCULE_CACHE_DIR`` the cache.
"""

from __future__ import annotations

from bascule.core.extras import require

require("cli")

import argparse
import fcntl
import functools
import hashlib
import http.client
import os
import sys
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bascule.core.errors import BasculeError, InvalidInput, Scope, Unavailable
from bascule.core.masking import mask_url

MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
LOCK_FILE = Path(__file__).with_name("jars.lock")
#: More connections gain nothing at a public repository and look like abuse.
PARALLEL_DOWNLOADS = 8
ATTEMPTS = 4
#: No byte for this time, in seconds: the connection is dead, resume the download.
STALL_TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 17
#: HTTP status codes that another attempt may change.
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

Advance = Callable[[int], None]


class JarUnavailable(Unavailable):
    """A pinned file is not in the cache and could not be fetched."""

    scope = Scope.PROCESS


class JarDamaged(Unavailable):
    """The repository has sent another file than the pinned one."""

    scope = Scope.PROCESS


@dataclass(frozen=True, slots=True)
class Jar:
    """A pinned file: Maven coordinates ``group:artifact:version[:classifier][@extension]``, size and SHA-256."""

    coordinates: str
    size_bytes: int
    sha256: str

    @property
    def path(self) -> str:
        """Return the path in a Maven repository, and in the cache."""
        name, _, extension = self.coordinates.partition("@")
        group, artifact, version, *classifier = name.split(":")
        return f"{group.replace('.', '/')}/{artifact}/{version}/{'-'.join([artifact, version, *classifier])}.{extension or 'jar'}"


@functools.cache
def jar_sets() -> dict[str, tuple[Jar, ...]]:
    """Return every set of ``jars.lock`` by name."""
    content = tomllib.loads(LOCK_FILE.read_text())
    return {
        name: tuple(Jar(coordinates, entry["size"], entry["sha256"]) for coordinates, entry in jars.items())
        for name, jars in content.items()
    }


def default_cache_dir() -> Path:
    """Return ``BASCULE_CACHE_DIR``, or ``bascule`` in the user's cache directory (XDG)."""
    if chosen := os.environ.get("BASCULE_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bascule"


class JarStore:
    """The cache of pinned files in one directory, filled from one repository."""

    def __init__(self, cache_dir: Path | None = None, repository: str | None = None) -> None:
        """Use the given cache directory and repository, by default those of the environment."""
        self.directory = (cache_dir or default_cache_dir()) / "maven"
        self.repository = (repository or os.environ.get("BASCULE_MAVEN_REPOSITORY") or MAVEN_CENTRAL).rstrip("/")

    def classpath(self, set_name: str) -> list[Path]:
        """Return the files of a set; fetch missing files. Raises InvalidInput, JarUnavailable, JarDamaged."""
        jars = self._set(set_name)
        if any(not self._is_here(jar) for jar in jars):
            self.fetch(set_name)
        return [self.directory / jar.path for jar in jars]

    def unpacked(self, set_name: str) -> Path:
        """Return the unpacked directory of a set that is one archive (a distribution)."""
        (archive,) = self.classpath(set_name)
        home = archive.with_name(archive.name.removesuffix(".tar.gz") + ".unpacked")
        with self._locked():
            if not home.exists():
                half = home.with_suffix(".half")
                with tarfile.open(archive) as tar:
                    tar.extractall(half, filter="data")
                half.rename(home)
        (top,) = home.iterdir()
        return top

    def fetch(self, *set_names: str) -> None:
        """Fetch missing files of the sets into the cache; show progress on standard error."""
        for name in set_names:
            jars = self._set(name)
            with self._locked():
                missing = [jar for jar in jars if not self._is_here(jar)]
                if missing:
                    self._download(name, missing)

    def _set(self, name: str) -> tuple[Jar, ...]:
        try:
            return jar_sets()[name]
        except KeyError:
            raise InvalidInput(f"there is no set of jars {name!r}; known are {', '.join(sorted(jar_sets()))}") from None

    def _is_here(self, jar: Jar) -> bool:
        # The hash was checked before the file got its name.
        with suppress(OSError):
            return (self.directory / jar.path).stat().st_size == jar.size_bytes
        return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the cache: one process at a time fills it; the others wait and then find the files."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / ".lock").open("w")
        except OSError as error:
            raise JarUnavailable(f"the cache {self.directory} cannot be written ({error}); set BASCULE_CACHE_DIR") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _download(self, name: str, jars: list[Jar]) -> None:
        total = sum(jar.size_bytes for jar in jars)
        started = time.monotonic()
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task(f"{name} ({len(jars)} files)", total=total)
            with ThreadPoolExecutor(PARALLEL_DOWNLOADS, thread_name_prefix="jar") as pool:
                # The largest first, so that none is left to run alone at the end.
                ordered = sorted(jars, key=lambda jar: jar.size_bytes, reverse=True)
                futures = [pool.submit(self._download_one, jar, lambda size: progress.advance(task, size)) for jar in ordered]
                try:
                    for future in as_completed(futures):
                        future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        elapsed = time.monotonic() - started
        console.print(
            f"{name}: {len(jars)} files, {total / 1e6:.1f} MB from {mask_url(self.repository)} in {elapsed:.1f} s", highlight=False
        )

    def _download_one(self, jar: Jar, advance: Advance) -> None:
        target = self.directory / jar.path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        url = f"{self.repository}/{jar.path}"
        shown = mask_url(url)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with part.open("ab") as file:
                    _receive(url, file, jar.size_bytes, advance)
                break
            except (OSError, http.client.HTTPException) as error:
                hopeless = attempt == ATTEMPTS
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    hopeless |= error.code not in PASSING_STATUS
                if hopeless:
                    raise JarUnavailable(
                        f"{jar.coordinates} could not be fetched from {shown}: {mask_url(str(error))}. Check the network and its proxy, "
                        "or set BASCULE_MAVEN_REPOSITORY to a mirror. Files that were already fetched are kept"
                    ) from error
                advance(-part.stat().st_size)  # the next attempt counts the bytes that it finds
                time.sleep(0.5 * 2**attempt)
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != jar.sha256:
            part.unlink()
            raise JarDamaged(
                f"{jar.coordinates} from {shown} has SHA-256 {found}, but {jar.sha256} is pinned; the wrong or damaged file is not used"
            )
        part.replace(target)


def _receive(url: str, file: BinaryIO, size_bytes: int, advance: Advance) -> None:
    """Append the rest of ``url`` to ``file``, which holds its first bytes. Raises OSError if fewer than ``size_bytes`` arrive."""
    have = file.tell()
    if have > size_bytes:
        file.truncate(0)
        have = 0
    advance(have)
    if have == size_bytes:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=STALL_TIMEOUT_S) as answer:
        if have and answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            file.truncate(0)
            advance(-have)
            have = 0
        # One byte more than expected is enough to see that this is another file.
        while have <= size_bytes and (chunk := answer.read(min(CHUNK_BYTES, size_bytes + 1 - have))):
            file.write(chunk)
            have += len(chunk)
            advance(len(chunk))
    if have < size_bytes:
        raise ConnectionError(f"connection ended after {have} of {size_bytes} bytes")


def classpath(set_name: str) -> list[Path]:
    """Return the files of a set in the default cache; fetch missing files."""
    return JarStore().classpath(set_name)


def main(argv: list[str] | None = None) -> int:
    """Run ``fetch SET...``, or ``path SET``, which prints the class path on standard output."""
    parser = argparse.ArgumentParser(prog="python -m bascule.embedded.jars", description="Fetch pinned jars into the cache.")
    parser.add_argument("action", choices=("fetch", "path"))
    parser.add_argument("sets", nargs="+", metavar="SET", help=", ".join(sorted(jar_sets())))
    arguments = parser.parse_args(argv)
    store = JarStore()
    try:
        if arguments.action == "fetch":
            store.fetch(*arguments.sets)
        else:
            files = [path for name in arguments.sets for path in store.classpath(name)]
            sys.stdout.write(os.pathsep.join(map(str, files)) + "\n")
    except BasculeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
