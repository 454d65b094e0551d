"""The shop as a Celery application. Files in a directory are its queue of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_process_init, worker_process_shutdown

from tests.scenarios.prefork_shop import SETTINGS, manager, open_in_parent, pay_or_die

FILES = Path(SETTINGS["files"])
for each in ("tasks", "control", "results"):
    (FILES / each).mkdir(parents=True, exist_ok=True)

app = Celery(
    "shop",
    broker="filesystem://",
    backend=(FILES / "results").as_uri(),
    broker_transport_options={
        "data_folder_in": str(FILES / "tasks"),
        "data_folder_out": str(FILES / "tasks"),
        "control_folder": str(FILES / "control"),
        "polling_interval": 0.05,
    },
    worker_prefetch_multiplier=5,  # with 1, Celery fetches new tasks only every 2 s
    worker_lost_wait=0.1,  # seconds; the default is 10, for each killed worker
    broker_connection_retry_on_startup=True,
)


@worker_init.connect  # type: ignore[untyped-decorator]
def _in_parent(**_: Any) -> None:
    open_in_parent()


@worker_process_init.connect  # type: ignore[untyped-decorator]
def _in_child(**_: Any) -> None:
    manager.open()


@worker_process_shutdown.connect  # type: ignore[untyped-decorator]
def _at_end_of_child(**_: Any) -> None:
    manager.close()


@app.task  # type: ignore[untyped-decorator]
def paid(item: str, point: str = "") -> int:
    """Pay for an item. Return the id of the process."""
    return pay_or_die(item, point)
