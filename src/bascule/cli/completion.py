"""``bascule completion``: the script with which a shell completes commands, options and their values."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from bascule.cli.output import line


class Shell(enum.StrEnum):
    """A shell that can complete the commands."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog="Example:  bascule completion bash > ~/.local/share/bash-completion/completions/bascule")(completion)


def completion(shell: Annotated[Shell, typer.Argument(help="Shell that reads the script", show_default=False)]) -> None:
    """Print the script that makes a shell complete commands, options and their values. The shell runs `bascule` for each completion."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined] # Typer has no exported name for it

    line(get_completion_script(prog_name="bascule", complete_var="_BASCULE_COMPLETE", shell=shell))
