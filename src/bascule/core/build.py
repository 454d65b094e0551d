"""Which build of the package runs: the modules that handle each message are compiled, or interpreted (docs/adr/0016-compiled-core.md)."""

from __future__ import annotations


def build() -> str:
    """Return "compiled" or "interpreted"."""
    return "interpreted" if __file__.endswith(".py") else "compiled"
