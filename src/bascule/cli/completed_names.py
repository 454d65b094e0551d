"""Names that a shell completes: those of queues and pipelines, for which a command asks the admin server once."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import typer

from bascule.cli.admin import AdminApiClient
from bascule.cli.context import use_context_option
from bascule.cli.lists import PART, SEARCHED_CHARACTERS
from bascule.threads.background import in_background

#: Timeout, in seconds, of the request, and of the whole completion, imports included: somebody waits at a prompt.
TIMEOUT_S: Final = 1.0
DEADLINE_S: Final = 4.0
#: Names that need no quotation marks in any shell. Clients choose names, and a shell could run a part of another name as a command.
PLAIN: Final = re.compile(r"\w[\w.,/@+-]*")
#: Paths of the pipelines of one kind, by the group of the command.
_LISTS: Final = {"divert": "diverts", "ingress": "ingresses"}


def queue_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of queues, and of the queues of subscriptions, that begin with a text; none if the broker does not give them."""

    def names(client: AdminApiClient) -> Iterable[Any]:
        # The broker finds names that contain the text, in any case.
        part = client.look_within(TIMEOUT_S, "list/queues", search=incomplete[:SEARCHED_CHARACTERS], limit=PART)
        return [each["name"] for each in part["entries"]]

    return _completed(ctx, incomplete, names)


def pipeline_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of diverts, ingresses or both that begin with a text, by the group of the command; none as for queues."""
    path = _LISTS.get(getattr(ctx.parent, "info_name", ""), "flow")

    def names(client: AdminApiClient) -> Iterable[Any]:
        found = client.look_within(TIMEOUT_S, path)
        return [each["name"] for each in (found if path != "flow" else (*found["diverts"], *found["ingresses"]))]

    return _completed(ctx, incomplete, names)


def _completed(ctx: typer.Context, incomplete: str, names: Callable[[AdminApiClient], Iterable[Any]]) -> list[str]:
    given = ctx.params
    if given.get("broker") or given.get("topic") is True:
        return []  # the admin server of that broker is not known; a topic is no queue

    def found() -> list[str]:
        return list(names(AdminApiClient(given.get("admin"), given.get("config"))))

    try:
        with _without_terminal():
            use_context_option(given.get("context"))
            # The timeout of the request bounds each read of the answer, and neither the search for the host nor the files of the login.
            answer = in_background(partial(copy_context().run, found), "completion").result(DEADLINE_S)
            return sorted({name for name in answer if name.startswith(incomplete) and PLAIN.fullmatch(name)})
    except Exception:  # the user is typing: an error would end up in the command line
        return []


@contextmanager
def _without_terminal() -> Iterator[None]:
    """Ask for no password: the terminal belongs to the line that the user types."""
    stdin = sys.stdin
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.stdin = stdin
