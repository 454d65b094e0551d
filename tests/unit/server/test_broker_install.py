"""A broker from its image, or from an installation with the extra ``broker`` alone: no feature needs a package that is not there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hidden_packages import ROOT, environment, locked, required

SOURCE = ROOT / "src"
#: Packages that a broker or the command `bascule` runs.
PACKAGES = ("amqp", "backup", "broker", "cli", "core", "config", "jms", "journal", "kafka", "server", "threads", "timeline", "writer")
#: Parts that are useless without their extra. The error names it.
OTHER_EXTRAS = {"bascule.pipelines.driver": "pipelines", "bascule.tracing.spans": "otel"}
INSTALLS = {"image": locked("requirements-broker.lock"), "extra": required("broker")}
IMPORT = """
import importlib, json, sys
found = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ImportError as error:
        found[name] = getattr(error, "extra", repr(error))
print(json.dumps(found))
"""
TIMEOUT_S = 120


def modules() -> Iterator[str]:
    """Yield the modules of the packages, and those that their functions import when they run."""
    for package in PACKAGES:
        for file in sorted((SOURCE / "bascule" / package).rglob("*.py")):
            yield str(file.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    for each in ast.walk(node):
                        if isinstance(each, ast.ImportFrom) and each.module and each.module.startswith("bascule."):
                            yield each.module


@pytest.mark.parametrize("install", INSTALLS)
def test_broker_and_command_import_only_what_is_installed(install: str, tmp_path: Path) -> None:
    names = sorted({name for name in modules() if not name.endswith(".__main__")})
    assert {"bascule.pipelines.offset_plans", "bascule.timeline.question", "bascule.pipelines.driver"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], input=json.dumps(names), env=environment(tmp_path, INSTALLS[install]),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {name: extra for name, extra in OTHER_EXTRAS.items() if (install, extra) != ("image", "otel")}


@pytest.mark.parametrize("install", INSTALLS)
def test_hidden_packages_are_those_of_spark(install: str, tmp_path: Path) -> None:
    """Otherwise the other test would see nothing."""
    code = IMPORT.replace('getattr(error, "extra", repr(error))', "error.name")
    names = ["confluent_kafka", "starlette", "pyspark", "pyarrow", "psycopg"]
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(names), env=environment(tmp_path, INSTALLS[install]),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert list(json.loads(done.stdout)) == names[2:], done.stderr
