"""Checks of diverts and ingresses against the rest of the settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from bascule.config.fields import located
from bascule.config.pipeline import Divert, Ingress
from bascule.core.topics import JournalTopics

#: The user of a client without a login, which no list of users has.
ANONYMOUS_USER: Final = "anonymous"


def check_own_topics(diverts: Sequence[Divert], ingresses: Sequence[Ingress], topics: JournalTopics) -> None:
    """Check that no pipeline uses one of Bascule's own topics. Raises PydanticCustomError."""
    for position, divert in enumerate(diverts):
        if divert.to in topics.internal or divert.to == (topics.audit_topic or None):
            raise located(("divert", position, "to"), f"{divert.to!r} is one of Bascule's own topics")
        if divert.to == topics.dead_letters:
            raise located(
                ("divert", position, "to"),
                f"{divert.to!r} is the dead-letter topic (pipelines.dead_letter_topic); a divert cannot write to it",
            )
    for position, ingress in enumerate(ingresses):
        for topic in ingress.topics:
            if topic in topics.internal:
                raise located(("ingress", position, "topics"), f"{topic!r} is one of Bascule's own topics")


def unknown_user(
    diverts: Sequence[Divert], ingresses: Sequence[Ingress], known: Collection[str]
) -> tuple[tuple[str | int, ...], str] | None:
    """Return the place of the first user of a pipeline that nobody lists, and what is wrong; None if there is none.

    Such a user has no role, so it may do only what everybody may do. The roles of a token belong to a connection and not to its user.
    """
    tables: Sequence[tuple[str, Sequence[Divert | Ingress]]] = (("divert", diverts), ("ingress", ingresses))
    for kind, pipelines in tables:
        for position, pipeline in enumerate(pipelines):
            if pipeline.user is not None and pipeline.user not in known and pipeline.user != ANONYMOUS_USER:
                return (kind, position, "user"), unlisted(pipeline.user)
    return None


def unlisted(user: str) -> str:
    """Return what is wrong with a user of a pipeline that nobody lists."""
    return (
        f"there is no user {user!r} with a password or a role (broker.users, broker.roles, broker.users_file), so the pipeline would have"
        " no permission but those of all clients"
    )
