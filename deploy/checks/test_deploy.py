"""Checks of the other files for deployment with the tools of their users: `make check-deploy`."""

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
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from charts import BASCULE, CHART, CONTAINERFILE, DEPLOY, ROOT, TOOLS, container, environment, rendered, run
from image_steps import Execution

#: The stricter the sandbox, the lower the level of `systemd-analyze security`: 100 = none.
EXPOSURE_MAX = 20
#: Seconds that a command may serve.
SERVING_TIMEOUT_S = 400
STOP_TIMEOUT_S = 60


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
