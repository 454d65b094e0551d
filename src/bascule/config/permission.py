"""Permissions of roles, by address pattern."""

from __future__ import annotations

from pydantic import Field

from bascule.config.fields import Pattern, Section
from bascule.config.reload_effect import AtOnce

Roles = tuple[str, ...]


class PermissionRule(Section):
    """Permissions on the addresses that a pattern matches. The names of the permissions are those of Artemis."""

    match: AtOnce[Pattern] = Field(description="Address, or a pattern: '*' stands for one word, '#' for any number of words")
    send: AtOnce[Roles] = Field(default=(), description='Roles that may send to the address; "*" = all clients, here and below')
    consume: AtOnce[Roles] = Field(default=(), description="Roles that may consume from its queue, or subscribe to its topic")
    browse: AtOnce[Roles] = Field(default=(), description="Roles that may browse its queue")
    create_address: AtOnce[Roles] = Field(
        default=(), alias="createAddress", description="Roles that may create the address by using it for the first time"
    )
    delete_address: AtOnce[Roles] = Field(default=(), alias="deleteAddress", description="Roles that may delete the address")
    create_durable_queue: AtOnce[Roles] = Field(
        default=(), alias="createDurableQueue", description="Roles that may create its queue, or a durable subscription to its topic"
    )
    delete_durable_queue: AtOnce[Roles] = Field(
        default=(), alias="deleteDurableQueue", description="Roles that may delete its queue, or end a durable subscription to its topic"
    )
    create_non_durable_queue: AtOnce[Roles] = Field(
        default=(), alias="createNonDurableQueue",
        description="Roles that may create a temporary queue, or a subscription to its topic that is not durable",
    )  # fmt: skip
    delete_non_durable_queue: AtOnce[Roles] = Field(
        default=(), alias="deleteNonDurableQueue",
        description="Roles that may delete a temporary queue, or a subscription to its topic that is not durable",
    )  # fmt: skip
    manage: AtOnce[Roles] = Field(
        default=(), description="Roles that may send requests to the management node: the XA transactions of clients (`$management`)"
    )
    recover: AtOnce[Roles] = Field(
        default=(), description="Roles that may see and end the XA branches of other users (`$management`): for recovery managers"
    )
    view: AtOnce[Roles] = Field(default=(), description="Roles that may see the state of the address")
    edit: AtOnce[Roles] = Field(default=(), description="Roles that may change the messages of its queue as an administrator")

    def given(self) -> dict[str, Roles]:
        """Return the roles of each permission, by its name."""
        return {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items() if name != "match"}
