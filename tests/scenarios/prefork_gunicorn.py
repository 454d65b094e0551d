"""The shop as a WSGI application, and the configuration file of its gunicorn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.scenarios.prefork_shop import manager, open_in_parent, pay_or_die

preload_app = True
workers = 2
worker_class = "sync"


def on_starting(_server: Any) -> None:
    """Begin in the parent process."""
    open_in_parent()


def post_fork(_server: Any, _worker: Any) -> None:
    """Begin in a worker process."""
    manager.open()


def worker_exit(_server: Any, _worker: Any) -> None:
    """End in a worker process."""
    manager.close()


def application(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Pay for the item of the path. Answer with the id of the process."""
    process = pay_or_die(environment["PATH_INFO"].removeprefix("/"), environment["QUERY_STRING"])
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(process).encode()]
