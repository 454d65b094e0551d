"""Spark's start beside other work of a driver, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkRuntimeError

from bascule.core.errors import Unavailable
from bascule.pipelines import session
from bascule.pipelines.session import SparkEnded, StartingSpark
from bascule.pipelines.worker_daemon import quick_paths


@pytest.fixture
def jvm() -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of Spark's JVM."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def context_of(process: object) -> Any:
    return SimpleNamespace(_gateway=SimpleNamespace(proc=process))


def test_spark_is_started_once_and_has_no_context_before() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(context_of(None))
        return made[-1]

    spark = StartingSpark(make)
    with pytest.raises(Unavailable, match="no Spark context"):
        spark.context()
    assert not spark.started
    spark.start()
    spark.start()
    assert spark.started
    assert [spark.context(), spark.context()] == [made[0], made[0]]
    assert len(made) == 1


def test_error_of_the_start_is_raised_where_the_context_is_needed() -> None:
    def make() -> Any:
        raise Unavailable("no JDK")

    spark = StartingSpark(make)
    spark.start()
    with pytest.raises(Unavailable, match="no JDK"):
        spark.context()
    spark.check()
    assert not spark.has_ended


def test_end_of_the_jvm_is_noticed(jvm: subprocess.Popen[bytes]) -> None:
    spark = StartingSpark(lambda: context_of(jvm))
    spark.check()
    spark.start()
    spark.context()
    spark.check()
    jvm.kill()
    jvm.wait()
    with pytest.raises(SparkEnded, match="ended with -9"):
        spark.check()
    assert spark.has_ended


def test_failed_start_of_the_jvm_ends_the_driver_and_leaves_nothing_to_stop() -> None:
    def make() -> Any:
        raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})

    spark = StartingSpark(make)
    spark.start()
    with pytest.raises(SparkEnded, match="did not start"):
        spark.context()
    spark.stop()


def test_error_of_a_call_is_the_end_of_the_jvm_only_if_the_jvm_has_ended(
    jvm: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "END_S", 0.01)
    spark = StartingSpark(lambda: context_of(jvm))
    with pytest.raises(Py4JError, match="no answer"), spark.watched():
        raise Py4JError("no answer")
    spark.start()
    spark.context()
    with pytest.raises(Py4JError, match="no answer"), spark.watched():
        raise Py4JError("no answer")
    monkeypatch.undo()
    jvm.kill()
    with pytest.raises(SparkEnded, match="ended with -9"), spark.watched():
        raise Py4JError("no answer")


def test_jvm_that_somebody_else_has_started_is_not_watched() -> None:
    spark = StartingSpark(lambda: SimpleNamespace(_gateway=None))  # type: ignore[arg-type, return-value]
    spark.start()
    spark.context()
    spark.check()


def test_process_that_forks_workers_imports_the_files_of_an_installed_spark_and_no_archive() -> None:
    home = Path(pyspark.__file__).parent
    installed, archives = str(home.parent), [str(home / "python/lib/pyspark.zip"), str(home / "jars/spark-core_2.13-4.2.0.jar")]
    paths = ["/tmp/files", *archives, "/usr/lib/python311.zip", installed]
    assert quick_paths(paths, str(home)) == ["/tmp/files", "/usr/lib/python311.zip", installed]
    # Spark without an installed package, and another Spark than the package.
    assert quick_paths(paths[:-1], str(home)) == paths[:-1]
    assert quick_paths([*paths, "/opt/spark/python/lib/pyspark.zip"], "/opt/spark") == [*paths, "/opt/spark/python/lib/pyspark.zip"]
    assert quick_paths(paths, None) == paths


@pytest.mark.parametrize(("pool", "there"), [("resident", False), ("diverts rows", True)])
def test_process_that_forks_workers_has_arrow_only_for_workers_that_get_rows(pool: str, there: bool) -> None:
    code = "import sys, bascule.pipelines.worker_daemon; print('pyarrow' in sys.modules)"
    in_pool = os.environ | {"BASCULE_PIPELINE": pool}
    done = subprocess.run([sys.executable, "-c", code], env=in_pool, capture_output=True, text=True, check=True)
    assert done.stdout == f"{there}\n"


def test_rows_of_messages_import_nothing_more_in_a_worker() -> None:
    code = """
import sys, bascule.pipelines.worker_daemon
from bascule.pipelines.arrow_rows import ARROW_SCHEMA, arrow_batch
before = set(sys.modules)
batch = arrow_batch([[{} if field.name in ("properties", "headers") else None for field in ARROW_SCHEMA]])
[column.to_pylist() for column in batch]
print(len(set(sys.modules) - before))
"""
    in_pool = os.environ | {"BASCULE_PIPELINE": "diverts rows"}
    done = subprocess.run([sys.executable, "-c", code], env=in_pool, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10


def test_imports_of_the_process_that_forks_workers_start_no_thread_except_that_of_an_allocator() -> None:
    code = """
import bascule.pipelines.worker_daemon
from pathlib import Path
print(sum(file.read_text() != "jemalloc_bg_thd\\n" for file in Path("/proc/self/task").glob("*/comm")))
"""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as Spark sets it
    done = subprocess.run([sys.executable, "-c", code], env=one_thread, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_workers_do_not_collect_the_modules_of_the_process_that_forks_them() -> None:
    code = """
import gc, runpy, pyspark.daemon
pyspark.daemon.manager = lambda: print(gc.get_freeze_count(), gc.get_count()[0] + len(gc.get_objects()))
runpy.run_module("bascule.pipelines.worker_daemon", run_name="__main__")
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    frozen, examined = map(int, said.split())
    assert frozen > 20 * examined


def test_workers_do_not_collect_what_a_partition_has_imported() -> None:
    code = """
import gc, runpy, sys, pyspark.daemon
def partitions():
    imported, examined = [], []
    for number in range(5):
        imported.append([[] for _ in range(10_000)])
        if number != 3:
            sys.modules[f"imported{number}"] = sys
        pyspark.daemon.gc.collect()
        examined.append(len(gc.get_objects()) > 10_000)
    print(examined)
pyspark.daemon.manager = partitions
runpy.run_module("bascule.pipelines.worker_daemon", run_name="__main__")
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "[False, False, False, True, False]\n"
