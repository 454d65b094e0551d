"""Imports have one direction, engines have no side effects, and only one package knows the Kafka client."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.statements import statements

SOURCE = Path(__file__).parents[2] / "src" / "bascule"
#: A package imports only from itself and from the packages before it.
ORDER = (
    "core",
    "threads",
    "amqp",
    "jms",
    "journal",
    "config",
    "tracing",
    "broker",
    "writer",
    "kafka",
    "embedded",
    "backup",
    "pipelines",
    "timeline",
    "client",
    "xa",
    "adapter",
    "server",
    "cli",
)
#: Only this package starts threads, so that no thread ends with an error that has no consequence.
THREADS = "threads"
#: Exceptions from the order: a package, and an earlier package that it does not use.
DOES_NOT_USE = {"adapter": {"pipelines"}}
#: What users' tests import may use everything that such a test would use itself.
TESTING_MAY_NOT = ("server", "cli")
#: Bytes and state only: no third-party packages, and no access to the outside.
ENGINES = ("core", "amqp", "jms", "journal", "broker", "writer")
#: Protocols of other packages: they await their effects.
PROTOCOLS = (
    "xa/branches.py",
    "xa/broker_protocol.py",
    "xa/effects.py",
    "xa/errors.py",
    "xa/finishing.py",
    "xa/kafka_protocol.py",
    "xa/kafka_records.py",
    "xa/log.py",
    "xa/log_topic.py",
    "xa/plan.py",
    "xa/recovery_protocol.py",
    "xa/resource.py",
    "xa/transaction_states.py",
    "xa/two_phase.py",
)
IMPURE = frozenset({"asyncio", "concurrent", "multiprocessing", "selectors", "socket", "ssl", "subprocess", "threading", "time"})
TESTS = Path(__file__).parent.parent
MODULES = sorted(SOURCE.rglob("*.py"))
#: A module whose docstring has these words must not reach the clients below, even through another module.
PROMISE = "no Kafka"
CLIENTS = frozenset({"confluent_kafka", "pyspark", "pyarrow", "psycopg", "sqlalchemy", "django", "starlette"})


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return every module that a file imports, anywhere in the file."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = ("bascule", *path.relative_to(SOURCE).parent.parts)
    for node in statements(ast.parse(path.read_bytes(), str(path))):
        yield from _names(node, package)


def _names(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        name = ".".join(filter(None, (base, node.module)))
        # `from bascule.jms import record` names a module in the alias.
        yield from (f"{name}.{alias.name}" if name == "bascule" or _is_module(name, alias.name) else name for alias in node.names)


def _is_module(package: str, name: str) -> bool:
    at = SOURCE.joinpath(*package.split(".")[1:], name)
    return package.startswith("bascule") and (at.with_suffix(".py").is_file() or at.is_dir())


@cache
def imports_at_once(path: Path) -> tuple[str, ...]:
    """Return the same as ``imports``, without imports for the type checker or in functions that are called later."""
    package = ("bascule", *path.relative_to(SOURCE).parent.parts)
    return tuple(name for node in _at_once(ast.parse(path.read_bytes(), str(path))) for name in _names(node, package))


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):  # an expression imports nothing; a lambda is called later
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from (each for other in child.orelse for each in (other, *_at_once(other)))
            continue
        yield child
        yield from _at_once(child)


def promises_no_kafka(path: Path) -> bool:
    return package_of(path) in ENGINES or _has_promise(path)


def _has_promise(path: Path) -> bool:
    source = path.read_text()
    return PROMISE in source and PROMISE in (ast.get_docstring(ast.parse(source)) or "")


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def in_packages(*names: str) -> list[Path]:
    return [path for path in MODULES if package_of(path) in names]


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def later_packages(path: Path) -> set[str]:
    """Return the packages that a module imports and may not import."""
    package = package_of(path)
    if path.parent == SOURCE:
        allowed = {"__main__": set(ORDER), "__init__": {"client", "core", "xa"}}.get(package, set())
    elif package == "testing":
        allowed = {*ORDER, "testing"}.difference(TESTING_MAY_NOT)
    else:
        allowed = set(ORDER[: ORDER.index(package) + 1]) - DOES_NOT_USE.get(package, set())
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("bascule.")}
    return ours - allowed - {"__version__"}


def test_each_module_imports_only_packages_earlier_in_the_layer_order() -> None:
    assert {named(path): packages for path in MODULES if (packages := later_packages(path))} == {}


def outside_imports(path: Path) -> set[str]:
    """Return the libraries of third parties, and those with input and output, that a module imports."""
    roots = {name.split(".")[0] for name in imports(path)}
    return (roots - sys.stdlib_module_names - {"bascule"}) | (roots & IMPURE)


def test_engines_import_no_third_party_library_and_no_io() -> None:
    engines = [*in_packages(*ENGINES), *(SOURCE / each for each in PROTOCOLS)]
    assert {named(path): libraries for path in engines if (libraries := outside_imports(path))} == {}


def _loaded_by(name: str) -> Iterator[Path]:
    """Return the files that an import of a module runs: the module's own, and the ``__init__`` of each package around it."""
    parts = name.split(".")[1:]
    for count in range(len(parts) + 1):
        at = SOURCE.joinpath(*parts[:count])
        yield from filter(Path.is_file, (at / "__init__.py", at.with_suffix(".py")))


def clients_reached(path: Path) -> dict[str, Path]:
    """Yield client libraries that an import of a file loads immediately, each with the file that imports it."""
    reached: dict[str, Path] = {}
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        own = ".".join(("bascule", *at.relative_to(SOURCE).with_suffix("").parts))
        for name in (own, *imports_at_once(at)):
            reached |= dict.fromkeys(CLIENTS & {name.split(".")[0]}, at)
            if name.split(".")[0] == "bascule":
                waiting.extend(_loaded_by(name))
    return reached


def test_modules_that_promise_no_kafka_load_no_kafka_client() -> None:
    promising = [path for path in MODULES if promises_no_kafka(path)]
    assert len(promising) > 100
    assert {named(path): clients for path in promising if (clients := clients_reached(path))} == {}


def test_package_imports_its_public_names_lazily() -> None:
    assert imports_at_once(SOURCE / "__init__.py") == ("typing",)


def test_kafka_client_imported_through_another_module_is_found() -> None:
    assert "confluent_kafka" in clients_reached(SOURCE / "pipelines" / "carry.py")


HOMES = [
    ("confluent_kafka", "kafka"),
    ("pyspark", "pipelines"),
    ("starlette", "server"),
    ("psycopg", "xa"),
    ("sqlalchemy", "xa"),
    ("django", "xa"),
]


@pytest.mark.parametrize(("library", "home"), HOMES)
def test_third_party_library_is_imported_by_one_package_only(library: str, home: str) -> None:
    users = {package_of(path) for path in MODULES if any(name.split(".")[0] == library for name in imports(path))}
    assert users <= {home}


def test_every_package_is_in_the_layer_order() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - {"testing"} <= set(ORDER)


def threads_started(path: Path) -> set[str]:
    """Return the classes of threads that a module calls."""
    source = path.read_text()
    if not any(name in source for name in ("Thread", "Timer")):
        return set()
    calls = [node.func for node in ast.walk(ast.parse(source, str(path))) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else call.id for call in calls if isinstance(call, ast.Attribute | ast.Name)}
    return names & {"Thread", "Timer"}


def test_only_one_package_starts_threads() -> None:
    assert {named(path): names for path in MODULES if package_of(path) != THREADS and (names := threads_started(path))} == {}


@pytest.mark.parametrize("path", in_packages("kafka"), ids=named)
def test_only_one_module_creates_kafka_clients(path: Path) -> None:
    """A test can then replace Kafka for the whole product (tests/support/kafka_in_memory)."""
    assert bool(makes_clients(path)) == (path == SOURCE / "kafka" / "clients.py")


def makes_clients(path: Path) -> set[str]:
    source = path.read_text()
    tree = ast.parse(source if "confluent_kafka" in source else "", str(path))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("confluent_kafka")
        for alias in node.names
    }
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return imported & calls & {"Producer", "Consumer", "AdminClient"}


def test_tests_create_kafka_clients_only_through_the_product() -> None:
    """Otherwise librdkafka prints into the output of a run if the Kafka of a test has ended before its clients."""
    paths = (path for directory in ("scenarios", "soak", "interop", "chaos") for path in TESTS.glob(f"{directory}/*.py"))
    assert {path.name for path in paths if makes_clients(path)} == set()
