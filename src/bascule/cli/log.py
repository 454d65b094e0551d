"""The log of commands: its options, and the set-up for a short command."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bascule.core.log import LogFormat, LogLevel, configure

if TYPE_CHECKING:
    from pathlib import Path

    from bascule.config import Settings

LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help="Format of log lines on standard error (default: log.format)", show_default=False),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="Least severity that is logged (default: log.level)", show_default=False),
]
#: The level if none is set: the result of such a command is its output or error message.
LEVEL: Final = "warning"


def settings_with_log(config: Path | None, log_format: LogFormat | None, log_level: LogLevel | None) -> Settings:
    """Load the settings, and set up the log of a short command from them. Raises ConfigError."""
    from bascule.config import load

    flags: dict[str, Any] = {"format": log_format, "level": log_level}
    settings = load(config, flags={"log": {name: value for name, value in flags.items() if value is not None}}).settings
    values = settings.log.values
    configure(values if "level" in settings.log.model_fields_set else replace(values, level=LEVEL))
    return settings
