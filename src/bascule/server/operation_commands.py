"""The command of the command line that does the same as each request to the admin server. The OpenAPI document names it.

``tests/unit/cli/test_every_request.py`` runs each command and looks whether it sends its request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _of_pipelines(kind: str, collection: str) -> dict[tuple[str, str], str]:
    one = f"{collection}/{{name}}"
    return {
        ("GET", collection): f"{kind} list",
        ("POST", collection): f"{kind} create",
        ("GET", one): f"{kind} show",
        ("DELETE", one): f"{kind} delete",
        ("GET", f"{one}/config"): f"api GET {collection}/NAME/config",
        ("PUT", f"{one}/config"): f"{kind} change",
        ("PATCH", f"{one}/config"): f"api PATCH {collection}/NAME/config",
        ("GET", f"{one}/status"): f"{kind} status",
        ("PUT", f"{one}/pause"): f"{kind} pause",
        ("PUT", f"{one}/resume"): f"{kind} resume",
        ("PUT", f"{one}/stop"): f"{kind} stop",
        ("POST", f"{one}/restart"): f"{kind} restart",
        ("GET", f"{one}/offsets"): f"{kind} offsets",
        ("PATCH", f"{one}/offsets"): f"{kind} offsets --to",
        ("DELETE", f"{one}/offsets"): f"{kind} offsets --reset",
    }


#: Command by method and path of the request.
COMMANDS: Final[Mapping[tuple[str, str], str]] = {
    ("GET", "/livez"): "check alive",
    ("GET", "/readyz"): "check active --standby-ok",
    ("GET", "/active"): "check active",
    ("GET", "/metrics"): "api GET /metrics",
    ("GET", "/openapi.json"): "api GET /openapi.json",
    ("GET", "/status"): "status",
    ("GET", "/overview"): "top",
    ("GET", "/flow"): "flow",
    ("GET", "/brokers"): "status --brokers",
    ("GET", "/settings"): "config show --running",
    ("GET", "/permissions"): "permission list",
    ("POST", "/config/reload"): "config reload",
    ("GET", "/definitions"): "export definitions",
    ("GET", "/definitions/pipelines"): "export definitions",
    ("GET", "/queues"): "queue show",
    ("GET", "/list/queues"): "queue list",
    ("POST", "/queues/create"): "queue create",
    ("POST", "/queues/purge"): "queue purge",
    ("POST", "/queues/move"): "queue move",
    ("POST", "/queues/delete"): "queue delete",
    ("GET", "/messages"): "queue messages",
    ("GET", "/messages/show"): "queue message",
    ("GET", "/messages/body"): "queue message --body",
    ("GET", "/messages/life"): "why",
    ("POST", "/messages/send"): "send",
    ("GET", "/dead-letters"): "dead-letters list",
    ("POST", "/dead-letters/return"): "dead-letters return",
    ("GET", "/list/topics"): "topic list",
    ("GET", "/subscriptions"): "subscription list",
    ("GET", "/list/subscriptions"): "subscription list",
    ("POST", "/subscriptions/create"): "subscription create",
    ("POST", "/subscriptions/delete"): "subscription delete",
    ("GET", "/connections"): "connection list",
    ("GET", "/list/connections"): "connection list",
    ("GET", "/connections/links"): "connection show",
    ("POST", "/connections/close"): "connection close",
    ("GET", "/list/branches"): "branch list",
    ("POST", "/branches/commit"): "branch commit",
    ("POST", "/branches/rollback"): "branch rollback",
    ("POST", "/branches/forget"): "branch forget",
    ("POST", "/ingress/reset"): "ingress reset",
    **_of_pipelines("divert", "/diverts"),
    **_of_pipelines("ingress", "/ingresses"),
    ("GET", "/redrive/letters"): "redrive list",
    ("GET", "/redrive/letters/{partition}/{offset}"): "redrive show",
    ("GET", "/redrive/jobs"): "redrive jobs",
    ("POST", "/redrive/run"): "redrive run",
    ("POST", "/redrive/discard"): "redrive discard",
}
#: Requests that only a browser needs: a command has no pages, and logs in with each request.
BROWSERS_ONLY: Final = frozenset(
    {
        ("GET", "/"),
        ("GET", "/console"),
        ("GET", "/console/{file}"),
        ("GET", "/console/session"),
        ("POST", "/console/login"),
        ("POST", "/console/logout"),
    }
)
