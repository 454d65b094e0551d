"""What belongs to users: client ids and durable subscriptions to the user who made them, branches to the user who prepared them.

A client id belongs to the users of its durable subscriptions. A client id without durable subscriptions has no owner: many AMQP clients
use a fixed container id, such as the name of their host, whatever their user. The durable subscriptions of clients without a login belong
to the first user who uses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bascule.amqp.errors import INVALID_FIELD, UNAUTHORIZED_ACCESS, AmqpError
from bascule.amqp.types import Symbol
from bascule.config.user_names import ANONYMOUS
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission, Unauthorized

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.broker.queue import BrokerQueue
    from bascule.server.client import Client
    from bascule.server.containers import ContainerHolder


def check_sole_connection(client: Client, engine: Engine, holders: Iterable[ContainerHolder]) -> None:
    """Check that a client may be the sole connection of its client id. Raises AmqpError.

    ``holders`` have the id by other open connections. JMS clients ask for a sole connection. Connections that have not asked for it, of
    users to whom the id does not belong, do not keep its owner out.
    """
    if any(holder.sole or _has_client_id(client, engine, holder.user) for holder in holders):
        info = {Symbol("invalid-field"): Symbol("container-id")}
        raise AmqpError(INVALID_FIELD, f"client id {client.container!r} is already connected", info)
    if not _has_client_id(client, engine, client.user) and not _recovers(client):
        raise AmqpError(UNAUTHORIZED_ACCESS, _refusal(client))  # the refused login is in the audit


def check_client_id(client: Client) -> None:
    """Check that the client's user may make a durable subscription with its client id. Raises AmqpError."""
    if not _has_client_id(client, client.engine, client.user):
        raise _refused(client, client.container, _refusal(client))


def check_owner(client: Client, queue: BrokerQueue) -> None:
    """Check that the client's user, or a client without a login, has made a durable subscription. Raises AmqpError."""
    if queue.user != ANONYMOUS and not client.permissions.owns(client.user, queue.user):
        raise _refused(client, queue.name, f"subscription {queue.subscription!r} belongs to another user than {client.user!r}")


def take_over(client: Client, queue: BrokerQueue) -> None:
    """Give a durable subscription of clients without a login to the first user with a login who uses it."""
    if queue.user == ANONYMOUS and client.login:
        client.engine.destinations.give_subscription(queue, client.user)
        client.audit.record("subscription", queue.name, who=client.user, peer=client.peer, owner=ANONYMOUS)


def may_end(client: Client, owner: str) -> bool:
    """Return whether the client's user may see and end the transaction branches of a user."""
    return client.permissions.owns(client.user, owner) or _recovers(client)


def _recovers(client: Client) -> bool:
    """Return whether the client may end the branches of other users. It may connect with their client ids to do so."""
    try:
        client.permissions.authorize(client.user, Permission.RECOVER, MANAGEMENT_ADDRESS)
    except Unauthorized:
        return False
    return True


def _has_client_id(client: Client, engine: Engine, user: str) -> bool:
    """Return whether a user may use the client's id: it has no owner, or the user owns it.

    A durable subscription that was made without a user opens its client id to all users. Those of clients without a login belong to nobody
    for users with a login: such clients have used them before there were users.
    """
    users = engine.addresses.subscribers.get(client.container)
    if not users or user in users or "" in users:
        return True
    others = [each for each in users if each != ANONYMOUS]
    return not others or client.permissions.owns(user, others[0])  # without permissions, everything belongs to everybody


def _refusal(client: Client) -> str:
    return f"client id {client.container!r} has durable subscriptions of another user than {client.user!r}"


def _refused(client: Client, on: str, error: str) -> AmqpError:
    client.audit.record("subscription", on, who=client.user, peer=client.peer, allowed=False, result=error)
    return AmqpError(UNAUTHORIZED_ACCESS, error)
