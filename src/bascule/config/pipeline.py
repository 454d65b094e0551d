"""Settings of diverts and ingresses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Literal

from pydantic import Field, field_validator, model_validator

from bascule.config.fields import Name, Section, Start, TopicName, check_key, check_pattern, check_template, check_topic
from bascule.config.reload_effect import AtRestart
from bascule.core.defaults import DIVERT_KEY, DIVERT_TO, EXCLUSIVE_DIVERTS_MAX, INGRESS_BODY, INGRESS_KEY_AS, INGRESS_UNBOUND
from bascule.core.destination import Routing
from bascule.core.linear_regex import LinearRegex
from bascule.jms.selector import SelectorError, compile_selector

#: Characters of the name of a user.
USER_LENGTH_MAX = 200
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Pipeline(Section):
    """Settings that diverts and ingresses have in common."""

    name: AtRestart[Name] = Field(description="Unique name of the pipeline. Its position is stored under this name")
    enabled: AtRestart[bool] = Field(default=True, description="Whether the pipeline runs. The position of a disabled pipeline is kept")
    start: AtRestart[Start] = Field(
        default="latest", description="Where a new pipeline begins: earliest, latest or a timestamp (ISO 8601, UTC without a zone)"
    )

    @property
    def start_ms(self) -> int | None:
        """Return a start that is a timestamp, in milliseconds since the epoch. A timestamp without a zone is UTC."""
        if self.start in {"earliest", "latest"}:
            return None
        moment = datetime.fromisoformat(self.start)
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


class Divert(Pipeline):
    """A pipeline from JMS messages to a Kafka topic."""

    user: AtRestart[str | None] = Field(
        default=None, min_length=1, max_length=USER_LENGTH_MAX,
        description="User whose permission `consume` on the addresses of `from` the divert needs, while it runs; unset = it needs none",
    )  # fmt: skip

    from_address: AtRestart[str] = Field(
        alias="from", min_length=1, description="JMS address, or a pattern: '*' stands for one word, '#' for any number of words"
    )
    selector: AtRestart[str] = Field(default="", description="JMS selector; empty = every message")
    to: AtRestart[str] = Field(
        default=DIVERT_TO,
        description="Kafka topic. ${address} is replaced by the address of the message, ${rest} by the words that a final '#' in"
        " `from` matches",
    )
    key: AtRestart[str] = Field(default=DIVERT_KEY, description="Record key: message-id, correlation-id, group-id, property:NAME or none")
    exclusive: AtRestart[bool] = Field(
        default=False, description="Send the messages that the divert takes to Kafka only, not to local queues"
    )
    select: AtRestart[tuple[str, ...]] = Field(
        default=(), description="Spark SQL expressions over the columns of a message; one of them must have the name `value`"
    )
    python: AtRestart[str | None] = Field(
        default=None,
        description="MODULE:FUNCTION of a Python function that transforms a DataFrame of messages and treats each row by itself",
    )
    from_kafka: AtRestart[bool] = Field(default=False, description="Whether the divert also takes messages that came from Kafka")
    group: AtRestart[Name | None] = Field(
        default=None,
        description="Group of diverts that are carried together, in one Spark task. If unset: the default group",
    )

    @field_validator("from_address")
    @classmethod
    def _pattern(cls, value: str) -> str:
        return check_pattern(value)

    @field_validator("selector")
    @classmethod
    def _selector(cls, value: str) -> str:
        try:
            compile_selector(value)
        except SelectorError as error:
            raise ValueError(f"column {error.column}: {error.reason}\n{error.caret()}") from error
        return value

    @field_validator("to")
    @classmethod
    def _to(cls, value: str) -> str:
        check_template(value, "address", "rest")
        check_topic(value.replace("${address}", "a").replace("${rest}", "a"))
        return value

    @field_validator("key")
    @classmethod
    def _key(cls, value: str) -> str:
        return check_key(value, ("message-id", "correlation-id", "group-id", "none"))

    @field_validator("python")
    @classmethod
    def _python(cls, value: str | None) -> str | None:
        if value is not None and not _FUNCTION.fullmatch(value):
            raise ValueError("must be MODULE:FUNCTION, such as 'mypackage.transforms:delays'")
        return value

    @model_validator(mode="after")
    def _rest_of_a_pattern(self) -> Divert:
        if "${rest}" in self.to and (self.from_address.count("#") != 1 or not self.from_address.endswith("#")):
            raise ValueError("to: ${rest} requires that `from` ends with '#' and has no other '#'")
        return self

    @model_validator(mode="after")
    def _one_transformation(self) -> Divert:
        if self.select and self.python:
            raise ValueError("give either select or python, not both")
        return self


def exclusive_excess(diverts: Sequence[Divert]) -> int | None:
    """Return the place of the first exclusive divert beyond EXCLUSIVE_DIVERTS_MAX; None if there is none. Disabled ones do not count."""
    exclusive = (place for place, divert in enumerate(diverts) if divert.enabled and divert.exclusive)
    return next(islice(exclusive, EXCLUSIVE_DIVERTS_MAX, None), None)


class Ingress(Pipeline):
    """A pipeline from Kafka records to a JMS destination."""

    user: AtRestart[str | None] = Field(
        default=None, min_length=1, max_length=USER_LENGTH_MAX,
        description="User who sends the messages: the broker moves a message that the user may not send (`send`, and `createAddress` and"
        " `createDurableQueue` if the message creates its address) to the dead-letter queue; unset = no permission is needed",
    )  # fmt: skip

    topics: AtRestart[tuple[TopicName, ...]] = Field(default=(), description="Names of Kafka topics")
    pattern: AtRestart[str | None] = Field(
        default=None,
        min_length=1,
        description="Regular expression for names of Kafka topics. It must match the whole name. Look-around, back-references, possessive"
        " quantifiers and word boundaries are not supported",
    )
    to: AtRestart[str] = Field(
        default="${topic}",
        description="JMS address. ${topic} and ${header:NAME} are replaced. A prefix queue:// or topic:// overrides `routing`",
    )
    reply_to: AtRestart[str] = Field(
        default="",
        description="JMSReplyTo, with the same replacements as `to`. If unset, or a record lacks the header: header jms.JMSReplyTo",
    )
    routing: AtRestart[Literal["multicast", "anycast"]] = Field(
        default="multicast", description="Kind of the destination: multicast = a JMS topic, anycast = a JMS queue"
    )
    body: AtRestart[Literal["text", "bytes", "map"]] = Field(
        default=INGRESS_BODY, description="Kind of the JMS message; map expects a JSON object"
    )
    start: AtRestart[Start] = Field(
        default="earliest", description="Where a new ingress begins: earliest, latest or a timestamp (ISO 8601, UTC without a zone)"
    )
    unbound: AtRestart[Literal["drop", "keep"]] = Field(
        default=INGRESS_UNBOUND,
        description="Drop a message whose address has neither a queue nor a subscription, or keep it: anycast creates the queue,"
        " multicast keeps the message in the journal, for diverts with from_kafka",
    )
    key_as: AtRestart[str] = Field(
        default=INGRESS_KEY_AS,
        description="Where the record key goes in addition to the property kafka_key: correlation-id, group-id, property:NAME or none",
    )
    keep_user_id: AtRestart[bool | None] = Field(
        default=None,
        description="Keep JMSXUserID of a record (header jms.JMSXUserID), which everybody who can write the topics can set; unset = only if"
        " broker.validated_user is off. Otherwise, a message of an ingress with a `user` names that user",
    )
    tasks: AtRestart[int | None] = Field(
        default=None,
        ge=1,
        description="Number of Spark tasks over which the partitions of the topics are spread. If unset: as many as Spark has cores",
    )

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        if value is not None:
            LinearRegex(value)
        return value

    @field_validator("to")
    @classmethod
    def _to(cls, value: str) -> str:
        return check_template(value, "topic", "header:NAME")

    @field_validator("reply_to")
    @classmethod
    def _reply_to(cls, value: str) -> str:
        return value and check_template(value, "topic", "header:NAME")

    @field_validator("key_as")
    @classmethod
    def _key_as(cls, value: str) -> str:
        return check_key(value, ("correlation-id", "group-id", "none"))

    @model_validator(mode="after")
    def _one_source(self) -> Ingress:
        if bool(self.topics) == (self.pattern is not None):
            raise ValueError("give either topics or pattern" + (", not both" if self.topics else ""))
        return self

    @property
    def routing_type(self) -> Routing:
        """Return the routing as the broker names it."""
        return Routing[self.routing.upper()]
