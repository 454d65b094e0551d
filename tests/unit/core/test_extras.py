"""The package works without dependencies, and its error names the missing extra."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.core.extras import MODULES, MissingExtra, require
from tests.support.hidden_packages import locked

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
_MODULE = re.compile(r"^\| `(bascule[\w.]*)` \| `([\w,-]+)` \| (.+) \|$", re.MULTILINE)
#: Public modules that need an extra, with the extra and their public names, from the page of the public API.
NEED_EXTRA = [
    (module, extra, re.findall(r"`(\w+)`", names))
    for module, extra, names in _MODULE.findall((ROOT / "docs" / "reference" / "api.md").read_text())
]
NEED_NOTHING = (
    "bascule.client", "bascule.xa", "bascule.xa.aio", "bascule.xa.jms", "bascule.xa.local_database",
    "bascule.testing.broker", "bascule.testing.xa", "bascule.embedded.postgres",
)  # fmt: skip
TIMEOUT_S = 60


def without_packages(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has only the product and the standard library."""
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); "
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + code, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_client_and_transactions_need_no_other_package() -> None:
    done = without_packages(
        f"import {', '.join(NEED_NOTHING)}\nfrom bascule import *\nprint(connect.__name__, TransactionManager.__name__)"
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "connect TransactionManager\n")


def test_import_of_bascule_loads_no_submodule() -> None:
    done = without_packages("import bascule; print(sorted(each for each in sys.modules if each.startswith('bascule')))")
    assert (done.stdout, done.stderr) == ("['bascule']\n", "")


def test_unknown_attribute_of_bascule_raises_attribute_error() -> None:
    done = without_packages("import bascule; print(hasattr(bascule, 'Nonsense'), 'ConnectionFactory' in dir(bascule))")
    assert (done.stdout, done.stderr) == ("False True\n", "")


def test_each_public_module_names_its_missing_extra() -> None:
    done = without_packages(
        """
import importlib, json
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        found[name] = [type(error).__name__, error.name, str(error)]
print(json.dumps(found))
""",
        *(module for module, _, _ in NEED_EXTRA),
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert {kind for kind, _, _ in found.values()} == {"MissingExtra"}
    hints = {module: re.findall(r"pip install 'bascule\[(.+)\]'", text) for module, (_, _, text) in found.items()}
    assert hints == {module: [extra.split(",")[0]] for module, extra, _ in NEED_EXTRA}
    assert all(name in MODULES[extra] for _, name, text in found.values() for extra in re.findall(r"\[(.+)\]", text))


def test_directory_of_bascule_has_the_public_names_only() -> None:
    done = without_packages("import bascule, bascule.xa.jms; print(set(dir(bascule)) == set(bascule.__all__))")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_version_is_printed_without_any_extra() -> None:
    done = without_packages("from bascule.__main__ import main; sys.argv[0] = 'bascule'; main()", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"bascule {PROJECT['version']}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["up"]], ids=" ".join)
def test_command_without_its_extra_names_the_package_to_install(arguments: list[str]) -> None:
    done = without_packages("from bascule.__main__ import main; sys.argv[0] = 'bascule'; main()", *arguments)
    assert (done.returncode, done.stdout) == (Unavailable.exit_code, "")
    assert done.stderr == (
        "error: modules defusedxml, pydantic_settings, rich, typer are not installed; install the extra 'cli': pip install 'bascule[cli]', "
        "or, to run a broker on this machine: pip install 'bascule[all]'\n"
    )


@pytest.mark.parametrize(
    ("module", "arguments", "hints"),
    [
        ("uvloop", ["up"], "module uvloop is not installed; install the extra 'broker': pip install 'bascule[broker]'"),
        ("uvloop", ["broker"], "module uvloop is not installed; install the extra 'broker': pip install 'bascule[broker]'"),
        (
            "pyspark",
            ["up"],
            "module pyspark is not installed; install the extra 'pipelines': pip install 'bascule[pipelines]', "
            "or start without pipelines: bascule up --no-pipelines",
        ),
        (
            "pyspark",
            ["pipelines"],
            "module pyspark is not installed; install the extra 'pipelines': pip install 'bascule[pipelines]'",
        ),
    ],
    ids=["up", "broker", "up with pipelines", "pipelines"],
)
def test_command_names_the_missing_extra_of_its_part(module: str, arguments: list[str], hints: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); sys.modules[{module!r}] = None\n"
    run = "from bascule.__main__ import main; main()"
    kafka = {"BASCULE_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code + run, *arguments],
        cwd=tmp_path, env=kafka, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (Unavailable.exit_code, "", f"error: {hints}\n")
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_an_import_error_with_module_and_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"^module psycopg is not installed; .*'bascule\[postgres\]', or use SQLite$") as caught:
        require("postgres", "or use SQLite")
    assert isinstance(caught.value, ImportError)
    assert (caught.value.name, caught.value.extra, caught.value.retriable) == ("psycopg", "postgres", False)
    require("metrics")  # the extra is installed


def requirements(extra: str) -> set[str]:
    """Return the distributions that an extra installs, including those of the extras that it includes."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        name, extras = re.findall(r"^([\w.-]+)(?:\[([\w,-]+)\])?", requirement)[0]
        if name == "bascule":
            found.update(*(requirements(each) for each in extras.split(",")))
        else:
            found.add(name)
    return found


@pytest.mark.parametrize("extra", MODULES)
def test_modules_of_an_extra_match_its_requirements(extra: str) -> None:
    homes = packages_distributions()
    found = {_home_of_part(module) if "." in module else homes[module][0] for module in MODULES[extra]}
    assert {name.lower().replace("_", "-") for name in found} == requirements(extra)


def _home_of_part(module: str) -> str:
    """Return the distribution with a module of a package that several distributions share."""
    folder = module.replace(".", "/") + "/"
    return next(each.name for each in distributions() if any(str(file).startswith(folder) for file in each.files or ()))


def test_package_has_no_dependencies_and_extra_all_has_every_requirement() -> None:
    assert PROJECT["dependencies"] == []
    assert requirements("all") == {each for extra in EXTRAS.keys() - {"demo", "embedded-postgres"} for each in requirements(extra)}
    assert EXTRAS.keys() - {"all", "demo"} == MODULES.keys()


def test_lower_bound_of_each_requirement_is_the_locked_version() -> None:
    """Then the whole suite runs with the lowest minor version that a range allows."""
    locked = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)[::-1])
    low = dict(re.findall(r"([\w-]+)(?:\[\w+\])?[>=]=(\d+(?:\.\d+)?)", "\n".join(each for extra in EXTRAS.values() for each in extra)))
    assert {name: locked[name] for name, version in low.items() if not f"{locked[name]}.".startswith(f"{version}.")} == {}
    assert "confluent-kafka" in low
    assert "pyspark" in low


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("requirements-broker.lock", ("broker", "otel")), ("requirements.lock", ("broker", "pipelines", "otel", "openlineage"))],
)
def test_lock_of_an_image_has_the_requirements_of_its_extras(lock: str, extras: tuple[str, ...]) -> None:
    assert {name for extra in extras for name in requirements(extra)} <= locked(lock)
    options = "".join(f" --extra {each}" for each in extras)
    assert re.search(rf"\$\(UV_COMPILE\){options} .*-o {lock}", (ROOT / "Makefile").read_text()), "the next `make lock` keeps them"
