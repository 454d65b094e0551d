"""Settings of the audit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bascule.config.fields import Section, TopicName


class Audit(Section):
    """The audit of the broker: who did what, as one line of JSON for each event."""

    file: Path | None = Field(default=None, description="File to which the broker appends the lines; unset = no file")
    topic: TopicName | None = Field(
        default=None, description="Kafka topic to which the broker writes the lines. It must exist; unset = no topic"
    )
    messages: bool = Field(default=False, description="Whether each message that a client sends or gets is an event")
    on_failure: Literal["continue", "refuse"] = Field(
        default="continue",
        description="While lines cannot be written, continue, or refuse logins, links that need permissions, and administration",
    )
