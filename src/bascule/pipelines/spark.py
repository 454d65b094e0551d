"""The Spark context of a driver, its SQL session, and the streaming frames on Kafka."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyspark
from py4j.protocol import INPUT_CONVERTER
from pyspark import SparkConf, SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import NumpyArrayConverter, NumpyScalarConverter

from bascule.config.fields import is_secret
from bascule.core.errors import InvalidInput
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.journal.records import HEADER_SIZE
from bascule.pipelines.class_archive import java_options
from bascule.pipelines.divert import STATE_KEY
from bascule.pipelines.rows import ARROW_ROWS
from bascule.pipelines.spec import PipelinesSpec

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # The checkpoint decides nothing here. Spark's default manager starts a chmod process for each of its files, four in a batch.
    "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "2",
    # The driver repeats a failed batch from the position. A repeat by Spark could only fail again.
    "spark.task.maxFailures": "1",
    "spark.python.daemon.module": "bascule.pipelines.worker_daemon",
    # A worker whose task was cancelled is ended after this time. Its positions protect it, so it needs no time to end by itself.
    "spark.python.task.killTimeout": "50ms",
}
#: Slots of a local Spark: one for each resident task, and some for batches. A slot without a task costs nothing.
LOCAL_SLOTS = 256
_LOCAL_CORES = re.compile(r"local(?:\[(\*|\d+)\])?")
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
#: They may have secrets, so they are masked where settings are shown. A JVM takes them from its command line only.
_AT_START = (_JAVA_OPTIONS, "spark.driver.defaultJavaOptions")
#: Without micro-batches the JVM does little work, and its second compiler costs half of the processor time of a start.
_QUICK_START = "-XX:TieredStopAtLevel=1"
#: For the JVM that assembles the command line of Spark's JVM, and ends.
_LAUNCHER_OPTIONS = f"{_QUICK_START} -XX:+UseSerialGC"
_LOCAL_SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
#: The ports of Spark accept serialized objects of Java: other users of the machine must not connect to them. Spark makes the secret.
_LOCAL_LOGIN = {"spark.authenticate": "true"}
#: They take values of NumPy only, so it does not matter which other converters are asked before them.
_NUMPY_CONVERTERS = [each for each in INPUT_CONVERTER if isinstance(each, NumpyArrayConverter | NumpyScalarConverter)]
#: A new batch waits for an idle fetch that is in progress. With Kafka's default of 500 ms, each batch would take that long.
_FETCH_WAIT_MS = "20"

#: Names of librdkafka that the Java client does not know. None: part of sasl.jaas.config, or without a counterpart.
_JAVA_NAMES = {
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.username": None,
    "sasl.password": None,
    "sasl.oauthbearer.method": None,
    "sasl.oauthbearer.client.id": None,
    "sasl.oauthbearer.client.secret": None,
    "sasl.oauthbearer.scope": None,
    "sasl.oauthbearer.extensions": None,
    "ssl.ca.location": None,
    "ssl.certificate.location": None,
    "ssl.key.location": None,
    "ssl.key.password": "ssl.key.password",
    "broker.address.family": None,
    "debug": None,
}
#: Options of the login module of the Java client, and the names of librdkafka after ``sasl.oauthbearer.``
_OAUTH_NAMES = {"clientId": "client.id", "clientSecret": "client.secret", "scope": "scope"}
_OAUTH_LOGIN = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"


def spark_context(pipelines: PipelinesSpec) -> SparkContext:
    """Start Spark for one driver, and return its context. If a divert has a transformation, start the SQL session too. Raises NoJdk."""
    os.environ["JAVA_HOME"] = str(find_jdk().home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))  # otherwise Spark's script starts a Python to find it
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", _LAUNCHER_OPTIONS)
    if runs_locally(pipelines):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = session_settings(pipelines, [str(jar) for jar in classpath("spark-kafka")], java_options())
    settings |= {"spark.app.name": f"bascule-{pipelines.bridge_id}", "spark.master": master_url(pipelines)}
    if not _transforms(pipelines):
        _convert_no_numpy()
    _start_jvm(settings)
    context = SparkContext.getOrCreate(SparkConf().setAll(list(settings.items())))
    context.setLogLevel("OFF")
    if _transforms(pipelines):
        sql_session(context)
    return context


def sql_session(context: SparkContext) -> SparkSession:
    """Return the SQL session of a context with the settings of the context.

    Only transformations need it. It takes a quarter of the processor time in which Spark starts.
    """
    _convert_numpy()
    session = SparkSession.builder.getOrCreate()
    _hide_secrets(session, [name for name, _ in context.getConf().getAll()])
    # It logs errors that are raised anyway, with a hundred lines of Java.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    return session


def cloned_session(session: SparkSession) -> SparkSession:
    """Return a session with the settings, functions and views of another one, and with its own names from now on."""
    return SparkSession(session.sparkContext, session._jsparkSession.cloneSession())


def _convert_no_numpy() -> None:
    """Take the converters of NumPy's values from the gateway to the JVM.

    PySpark asks them about each argument of a call. To answer, they import its test tools, and these import pandas and Arrow: a second of
    processor time. Without a transformation, no argument is a value of NumPy.
    """
    INPUT_CONVERTER[:] = [each for each in INPUT_CONVERTER if not isinstance(each, NumpyArrayConverter | NumpyScalarConverter)]


def _convert_numpy() -> None:
    """Give back the converters: the gateway belongs to the process, in which an earlier driver may have had no transformation."""
    INPUT_CONVERTER[:0] = [each for each in _NUMPY_CONVERTERS if each not in INPUT_CONVERTER]


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM of the driver, unless spark-submit has started it. Its command line, which other users can read, has no secrets.

    PySpark puts all settings of a session into the command line of a JVM that it starts. The session passes secrets by its gateway.
    """
    shown = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        if not is_secret(name) or name in _AT_START:
            shown.set(name, value)
    SparkContext._ensure_initialized(conf=shown)


def _hide_secrets(session: SparkSession, settings: Iterable[str]) -> None:
    """Take secrets from the settings of the session, which Spark gives to each task. The context, and so Spark itself, keeps them."""
    conf = session._jsparkSession.sessionState().conf()
    for name in filter(is_secret, settings):
        conf.unsetConf(name)


def session_settings(pipelines: PipelinesSpec, jars: Sequence[str], java: str) -> dict[str, str]:
    """Return the settings of a session with Kafka's client (``jars``) and options of the driver's JVM (``java``). The user's settings win.

    JVM options of the user come after those of Bascule.
    """
    where = (
        _LOCAL_SETTINGS | {"spark.driver.extraClassPath": os.pathsep.join(jars)}
        if runs_locally(pipelines)
        else {"spark.jars": ",".join(jars)}
    )
    local = _local_cores(pipelines)
    if local is not None:
        where |= _LOCAL_LOGIN
        # Without it, Spark would split a small static table of a transformation into as many parts as there are slots.
        where["spark.default.parallelism"] = str(local)
    settings = {**_SETTINGS, **where, **pipelines.spark}
    quick = "" if _transforms(pipelines) else _QUICK_START
    settings[_JAVA_OPTIONS] = " ".join(filter(None, (java, quick, settings.get(_JAVA_OPTIONS))))
    return settings


def _transforms(pipelines: PipelinesSpec) -> bool:
    return any(divert.enabled and divert.transformed for divert in pipelines.diverts)


def cores(context: Callable[[], SparkContext], pipelines: PipelinesSpec) -> int:
    """Return the number of tasks that Spark's cores can run side by side. A local Spark need not be ready."""
    local = _local_cores(pipelines)
    return context().defaultParallelism if local is None else local


def _local_cores(pipelines: PipelinesSpec) -> int | None:
    """Return the number of cores that the master's URL gives a local Spark, or None for another master."""
    local = _LOCAL_CORES.fullmatch(pipelines.master)
    if local is None:
        return None
    named = local[1] or "1"
    return int(named) if named.isdecimal() else os.cpu_count() or 1


def master_url(pipelines: PipelinesSpec) -> str:
    """Return the master's URL. A resident task holds a slot of its own, and mostly waits: a local Spark gets slots for all of them."""
    return f"local[{LOCAL_SLOTS}]" if _local_cores(pipelines) is not None else pipelines.master


def has_local_slots(pipelines: PipelinesSpec) -> bool:
    """Return whether Spark has LOCAL_SLOTS slots. A master such as ``local[2,3]`` or ``local-cluster[1,2,1024]`` names its own number."""
    return _local_cores(pipelines) is not None


def runs_locally(pipelines: PipelinesSpec) -> bool:
    """Return whether Spark runs its tasks on the machine of the driver, without executors."""
    return pipelines.master.startswith("local")


def kafka_options(kafka: Mapping[str, Any]) -> dict[str, str]:
    """Return librdkafka settings as options of Spark's Kafka source. Raises InvalidInput for settings that the Java client cannot use."""
    options = {"kafka.fetch.max.wait.ms": _FETCH_WAIT_MS}
    for name, value in kafka.items():
        java_name = _JAVA_NAMES.get(name, name)
        if java_name is not None:
            options[f"kafka.{java_name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    options |= _login(kafka)
    if "ssl.ca.location" in kafka:
        options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": str(kafka["ssl.ca.location"])}
    if "ssl.certificate.location" in kafka:
        if "ssl.key.location" not in kafka:
            raise InvalidInput("kafka.client: ssl.certificate.location is set without ssl.key.location; set both")
        options |= {
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.certificate.chain": _text(str(kafka["ssl.certificate.location"])),
            "kafka.ssl.keystore.key": _text(str(kafka["ssl.key.location"])),
        }
    return options


def _login(kafka: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a login by SASL."""
    mechanism = str(kafka.get("sasl.mechanisms", kafka.get("sasl.mechanism", "PLAIN")))
    if mechanism == "OAUTHBEARER":
        given = {name: str(kafka[f"sasl.oauthbearer.{key}"]) for name, key in _OAUTH_NAMES.items() if kafka.get(f"sasl.oauthbearer.{key}")}
        pairs = str(kafka.get("sasl.oauthbearer.extensions", ""))
        given |= {f"extension_{name}": value for name, _, value in (each.partition("=") for each in filter(None, pairs.split(",")))}
        return {
            "kafka.sasl.jaas.config": _jaas("oauthbearer.OAuthBearerLoginModule", given),
            "kafka.sasl.login.callback.handler.class": _OAUTH_LOGIN,
        }
    if "sasl.username" not in kafka:
        return {}
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    given = {"username": str(kafka["sasl.username"]), "password": str(kafka.get("sasl.password", ""))}
    return {"kafka.sasl.jaas.config": _jaas(module, given)}


def _jaas(module: str, given: Mapping[str, str]) -> str:
    words = [f"org.apache.kafka.common.security.{module}", "required", *(f"{name}={json.dumps(value)}" for name, value in given.items())]
    return " ".join(words) + ";"


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _offsets(at: Mapping[tuple[str, int], int]) -> str:
    spec: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in at.items():
        spec.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(spec)


def kafka_stream(session: SparkSession, pipelines: PipelinesSpec, start: Mapping[tuple[str, int], int]) -> DataFrame:
    """Return a streaming frame of Kafka records that starts at the given offsets, by topic and partition."""
    assigned: dict[str, list[int]] = {}
    for topic, partition in start:
        assigned.setdefault(topic, []).append(partition)
    return (
        session.readStream.format("kafka")
        .options(**kafka_options(pipelines.kafka))
        .option("assign", json.dumps(assigned))
        .option("startingOffsets", _offsets(start))
        .option("failOnDataLoss", "true")
        .option("maxOffsetsPerTrigger", pipelines.max_offsets_per_trigger)
        .load()
    )


def kafka_range(session: SparkSession, pipelines: PipelinesSpec, topic: str, partition: int, start: int, end: int) -> DataFrame:
    """Return a frame of the records of one partition from ``start`` up to ``end`` (not included)."""
    return (
        session.read.format("kafka")
        .options(**kafka_options(pipelines.kafka))
        .option("assign", json.dumps({topic: [partition]}))
        .option("startingOffsets", _offsets({(topic, partition): start}))
        .option("endingOffsets", _offsets({(topic, partition): end}))
        .option("failOnDataLoss", "true")
        .load()
    )


def journal_rows(frame: DataFrame) -> DataFrame:
    """Select offset, key and value of journal records. Of state records only the header, which the fence needs, is passed to Python."""
    value = sql.when(sql.col("key") == sql.lit(STATE_KEY), sql.substring("value", 1, HEADER_SIZE)).otherwise(sql.col("value"))
    return frame.select("offset", "key", value.alias("value"))
