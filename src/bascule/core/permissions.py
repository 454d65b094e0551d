"""The permissions of a user on an address, under the names of Artemis, and the interface that checks them."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from bascule.core.errors import BasculeError, Scope

#: The address of the management node. Permissions on the broker as a whole are permissions on this address.
MANAGEMENT_ADDRESS = "$management"


class Permission(enum.StrEnum):
    """The permissions.

    The permissions for ``DURABLE`` and ``NON_DURABLE`` queues also apply to subscriptions, on the address of their topic.
    """

    SEND = "send"
    CONSUME = "consume"
    BROWSE = "browse"
    CREATE_ADDRESS = "createAddress"
    DELETE_ADDRESS = "deleteAddress"
    CREATE_DURABLE_QUEUE = "createDurableQueue"
    DELETE_DURABLE_QUEUE = "deleteDurableQueue"
    CREATE_NON_DURABLE_QUEUE = "createNonDurableQueue"
    DELETE_NON_DURABLE_QUEUE = "deleteNonDurableQueue"
    #: Requests to the management node, and actions on connections, transaction branches and ingresses.
    MANAGE = "manage"
    #: See and end the transaction branches of other users: for recovery managers.
    RECOVER = "recover"
    #: Read access of an administrator.
    VIEW = "view"
    #: Change the messages of a queue as an administrator.
    EDIT = "edit"

    @classmethod
    def to_create(cls, *, durable: bool) -> Permission:
        """Return the permission to create a queue."""
        return cls.CREATE_DURABLE_QUEUE if durable else cls.CREATE_NON_DURABLE_QUEUE

    @classmethod
    def to_delete(cls, *, durable: bool) -> Permission:
        """Return the permission to delete a queue."""
        return cls.DELETE_DURABLE_QUEUE if durable else cls.DELETE_NON_DURABLE_QUEUE


class Unauthorized(BasculeError):
    """The user lacks the permission for the operation."""

    retriable = False
    scope = Scope.LINK
    condition = "amqp:unauthorized-access"
    http_status = 403

    def __init__(self, user: str, permission: Permission, address: str) -> None:
        who = f"user {user!r}" if user else "an anonymous client"
        super().__init__(f"{who} has no permission {permission.value!r} on address {address!r}")
        self.user = user
        self.permission = permission
        self.address = address


class AccessDecision(NamedTuple):
    """The answer to a question for a permission. ``rule`` is the pattern of the rule that decides, or None if no rule matches."""

    allowed: bool
    rule: str | None
    reason: str


class Permissions(Protocol):
    """Decides which permissions each user has."""

    def with_roles(self, roles: frozenset[str]) -> Permissions:
        """Return the permissions of a client that has roles by its token, besides those of its user."""
        ...

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        """Raise Unauthorized if ``user`` ("" for an anonymous client) lacks ``permission`` on ``address``."""

    def owns(self, user: str, owner: str) -> bool:
        """Return whether ``user`` may use a durable subscription or a branch that ``owner`` has made ("" for the broker's owner)."""
        ...


class AllowAll:
    """Gives every permission to every user."""

    def with_roles(self, _roles: frozenset[str]) -> AllowAll:
        """Return these permissions."""
        return self

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        """Allow the operation."""

    def owns(self, _user: str, _owner: str) -> bool:
        """Allow the use."""
        return True

    def decide(self, _user: str, _permission: Permission, _address: str, _roles: frozenset[str] = frozenset()) -> AccessDecision:
        """Return that everything is allowed."""
        return AccessDecision(True, None, "there is no [[permission]], so everything is allowed")
