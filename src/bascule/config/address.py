"""Settings of addresses, by pattern, and destinations that exist from the start."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from bascule.config.fields import Pattern, Section
from bascule.config.reload_effect import AtOnce, ForNew
from bascule.core.defaults import (
    AUTO_DELETE_AFTER_S,
    DEAD_LETTER_ADDRESS,
    DUPLICATE_WINDOW_COUNT,
    DUPLICATE_WINDOW_S,
    EXPIRY_ADDRESS,
    MAX_DELIVERY_ATTEMPTS,
)
from bascule.core.destination import ADDRESS_MAX
from bascule.core.permissions import MANAGEMENT_ADDRESS

#: A century; an unlimited delay would exceed the integers in which the broker counts time.
_LONGEST_S = 100 * 365 * 86_400.0

Seconds = float


class AddressSettings(Section):
    """Settings of an address, and of each queue and subscription on it. In ``[broker]``: of all addresses that no ``[[address]]`` names."""

    max_messages: AtOnce[int] = Field(
        default=0, ge=0, description="Maximum number of messages in one queue or subscription, waiting or held by consumers; 0 = no limit"
    )
    max_bytes: AtOnce[ByteSize] = Field(
        default=ByteSize(0), ge=0, description="Maximum size of the messages in one queue or subscription; 0 = no limit"
    )
    when_full: AtOnce[Literal["block", "reject", "drop-oldest-nonpersistent"]] = Field(
        default="block",
        description="How a full queue treats a new message: block = its sender waits (a sender without a fixed address is refused),"
        " reject = the message is refused, drop-oldest-nonpersistent = the oldest non-persistent messages are dropped to"
        " make room",
    )
    max_delivery_attempts: AtOnce[int] = Field(
        default=MAX_DELIVERY_ATTEMPTS,
        ge=0,
        description="Send a message to the dead-letter address after N failed deliveries; 0 = never",
    )
    redelivery_delay_s: AtOnce[Seconds] = Field(
        default=0,
        ge=0,
        le=_LONGEST_S,
        description="Delay of a message after a failed delivery in seconds. Messages behind it are delivered meanwhile",
    )
    redelivery_multiplier: AtOnce[float] = Field(
        default=1, ge=1, le=100, description="Factor by which the delay grows with each further failed delivery"
    )
    redelivery_delay_max_s: AtOnce[Seconds] = Field(default=0, ge=0, le=_LONGEST_S, description="Longest delay in seconds; 0 = no limit")
    expiry_s: ForNew[Seconds] = Field(
        default=0, ge=0, le=_LONGEST_S, description="Time to live in seconds of a message whose sender set none; 0 = for ever"
    )
    max_expiry_s: ForNew[Seconds] = Field(
        default=0, ge=0, le=_LONGEST_S, description="Longest time to live in seconds, whatever the sender set; 0 = no limit"
    )
    dead_letter_address: AtOnce[str] = Field(
        default=DEAD_LETTER_ADDRESS,
        max_length=ADDRESS_MAX,
        description='Queue for messages that could not be delivered; "" = drop them',
    )
    expiry_address: AtOnce[str] = Field(
        default=EXPIRY_ADDRESS, max_length=ADDRESS_MAX, description='Queue for messages that expired; "" = drop them'
    )
    duplicate_window_count: AtOnce[int] = Field(
        default=DUPLICATE_WINDOW_COUNT, ge=0, description="Number of message ids remembered per address for duplicate detection"
    )
    duplicate_window_s: AtOnce[Seconds] = Field(
        default=DUPLICATE_WINDOW_S, gt=0, le=_LONGEST_S, description="Time in seconds for which a message id is remembered"
    )
    prefetch: AtOnce[int] = Field(
        default=0, ge=0, description="Maximum number of unsettled messages of one consumer; 0 = as many as it asks for"
    )
    exclusive: AtOnce[bool] = Field(default=False, description="Serve only the first consumer. When it leaves, serve the next one")
    auto_create: AtOnce[bool] = Field(
        default=True, description="Create a queue or topic when a client first uses its name. If false, the broker refuses unknown names"
    )
    auto_delete: AtOnce[bool] = Field(default=True, description="Delete a queue that was created automatically when it is empty and unused")
    auto_delete_after_s: AtOnce[Seconds] = Field(
        default=AUTO_DELETE_AFTER_S, ge=0, le=_LONGEST_S, description="Delete such a queue after N seconds without use"
    )
    subscription_expiry_s: AtOnce[Seconds] = Field(
        default=0,
        ge=0,
        le=_LONGEST_S,
        description="Delete a durable subscription and its messages after N seconds without a consumer; 0 = never",
    )

    @field_validator("dead_letter_address", "expiry_address")
    @classmethod
    def _addresses(cls, value: str) -> str:
        return check_address(value) if value else value

    @model_validator(mode="after")
    def _in_agreement(self) -> AddressSettings:
        """Check the settings of one table; :func:`contradiction` checks inherited settings."""
        if what := contradiction(self.given()):
            raise ValueError(what)
        return self

    def given(self) -> dict[str, Any]:
        """Return the settings that were given, by key."""
        return {key: getattr(self, key) for key in AddressSettings.model_fields if key in self.model_fields_set}


def contradiction(settings: dict[str, Any]) -> str:
    """Return which two settings of an address contradict each other, or "" if none do."""
    for shorter, longer in (("redelivery_delay_s", "redelivery_delay_max_s"), ("expiry_s", "max_expiry_s")):
        bound = settings.get(longer, 0)
        if bound and settings.get(shorter, 0) > bound:
            return f"{shorter} {settings[shorter]:g} is more than {longer} {bound:g}"
    return ""


class Address(AddressSettings):
    """Settings of the addresses that a pattern matches; only the settings that are given count."""

    shows_only_given: ClassVar[bool] = True

    match: AtOnce[Pattern] = Field(description="Address, or a pattern: '*' stands for one word, '#' for any number of words")


class DestinationDefinition(Section):
    """A queue or a topic that exists from the start."""

    name: AtOnce[str] = Field(min_length=1, max_length=ADDRESS_MAX, description="Name of the queue or topic")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_address(value)


class QueueDefinition(DestinationDefinition):
    """A JMS queue."""


class TopicDefinition(DestinationDefinition):
    """A JMS topic."""


def check_address(value: str) -> str:
    """Return the address of one destination. Raises ValueError for a pattern."""
    if not value.isprintable():
        raise ValueError("must be printable")
    if any(word in ("*", "#") for word in value.split(".")):
        raise ValueError("must name one destination; the wildcards '*' and '#' are not allowed")
    if value == MANAGEMENT_ADDRESS:
        raise ValueError("is the address of the management node; a queue or topic cannot have this name")
    return value
