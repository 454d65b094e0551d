"""The whole product logs in one way: through bascule.core.log, with a constant text as the event."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "bascule"
MODULES = sorted(SOURCE.rglob("*.py"))
#: The set-up itself, Spark's own logger, which is silenced there, and a handler that follows a rotated file.
MAY_USE_LOGGING = {"core/log.py", "pipelines/spark.py", "server/audit.py", "threads/lasting.py"}
#: Notes of protocols are written here; the protocol names the event.
DRIVERS = {"server/effects.py"}
PLAIN = re.compile(r"[A-Za-z][\w.,' -]*")
OTHER_LOGGERS = {"structlog", "loguru", "warnings"}
METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def log_calls(path: Path) -> Iterator[ast.Call]:
    source = path.read_text()
    if "log." not in source:
        return
    for node in ast.walk(ast.parse(source, str(path))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in {"log", "_log"}
        ):
            yield node


def other_loggers(path: Path) -> set[str]:
    """Return the libraries that a module logs with and may not use."""
    source = path.read_text()
    # To parse all modules takes seconds.
    tree = ast.parse(source if any(name in source for name in (*OTHER_LOGGERS, "logging")) else "", str(path))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return imported & (OTHER_LOGGERS if named(path) in MAY_USE_LOGGING else OTHER_LOGGERS | {"logging"})


def test_each_module_logs_only_through_the_logger_of_the_product() -> None:
    assert {named(path): names for path in MODULES if (names := other_loggers(path))} == {}


def odd_events(path: Path) -> list[int]:
    """Return the lines of log calls whose only argument is no constant text in plain words; values belong into fields."""
    odd = []
    for call in log_calls(path):
        event = call.args[0] if len(call.args) == 1 else None
        if named(path) in DRIVERS and isinstance(event, ast.Name):
            continue
        text = event.value if isinstance(event, ast.Constant) else None
        if not (isinstance(text, str) and PLAIN.fullmatch(text)):
            odd.append(call.lineno)
    return odd


def test_event_of_each_log_call_is_in_plain_words_and_its_data_are_fields() -> None:
    assert {named(path): lines for path in MODULES if (lines := odd_events(path))} == {}


def test_search_for_log_calls_finds_calls() -> None:
    assert sum(len(list(log_calls(path))) for path in MODULES) > 50
