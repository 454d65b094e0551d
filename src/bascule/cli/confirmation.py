"""Questions before an action that cannot be undone."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bascule.cli.output import note

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for a confirmation")]


def ask_first(consequence: str, question: str, *, yes: bool) -> None:
    """Ask somebody at a terminal before an action. A program is not asked: its commands are written down. Exits with 1 if not confirmed."""
    if not yes and sys.stdin.isatty():
        note(consequence)
        _ask(question)


def require_yes(question: str, *, yes: bool) -> None:
    """Ask before an action whose extent the command has just shown. A program must give ``--yes``. Exits with 1 if not confirmed."""
    if yes:
        return
    if not sys.stdin.isatty():
        note("nothing was changed; add --yes to confirm")
        raise typer.Exit(1)
    _ask(question)


def _ask(question: str) -> None:
    """Ask on standard error: standard output has the result alone."""
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was changed")
        raise typer.Exit(1)
