import hashlib
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bascule.core.errors import InvalidInput
from bascule.embedded import jars
from bascule.embedded.jars import Jar, JarDamaged, JarStore, JarUnavailable

BODY = bytes(range(256)) * 4096


class Repository(ThreadingHTTPServer):
    """A Maven repository that records its requests, and can interrupt or fail the first ones."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.break_off_after: list[int] = []
        self.fail_with: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/maven2/"


class Handler(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        content = self.server.files.get(self.path.removeprefix("/maven2/"))
        if content is None or self.server.fail_with:
            self.send_error(self.server.fail_with.pop() if self.server.fail_with else 404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + self.server.break_off_after.pop() if self.server.break_off_after else len(content)
        self.wfile.write(content[start:end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setattr(jars.time, "sleep", lambda _: None)  # do not wait between attempts
    with Repository() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def store(repository: Repository, tmp_path: Path) -> JarStore:
    return JarStore(tmp_path, repository.url)


def pin(monkeypatch: pytest.MonkeyPatch, repository: Repository, *coordinates: str, content: bytes = BODY) -> list[Jar]:
    pinned = [Jar(each, len(content), hashlib.sha256(content).hexdigest()) for each in coordinates]
    monkeypatch.setattr(jars, "jar_sets", lambda: {"parts": tuple(pinned)})
    repository.files.update({jar.path: content for jar in pinned})
    return pinned


def test_maven_coordinates_give_the_repository_path() -> None:
    assert Jar("org.example:lib:1.0", 0, "").path == "org/example/lib/1.0/lib-1.0.jar"
    assert Jar("org.example:lib:1.0:linux", 0, "").path == "org/example/lib/1.0/lib-1.0-linux.jar"
    assert Jar("org.example:lib:1.0:bin@tar.gz", 0, "").path == "org/example/lib/1.0/lib-1.0-bin.tar.gz"


def test_every_pinned_file_has_size_and_hash() -> None:
    sets = jars.jar_sets()
    assert {"kafka", "spark-kafka", "qpid-jms", "artemis"} <= sets.keys()
    assert all(jar.size_bytes > 0 and len(jar.sha256) == 64 for each in sets.values() for jar in each)


def test_jar_set_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, repository: Repository, store: JarStore) -> None:
    pin(monkeypatch, repository, "org.example:a:1", "org.example:b:2")
    files = store.classpath("parts")
    assert [file.name for file in files] == ["a-1.jar", "b-2.jar"]
    assert all(file.read_bytes() == BODY for file in files)
    assert store.classpath("parts") == files
    assert sorted(repository.asked) == [("/maven2/org/example/a/1/a-1.jar", None), ("/maven2/org/example/b/2/b-2.jar", None)]


def test_interrupted_download_resumes(monkeypatch: pytest.MonkeyPatch, repository: Repository, store: JarStore) -> None:
    pin(monkeypatch, repository, "org.example:a:1")
    repository.break_off_after = [300_000]
    assert store.classpath("parts")[0].read_bytes() == BODY
    assert [wanted for _, wanted in repository.asked] == [None, "bytes=300000-"]


def test_overloaded_repository_is_asked_again(monkeypatch: pytest.MonkeyPatch, repository: Repository, store: JarStore) -> None:
    pin(monkeypatch, repository, "org.example:a:1")
    repository.fail_with = [503, 429]
    assert store.classpath("parts")[0].read_bytes() == BODY
    assert len(repository.asked) == 3


@pytest.mark.parametrize("sent", [BODY[:-1] + b"x", BODY + b"x"], ids=["other bytes", "longer"])
def test_file_that_differs_from_the_pinned_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, repository: Repository, store: JarStore, sent: bytes
) -> None:
    (jar,) = pin(monkeypatch, repository, "org.example:a:1")
    repository.files[jar.path] = sent
    with pytest.raises(JarDamaged, match=r"org\.example:a:1 from http.*is pinned"):
        store.classpath("parts")
    repository.files[jar.path] = BODY
    assert store.classpath("parts")[0].read_bytes() == BODY


def test_missing_jar_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch, repository: Repository, store: JarStore) -> None:
    pin(monkeypatch, repository, "org.example:a:1")
    repository.files.clear()
    with pytest.raises(JarUnavailable, match=r"(?s)org\.example:a:1 .*404.*BASCULE_MAVEN_REPOSITORY"):
        store.classpath("parts")
    assert len(repository.asked) == 1


def test_password_of_the_repository_is_not_shown_in_an_error(
    monkeypatch: pytest.MonkeyPatch, repository: Repository, tmp_path: Path
) -> None:
    pin(monkeypatch, repository, "org.example:a:1")
    store = JarStore(tmp_path, repository.url.replace("//", "//ann:hunter2@"))
    with pytest.raises(JarUnavailable, match=r"org\.example:a:1 could not be fetched from http://\*+@127") as raised:
        store.classpath("parts")
    assert "hunter2" not in str(raised.value)


def test_unknown_jar_set_is_refused_with_the_known_sets(store: JarStore) -> None:
    with pytest.raises(InvalidInput, match="'spark'; known are artemis, artemis-client, atomikos, camel, kafka"):
        store.classpath("spark")


def test_distribution_is_unpacked_once(monkeypatch: pytest.MonkeyPatch, repository: Repository, store: JarStore, tmp_path: Path) -> None:
    (tmp_path / "lib-1").mkdir()
    (tmp_path / "lib-1" / "run").write_text("here")
    with tarfile.open(tmp_path / "made.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "lib-1", "lib-1")
    pin(monkeypatch, repository, "org.example:lib:1:bin@tar.gz", content=(tmp_path / "made.tar.gz").read_bytes())
    home = store.unpacked("parts")
    assert home.name == "lib-1"
    assert (home / "run").read_text() == "here"
    assert store.unpacked("parts") == home
