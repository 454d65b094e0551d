"""Limits of users and roles."""

from __future__ import annotations

from pydantic import ByteSize, Field, model_validator

from bascule.config.fields import Section
from bascule.config.reload_effect import AtOnce
from bascule.core.topics import MESSAGE_BYTES_MAX
from bascule.core.user_limits import UserResource

#: The control messages of transactions, and requests to the management node, have less.
SMALLEST_BYTES = 1024


class Limit(Section):
    """Limits that some users have instead of those of ``[broker]``. A limit of a user comes before those of the user's roles.

    A user also has the roles of the tokens of its connected clients.
    """

    users: AtOnce[tuple[str, ...]] = Field(default=(), description="Users that have these limits; a client without a login is `anonymous`")
    roles: AtOnce[tuple[str, ...]] = Field(
        default=(), description="Roles whose users have these limits, each user for itself. Of several roles, the highest limit counts"
    )
    max_connections: AtOnce[int | None] = Field(default=None, ge=0, description="Maximum number of connections of one user; 0 = no limit")
    max_sessions: AtOnce[int | None] = Field(default=None, ge=0, description="Maximum number of sessions of one user; 0 = no limit")
    max_links: AtOnce[int | None] = Field(
        default=None, ge=0, description="Maximum number of producers and consumers of one user; 0 = no limit"
    )
    max_transactions: AtOnce[int | None] = Field(
        default=None, ge=0, description="Maximum number of open local transactions of one user; 0 = no limit"
    )
    max_prepared_branches: AtOnce[int | None] = Field(
        default=None, ge=0, description="Maximum number of prepared branches of one user; 0 = only the limit for all users together"
    )
    max_queues: AtOnce[int | None] = Field(
        default=None, ge=0, description="Maximum number of queues and subscriptions that the clients of one user have created; 0 = no limit"
    )
    max_durable_subscriptions: AtOnce[int | None] = Field(
        default=None, ge=0, description="Maximum number of durable subscriptions that the clients of one user have created; 0 = no limit"
    )
    max_message_bytes: AtOnce[ByteSize | None] = Field(
        default=None,
        ge=SMALLEST_BYTES,
        le=MESSAGE_BYTES_MAX,
        description="Largest message that the broker accepts from the user, if broker.max_message_bytes allows it",
    )
    max_messages_per_s: AtOnce[int | None] = Field(
        default=None,
        ge=0,
        description="Messages that the producers of one user may send in a second, together. The broker gives no more credit, so that a"
        " faster producer waits; 0 = no limit",
    )

    @model_validator(mode="after")
    def _concerns_somebody(self) -> Limit:
        if not self.users and not self.roles:
            raise ValueError("the table names no user and no role; set users or roles")
        if not self.given():
            raise ValueError("the table sets no limit; set at least one, such as max_connections")
        return self

    def given(self) -> dict[UserResource, int]:
        """Return the limits that are set."""
        return {resource: int(most) for resource in UserResource if (most := getattr(self, resource)) is not None}
