"""Errors of messages."""

from __future__ import annotations

from bascule.core.errors import InvalidInput


class MalformedMessage(InvalidInput):
    """The bytes are not a valid AMQP message; the text has the section and the byte."""

    condition = "amqp:decode-error"
