"""A data directory is formatted by a copy of what Kafka's tool has written before, apart from the ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.embedded.cluster import EmbeddedCluster
from bascule.embedded.jars import JarStore
from bascule.embedded.java import Java
from bascule.embedded.kafka import CHECKPOINT, EmbeddedKafka

JAVA = Java(Path("/java"), 17, "17.0.1", frozenset())
RECORDS = b"the versions of Kafka's features"


def written_by_the_tool(kafka: EmbeddedKafka, runs: list[EmbeddedKafka]) -> None:
    """Stand in for Kafka's tool, which takes a JVM."""
    runs.append(kafka)
    kafka._log_dir.mkdir(parents=True)
    (kafka._log_dir / CHECKPOINT).write_bytes(RECORDS)


def formatted(kafka: EmbeddedKafka) -> dict[str, str]:
    kafka.data_dir.mkdir(parents=True)
    kafka._format(JAVA, "a.jar", [])
    assert (kafka._log_dir / CHECKPOINT).read_bytes() == RECORDS
    return dict(line.split("=") for line in (kafka._log_dir / "meta.properties").read_text().splitlines())


def test_second_directory_is_formatted_without_the_tool_and_has_ids_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[EmbeddedKafka] = []
    monkeypatch.setattr(EmbeddedKafka, "_run_format", lambda kafka, *_: written_by_the_tool(kafka, runs))
    jars = JarStore(tmp_path / "jars")
    jars.directory.mkdir(parents=True)
    first = EmbeddedKafka(tmp_path / "first", jars=jars)
    first.data_dir.mkdir()
    first._format(JAVA, "a.jar", [])
    assert runs == [first]
    found = [formatted(EmbeddedKafka(tmp_path / name, jars=jars)) for name in ("second", "third")]
    assert runs == [first]
    assert [each["version"] for each in found] == ["1", "1"]
    assert [each["node.id"] for each in found] == ["1", "1"]
    assert len({each[name] for each in found for name in ("cluster.id", "directory.id")}) == 4
    nodes = [formatted(node) for node in EmbeddedCluster(tmp_path / "cluster", jars=jars).nodes]
    assert [each["node.id"] for each in nodes] == ["1", "2", "3"]
    assert len({each["cluster.id"] for each in nodes}) == 1
    assert len({each["directory.id"] for each in nodes}) == 3


def test_other_jars_or_another_java_have_a_copy_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[EmbeddedKafka] = []
    monkeypatch.setattr(EmbeddedKafka, "_run_format", lambda kafka, *_: written_by_the_tool(kafka, runs))
    jars = JarStore(tmp_path / "jars")
    jars.directory.mkdir(parents=True)
    for number, (java, classpath) in enumerate(
        [(JAVA, "a.jar"), (JAVA, "b.jar"), (Java(Path("/other"), 21, "21.0.1", frozenset()), "a.jar")]
    ):
        EmbeddedKafka(tmp_path / str(number), jars=jars)._format(java, classpath, [])
    assert len(runs) == 3
