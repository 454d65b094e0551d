"""Settings of the audit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bascule.config.fields import Section, TopicName
from bascule.config.reload_effect import AtOnce, AtRestart, ForNew


class Audit(Section):
    """The audit of the broker: who did what, as one line of JSON for each event."""

    file: AtOnce[Path | None] = Field(default=None, description="File to which the broker appends the lines; unset = no file")
    topic: AtRestart[TopicName | None] = Field(
        default=None, description="Kafka topic to which the broker writes the lines. It must exist; unset = no topic"
    )
    messages: ForNew[bool] = Field(default=False, description="Whether each message that a client sends or gets is an event")
    on_failure: AtOnce[Literal["continue", "refuse"]] = Field(
        default="continue",
        description="While lines cannot be written, continue, or refuse logins, links that need permissions, and administration",
    )
