"""Checks of the chart for Kubernetes with helm and the schemas of its resources: `make check-deploy`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from charts import (
    BASCULE,
    CHART,
    DEPLOY,
    KUBERNETES,
    ROOT,
    TOOLS,
    VALUES,
    container,
    containers,
    environment,
    named,
    of_kind,
    rendered,
    run,
)

#: By group of the resources: the Go module with their definitions, and the path there.
DEFINITIONS = {
    "monitoring.coreos.com": ("github.com/prometheus-operator/prometheus-operator", "example/prometheus-operator-crd"),
    "sparkoperator.k8s.io": ("github.com/kubeflow/spark-operator/v2", "config/crd/bases"),
}


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
