"""The files of a backup: the directory while it is written, and what a restore accepts."""

from __future__ import annotations

import fcntl
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bascule.backup.copies import (
    FILES,
    MANIFEST,
    TOPICS,
    CopiedRecord,
    InvalidBackup,
    JournalCut,
    Manifest,
    RecordFileWriter,
    TopicCopy,
    TopicKind,
    check_files,
    digest_of,
    file_digest,
    record_file,
    records_of,
)  # fmt: skip
from bascule.backup.place import INCOMPLETE, new_backup, restored_backup
from bascule.config.private_file import replace_private
from bascule.core.errors import InvalidInput

CUT = JournalCut(0, 0, 0, "", 0)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def written(directory: Path, *records: CopiedRecord) -> Manifest:
    """Write a backup of one topic."""
    with new_backup(directory):
        with RecordFileWriter(directory, record_file("t", 0)) as file:
            for record in records:
                file.write(record)
            part = file.copied(0, 0, len(records))
        (directory / FILES).mkdir()
        replace_private(directory / FILES / "settings.json", b"{}")
        copies = (TopicCopy("t", TopicKind.PLAIN, "id", {}, (part,)),)
        files = {"settings.json": file_digest(directory / FILES / "settings.json")}
        manifest = Manifest("1", "now", "test", "bascule", 0, CUT, copies, files)
        manifest.store(directory)
    return manifest


@pytest.mark.parametrize("file", ["letter", MANIFEST])
def test_directory_that_is_refused_stays_as_it_was(tmp_path: Path, file: str) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / file).write_text("mine")
    with pytest.raises(InvalidInput, match=r"not empty|has a backup"), new_backup(tmp_path):
        pass
    assert mode(tmp_path) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_files_of_a_backup_are_for_their_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "backup"
    directory.mkdir(0o755)
    old_mask = os.umask(0)
    try:
        with new_backup(directory):
            assert mode(directory / INCOMPLETE) == 0o600
        (directory / "again").mkdir()
        written(directory / "again" / "new")
    finally:
        os.umask(old_mask)
    assert mode(directory) == 0o700
    files = [path for path in (directory / "again" / "new").rglob("*") if path.is_file()]
    assert {mode(path) for path in files} == {0o600}
    assert mode(directory / "again" / "new" / TOPICS) == 0o700


def test_backup_that_another_process_has_just_completed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError), new_backup(tmp_path):
        raise RuntimeError("interrupted")
    lock = fcntl.flock

    def complete_first(file: Any, operation: int) -> None:
        monkeypatch.undo()
        written(tmp_path)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", complete_first)
    with pytest.raises(InvalidInput, match="has a backup"), new_backup(tmp_path):
        pass
    check_files(tmp_path, Manifest.load(tmp_path))
    assert not (tmp_path / INCOMPLETE).exists()


def test_two_processes_do_not_use_the_same_directory(tmp_path: Path) -> None:
    with new_backup(tmp_path), pytest.raises(InvalidInput, match="another process makes a backup"), new_backup(tmp_path):
        pass
    written(tmp_path / "backup")
    with (
        restored_backup(tmp_path / "backup"),
        pytest.raises(InvalidInput, match="another process restores"),
        restored_backup(tmp_path / "backup"),
    ):
        pass


@pytest.mark.parametrize("name", [INCOMPLETE, TOPICS])
def test_symbolic_link_in_an_incomplete_backup_is_not_followed(tmp_path: Path, name: str) -> None:
    directory, outside = tmp_path / "backup", tmp_path / "outside"
    directory.mkdir()
    outside.mkdir()
    (outside / "letter").write_text("mine")
    (directory / INCOMPLETE).touch()
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(outside if name == TOPICS else outside / "letter")
    with pytest.raises(InvalidInput, match="cannot be written"):
        written(directory)
    assert [path.name for path in outside.iterdir()] == ["letter"]
    assert (outside / "letter").read_text() == "mine"


@contextmanager
def no_room_for(size: int) -> Iterator[None]:
    """Let the system refuse files that are larger, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_backup_without_room_is_incomplete_and_can_be_repeated(tmp_path: Path) -> None:
    large = CopiedRecord(0, 0, None, os.urandom(100_000))
    with pytest.raises(InvalidInput, match="cannot be written"), no_room_for(50_000):
        written(tmp_path, large)
    with pytest.raises(InvalidBackup, match="no complete backup"):
        Manifest.load(tmp_path)
    manifest = written(tmp_path, large)
    assert list(records_of(tmp_path, manifest.topics[0].parts[0])) == [large]


def test_records_with_any_key_value_and_headers_are_read_as_they_were(tmp_path: Path) -> None:
    records = (
        CopiedRecord(0, -1, None, None),
        CopiedRecord(1, 5, b"", b"", (("none", None), ("empty", b""), ("none", b"again"))),
        CopiedRecord(2, 6, b"k", b"many headers", (("h", b"v"),) * 70_000),
        CopiedRecord(3, 7, b"k", b"long name", (("n" * 70_000, b"v"),)),
        CopiedRecord(4, 8, b"k", bytes(20 << 20)),
    )
    manifest = written(tmp_path, *records)
    assert tuple(records_of(tmp_path, manifest.topics[0].parts[0])) == records


def test_each_file_is_compared_with_its_digest(tmp_path: Path) -> None:
    manifest = written(tmp_path, CopiedRecord(0, 0, None, b"v"))
    assert Manifest.load(tmp_path) == manifest
    check_files(tmp_path, manifest)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert len(files) == 2
    for file in files:
        content = file.read_bytes()
        for damaged in (content[:-1], content + b"\0"):
            file.write_bytes(damaged)
            with pytest.raises(InvalidBackup, match=rf"{file.name} is damaged"):
                check_files(tmp_path, manifest)
        file.write_bytes(content)


def test_changed_manifest_is_refused(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"ingress_offset": 0', '"ingress_offset": 8'))
    with pytest.raises(InvalidBackup, match="damaged or was changed"):
        Manifest.load(tmp_path)
    (tmp_path / MANIFEST).write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(InvalidBackup, match="Upgrade Bascule"):
        Manifest.load(tmp_path)
    for content in ("", "[]", "7", text[:-20]):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(InvalidBackup, match="cannot be read"):
            Manifest.load(tmp_path)
    (tmp_path / MANIFEST).write_text(text)
    assert Manifest.load(tmp_path) == manifest


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["topics"][0]["parts"][0].update(file="../../letter.gz"),
        lambda content: content["topics"][0].update(name=".."),
        lambda content: content["topics"][0]["parts"][0].update(file=f"{TOPICS}/../t-0.gz", partition=0),
        lambda content: content["files"].update({"../letter": "0"}),
        lambda content: content["topics"][0]["parts"][0].update(records="7"),
    ],
)
def test_manifest_that_names_a_file_outside_of_the_backup_is_refused(tmp_path: Path, change: Any) -> None:
    written(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    change(content)
    del content["sha256"]
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "sha256": digest_of(content)}))
    with pytest.raises(InvalidBackup, match=r"cannot be read|which is not in"):
        Manifest.load(tmp_path)
