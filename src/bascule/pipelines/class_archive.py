"""An archive of Spark's classes for the JVM (class data sharing), which halves the processor time of a driver's start.

``python -m bascule.pipelines.class_archive`` writes the archive, once for an environment and a JDK, by running a small pipeline.
"""

from __future__ import annotations

from bascule.core.extras import require

require("pipelines")

import hashlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark

from bascule.core.errors import Unavailable
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.kafka.admin import Topics
from bascule.pipelines.spec import PipelinesSpec

if TYPE_CHECKING:
    import pyarrow as pa

#: Environment variable with the path of the archive to write. While it is set, the driver's Java options write the archive.
WRITING = "BASCULE_CLASS_ARCHIVE_TO"
#: No message about an archive that does not fit: it only makes the start slower.
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
_TIMEOUT_S = 120.0
_TOPIC = "classes"


def java_options() -> str:
    """Return the options for the JVM of a driver on this machine. Raises NoJdk."""
    if target := os.environ.get(WRITING):
        return f"{_option('ArchiveClassesAtExit', target)} {_QUIET}"
    path = archive_path()
    return f"{_option('SharedArchiveFile', path)} {_QUIET}" if path.is_file() else ""


def _option(name: str, path: str | Path) -> str:
    # Spark splits the line like a shell.
    return shlex.quote(f"-XX:{name}={path}")


def archive_path() -> Path:
    """Return the path of the archive for this environment and this JDK, which may not exist. Raises NoJdk."""
    java = find_jdk()
    package = Path(pyspark.__file__).resolve()  # an environment may be reached through a link
    jars = sorted(path.name for path in package.parent.joinpath("jars").glob("*.jar"))
    key = hashlib.sha256(repr((str(java.home), java.build, str(package), jars, classpath("spark-kafka"))).encode()).hexdigest()[:16]
    return Path(sys.prefix, "share", "bascule", f"spark-{key}.jsa")


def write() -> Path:
    """Write the archive unless it exists, and return its path. Raises the errors of Spark, Kafka and the file system."""
    path = archive_path()
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("spark-*.jsa"):
        old.unlink()
    half = path.with_suffix(f".{os.getpid()}")
    os.environ[WRITING] = str(half)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bascule-") as directory,
            EmbeddedKafka(Path(directory, "kafka"), jvm_options=SHORT_LIVED) as kafka,
        ):
            _run_a_pipeline(kafka.bootstrap, Path(directory, "checkpoint"))
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return path


def _run_a_pipeline(bootstrap: str, checkpoint: Path) -> None:
    """Run a pipeline that loads the classes of a driver. Return after its JVM has ended."""
    from bascule.pipelines.spark import journal_rows, kafka_stream, spark_context, sql_session  # this module imports java_options from here

    pipelines = PipelinesSpec(bridge_id="classes", kafka={"bootstrap.servers": bootstrap})
    Topics(pipelines.kafka).create(_TOPIC, 1, {})
    session = sql_session(spark_context(pipelines))
    records = session.range(10).selectExpr("CAST(id AS STRING) AS value")
    records.write.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("topic", _TOPIC).save()
    frame = journal_rows(kafka_stream(session, pipelines, {(_TOPIC, 0): 0}))
    counted = frame.mapInArrow(_count, "rows long")
    query = counted.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    deadline_s = time.monotonic() + _TIMEOUT_S
    while query.lastProgress is None and time.monotonic() < deadline_s:
        query.awaitTermination(1)
    query.stop()
    gateway = session.sparkContext._gateway
    if gateway is None:
        raise Unavailable("could not write the class archive: the Spark session has no gateway to its JVM")
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_TIMEOUT_S)


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def main() -> int:
    """Write the archive, or print why it cannot be written. Everything works without the archive but starts more slowly."""
    try:
        if not archive_path().is_file():
            sys.stdout.write("preparing Spark for quick starts (half a minute, once)\n")
            sys.stdout.flush()
        write()
    except Exception as error:  # of Spark, its JVM, Kafka, the disk
        sys.stdout.write(f"could not archive Spark's classes, drivers will start more slowly: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
