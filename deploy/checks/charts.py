"""The chart of Kubernetes as helm renders it, and the commands of the checks."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "containers" / "Containerfile"
CHART = DEPLOY / "helm" / "bascule"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
#: The oldest version of Chart.yaml, and the newest that kubernetes-validate knows.
KUBERNETES = ("1.27", "1.37")
BASCULE = ROOT / ".venv" / "bin" / "bascule"
TOOLS = Path(sys.executable).parent


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
