"""Settings of the log."""

from __future__ import annotations

from pydantic import Field

from bascule.config.fields import Section
from bascule.config.reload_effect import AtOnce
from bascule.core.log import LogFormat, LogLevel, LogSettings


class Log(Section):
    """The log of the broker, the pipelines and the commands."""

    format: AtOnce[LogFormat] = Field(default="text", description="Write lines of text, or one JSON object per line")
    level: AtOnce[LogLevel] = Field(default="info", description="Least severity that is written")

    @property
    def values(self) -> LogSettings:
        """Return the settings for the set-up of the log."""
        return LogSettings(self.format, self.level)
