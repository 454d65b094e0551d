"""Errors of messages."""

from __future__ import annotations

from bascule.core.errors import BadRecord, InvalidInput


class MalformedMessage(InvalidInput):
    """The bytes are not a valid AMQP message; the text has the section and the byte."""

    condition = "amqp:decode-error"


class HeaderMissing(BadRecord):
    """A header named in a setting is missing."""
