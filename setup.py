"""Compile the modules that handle each message by mypyc if BASCULE_COMPILE=1.

Otherwise the package is pure Python (docs/adr/0016-compiled-core.md).
"""

import os
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
SOURCE = ROOT / "src" / "bascule"
PACKAGES = ("core", "amqp", "jms", "journal", "broker")
#: Modules of these packages that stay interpreted, because mypyc rejects them, or because they only declare names and wait for IO.
INTERPRETED = {
    # errors: mypyc supports neither several base classes nor attributes of a class that its base class also has
    "core/errors", "core/extras", "core/permissions", "amqp/errors", "broker/errors", "jms/errors", "jms/selector/errors",
    "journal/errors", "journal/reading",
    # subclasses of built-in types, and what made their values an int if a signature said so
    "amqp/types", "jms/selector/numbers",
    # dataclasses made by a decorator of ours; events whose types import one another
    "amqp/performatives", "amqp/composite", "amqp/events",
    # the number of frames between a log call and the logger
    "core/log",
    # lazy iterators, which mypyc makes lists; cached properties
    "broker/ascending", "broker/policy",
    # an error, and actions of an administrator
    "broker/administration",
    # frozen dataclasses that Spark's tasks or a caller's code may pickle or copy: mypyc restores a pickled object by assignments
    "core/access", "core/durations", "core/topics", "core/user_limits", "amqp/verifiers", "broker/divert_access",
    "broker/retention", "broker/takeover",
    # coroutines that wait for IO
    "broker/branch_requests", "broker/coverage", "broker/epoch", "broker/epoch_effects", "broker/following", "broker/housekeeping",
    "broker/ingress_tail", "broker/node", "broker/rounds", "core/effects",
    # tables, enumerations, limits and logins
    "amqp/bearer", "amqp/limits", "amqp/sasl", "amqp/scram", "amqp/states", "broker/ports", "broker/states", "core/defaults",
    "core/signals", "core/states", "core/xa_codes",
}  # fmt: skip
#: Modules of the package ``server`` that are compiled: each message goes through them.
SERVED = (
    "client", "client_links", "client_turns", "connection", "coordinator", "dispositions", "links", "outcomes", "traced_links",
    "traced_transfers", "transfers", "usage",
)  # fmt: skip


def modules() -> list[str]:
    """Return the files of the modules that are compiled."""
    files = sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py") if path.name != "__init__.py")
    found = [path for path in files if path.relative_to(SOURCE).with_suffix("").as_posix() not in INTERPRETED]
    return [str(path.relative_to(ROOT)) for path in [*found, *(SOURCE / "server" / f"{name}.py" for name in SERVED)]]


def extensions() -> list[Extension]:
    """Return the extension modules. ``BASCULE_COMPILE_LEVEL`` is the optimization level of the C compiler (default: 3)."""
    if os.environ.get("BASCULE_COMPILE") != "1":
        return []
    from mypyc.build import mypycify  # comes with mypy, which a pure build does not need

    return mypycify(modules(), opt_level=os.environ.get("BASCULE_COMPILE_LEVEL", "3"), debug_level="0", group_name="bascule")


if __name__ == "__main__":
    setup(ext_modules=extensions())
