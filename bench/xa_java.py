"""The program `java/xa/load`: transactions of Narayana over JMS and PostgreSQL, on Artemis or on Bascule."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bench.run import CLIENT_JVM
from tests.support.java import JARS, compiled_sources
from tests.support.maven import XA_PROJECT

SOURCES = [*(XA_PROJECT / "bascule-xa-jakarta" / "src" / "main" / "java").rglob("*.java"), *(XA_PROJECT / "load").glob("*.java")]
TRANSACTION_MANAGER = "narayana"
#: The jars of each broker's client.
CLIENTS = {"artemis": "artemis-client", "bascule": JARS}
#: Time for start and end of the program, in addition to the measured time.
BEYOND_S = 90.0


def transaction_load(broker: str, *, seconds: float, warm_up_s: float, **options: str | float | bool) -> dict[str, Any]:
    """Run the program once; ``options`` are further options of the program.

    Return its figures, with ``failures`` above 0 if it has failed.
    """
    given = {**options, "broker": broker, "seconds": seconds, "warmup_s": warm_up_s}
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", _text(value))]
    command = [str(find_jdk().executable), *CLIENT_JVM, "-cp", _path(broker), "bascule.load.TransactionLoad", *arguments]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds + warm_up_s + BEYOND_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failures": 1}
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found if found and not done.returncode else {**found, "failures": found.get("failures") or 1}


def compiled() -> Path:
    """Return the directory with the classes of the program."""
    return compiled_sources("transaction-load", sorted(SOURCES), *CLIENTS.values(), TRANSACTION_MANAGER)


def _path(broker: str) -> str:
    files: Sequence[Path] = [compiled(), *classpath(CLIENTS[broker]), *classpath(TRANSACTION_MANAGER)]
    return os.pathsep.join(map(str, files))


def _text(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
