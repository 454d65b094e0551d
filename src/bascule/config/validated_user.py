"""The setting ``broker.validated_user``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

ValidatedUser = Annotated[
    Literal["off", "check", "require", "set"],
    Field(
        description="What the broker does with JMSXUserID (AMQP user-id) of a message: off = nothing; check = refuse a message that names"
        " another user than its sender; require = also refuse a message that names none; set = write the sender's user into it",
    ),
]
