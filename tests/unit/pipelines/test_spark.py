"""The settings of the Spark session, and the options of its Kafka source."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import INPUT_CONVERTER
from pyspark import SparkContext

from bascule.core.errors import InvalidInput
from bascule.pipelines import spark
from bascule.pipelines.spark import kafka_options, kafka_range, kafka_stream, session_settings
from bascule.pipelines.spec import DivertSpec, PipelinesSpec

JARS = ("/jars/a.jar", "/jars/b.jar")


def test_local_session_listens_on_loopback_and_has_kafka_client_on_class_path() -> None:
    settings = session_settings(PipelinesSpec("b", {}, master="local[2]"), JARS, "")
    assert settings["spark.driver.extraClassPath"] == "/jars/a.jar:/jars/b.jar"
    assert settings["spark.driver.host"] == settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert "spark.jars" not in settings
    assert settings["spark.default.parallelism"] == "2"
    assert settings["spark.task.maxFailures"] == "1"
    assert settings["spark.sql.streaming.noDataMicroBatches.enabled"] == "false"


@pytest.mark.parametrize(("master", "needed"), [("local[2]", "true"), ("local", "true"), ("local-cluster[1,1,1024]", None), ("yarn", None)])
def test_other_users_of_the_machine_cannot_connect_to_a_local_spark(master: str, needed: str | None) -> None:
    assert session_settings(PipelinesSpec("b", {}, master=master), JARS, "").get("spark.authenticate") == needed
    own = PipelinesSpec("b", {}, master=master, spark={"spark.authenticate": "false"})
    assert session_settings(own, JARS, "")["spark.authenticate"] == "false"


def test_cluster_session_ships_kafka_client_to_workers() -> None:
    settings = session_settings(PipelinesSpec("b", {}, master="spark://host:7077"), JARS, "")
    assert settings["spark.jars"] == "/jars/a.jar,/jars/b.jar"
    assert not settings.keys() & {
        "spark.driver.host",
        "spark.driver.bindAddress",
        "spark.driver.extraClassPath",
        "spark.default.parallelism",
    }


def test_user_spark_settings_take_precedence_and_jvm_options_are_appended() -> None:
    options = "spark.driver.extraJavaOptions"
    transforming = (DivertSpec("d", source="q", target="t", select=("value",)),)
    assert session_settings(PipelinesSpec("b", {}, transforming), JARS, "-Xshare")[options] == "-Xshare"
    assert session_settings(PipelinesSpec("b", {}, transforming), JARS, "")[options] == ""
    pipelines = PipelinesSpec("b", {}, spark={"spark.driver.memory": "4g", options: "-Dmine"})
    settings = session_settings(pipelines, JARS, "-Xshare")
    assert (settings["spark.driver.memory"], settings[options]) == ("4g", "-Xshare -XX:TieredStopAtLevel=1 -Dmine")


def test_command_line_of_the_jvm_has_its_options_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(SparkContext, "_ensure_initialized", lambda conf: given.update(conf.getAll()))
    own = {"spark.driver.extraJavaOptions": "-Dmine", "spark.driver.defaultJavaOptions": "-Dother", "spark.driver.memory": "4g"}
    secrets = dict.fromkeys(("spark.hadoop.fs.s3a.secret.key", "spark.executorEnv.JAVA_TOOL_OPTIONS", "spark.ssl.keyPassword"), "hush")
    settings = session_settings(PipelinesSpec("b", {}, spark=own | secrets), JARS, "-Xshare")
    spark._start_jvm(settings)
    assert given["spark.driver.extraJavaOptions"] == "-Xshare -XX:TieredStopAtLevel=1 -Dmine"
    assert given == {name: value for name, value in settings.items() if name not in secrets}


def test_jvm_optimizes_its_code_only_for_transformations() -> None:
    def quick(*diverts: DivertSpec) -> bool:
        return "TieredStopAtLevel" in session_settings(PipelinesSpec("b", {}, diverts), JARS, "")["spark.driver.extraJavaOptions"]

    plain, transforming = (DivertSpec(name, source="q", target="t", select=select) for name, select in (("p", ()), ("t", ("value",))))
    assert quick(plain)
    assert not quick(plain, transforming)
    assert quick(plain, replace(transforming, enabled=False))


def test_kafka_settings_are_translated_to_java_client_names() -> None:
    options = kafka_options(
        {"bootstrap.servers": "k:1", "enable.ssl.certificate.verification": True, "session.timeout.ms": 7, "broker.address.family": "v4",
         "debug": "all", "ssl.key.password": "p"}
    )  # fmt: skip
    assert options == {
        "kafka.bootstrap.servers": "k:1",
        "kafka.enable.ssl.certificate.verification": "true",
        "kafka.session.timeout.ms": "7",
        "kafka.ssl.key.password": "p",
        "kafka.fetch.max.wait.ms": "20",
    }


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ({}, "plain.PlainLoginModule"),
        ({"sasl.mechanisms": "PLAIN"}, "plain.PlainLoginModule"),
        ({"sasl.mechanism": "SCRAM-SHA-256"}, "scram.ScramLoginModule"),
        ({"sasl.mechanisms": "SCRAM-SHA-512"}, "scram.ScramLoginModule"),
    ],
)
def test_sasl_login_is_translated_to_jaas_config(mechanism: dict[str, str], module: str) -> None:
    options = kafka_options({**mechanism, "sasl.username": 'a"b', "sasl.password": "c;d"})
    assert options["kafka.sasl.jaas.config"] == (f'org.apache.kafka.common.security.{module} required username="a\\"b" password="c;d";')
    assert not {"kafka.sasl.username", "kafka.sasl.password"} & options.keys()
    assert [value for name, value in options.items() if name == "kafka.sasl.mechanism"] == list(mechanism.values())


def test_login_by_a_token_of_a_provider_is_translated_to_jaas_config() -> None:
    options = kafka_options({
        "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.id": "bridge",
        "sasl.oauthbearer.client.secret": 's"x', "sasl.oauthbearer.scope": "kafka", "sasl.oauthbearer.extensions": "a=1,b=2",
        "sasl.oauthbearer.token.endpoint.url": "https://provider/token",
    })  # fmt: skip
    del options["kafka.fetch.max.wait.ms"]
    assert options == {
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.oauthbearer.token.endpoint.url": "https://provider/token",
        "kafka.sasl.login.callback.handler.class": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
        ' clientId="bridge" clientSecret="s\\"x" scope="kafka" extension_a="1" extension_b="2";',
    }


def test_certificates_are_translated_to_pem_stores(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).write_text(f"the {name}")
    tls = {"ssl.ca.location": "/ca.pem", "ssl.certificate.location": str(tmp_path / "cert"), "ssl.key.location": str(tmp_path / "key")}
    options = kafka_options(tls)
    del options["kafka.fetch.max.wait.ms"]
    assert options == {
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": "/ca.pem",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": "the cert",
        "kafka.ssl.keystore.key": "the key",
    }
    del tls["ssl.key.location"]
    with pytest.raises(InvalidInput, match=r"ssl\.certificate\.location is set without ssl\.key\.location"):
        kafka_options(tls)


class Reader:
    """A reader of Spark that records the options of a source."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    read = readStream = property(lambda self: self)  # noqa: N815 - Spark's names

    def format(self, name: str) -> Reader:
        assert name == "kafka"
        return self

    def options(self, **options: str) -> Reader:
        self.given |= options
        return self

    def option(self, name: str, value: Any) -> Reader:
        self.given[name] = value
        return self

    def load(self) -> dict[str, Any]:
        return self.given


def test_kafka_stream_starts_at_positions_and_fails_on_data_loss() -> None:
    session: Any = Reader()
    pipelines = PipelinesSpec("b", {"bootstrap.servers": "k:1"}, max_offsets_per_trigger=9)
    told: Any = kafka_stream(session, pipelines, {("a", 0): 5, ("b", 1): 0, ("a", 2): 7})
    assert json.loads(told.pop("assign")) == {"a": [0, 2], "b": [1]}
    assert json.loads(told.pop("startingOffsets")) == {"a": {"0": 5, "2": 7}, "b": {"1": 0}}
    assert told == {
        "kafka.bootstrap.servers": "k:1",
        "kafka.fetch.max.wait.ms": "20",
        "failOnDataLoss": "true",
        "maxOffsetsPerTrigger": 9,
    }


def test_kafka_range_is_bounded_on_both_sides() -> None:
    session: Any = Reader()
    given: Any = kafka_range(session, PipelinesSpec("b", {}), "journal", 3, 5, 9)
    assert json.loads(given["assign"]) == {"journal": [3]}
    assert json.loads(given["startingOffsets"]) == {"journal": {"3": 5}}
    assert json.loads(given["endingOffsets"]) == {"journal": {"3": 9}}
    assert given["failOnDataLoss"] == "true"


def test_driver_without_transformations_imports_neither_arrow_nor_pandas_when_it_calls_spark() -> None:
    code = """
import sys
from py4j.protocol import INPUT_CONVERTER
import bascule.pipelines.driver
from bascule.pipelines.spark import _convert_no_numpy
_convert_no_numpy()
assert INPUT_CONVERTER
assert not any(each.can_convert(argument) for each in INPUT_CONVERTER for argument in ("text", 1, b""))
print({"numpy", "pandas", "pyarrow"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_session_for_transformations_converts_values_of_numpy_also_after_a_driver_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    converters = list(INPUT_CONVERTER)
    monkeypatch.setattr(spark, "INPUT_CONVERTER", converters)
    spark._convert_no_numpy()
    assert not any(each in converters for each in spark._NUMPY_CONVERTERS)
    for _ in range(2):
        spark._convert_numpy()
        assert [converters.count(each) for each in spark._NUMPY_CONVERTERS] == [1, 1]
