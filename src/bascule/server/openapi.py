"""The OpenAPI 3.1 document of the admin server, made from the table that routes its requests.

Methods, paths, roles and arguments of actions are those of the table. ``bascule.server.operations`` adds words and types of answers: a
request without an entry there is an error of the product, which a test finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

import bascule
from bascule.server.actions import ACTIONS, AdminAction
from bascule.server.admin_app import AdminPage
from bascule.server.answers import ErrorAnswer
from bascule.server.in_turns import beside
from bascule.server.operation_commands import COMMANDS
from bascule.server.operations import OPERATIONS, Operation
from bascule.server.schemas import Schema, SchemaCollection

DOCUMENT_PATH: Final = "/openapi.json"
#: Errors that every request may get: a host or an origin that is not allowed, and an unexpected error.
ERRORS: Final = (403, 421, 500)
#: Errors of requests that need a role, and of those with arguments or parameters.
ROLE_ERRORS: Final = (401, 503)
INPUT_ERRORS: Final = (400,)
BODY_ERRORS: Final = (400, 411)
ALL_ERRORS: Final = sorted(
    {*ERRORS, *ROLE_ERRORS, *INPUT_ERRORS, *BODY_ERRORS, *(each for at in OPERATIONS.values() for each in at.errors)}
)
SECURITY_SCHEMES: Final[Mapping[str, Schema]] = {
    "basic": {"type": "http", "scheme": "basic", "description": "Name and password of a user, over TLS or from the broker's machine"},
    "bearer": {"type": "http", "scheme": "bearer", "description": "Token of the settings, token of the owner, or token of a provider"},
    "certificate": {"type": "mutualTLS", "description": "Client certificate that an authority in admin.tls.client_ca has signed"},
}
_ABOUT: Final = (
    "Health, status, metrics and actions of a Bascule broker. If the settings have neither users nor tokens, requests from the broker's"
    " own machine need no credentials. A role may do what a lower one may do: view, edit, manage. Every GET also answers HEAD. A request"
    " with an unknown path gets 404, and one with another method 405 with the header Allow; both have the body of an error."
)
_NUMBER: Final[Schema] = {"type": "integer", "minimum": 0}
_PATH_PARAMETERS: Final[Mapping[str, tuple[str, Schema]]] = {
    "name": ("Name of the pipeline", {"type": "string"}),
    "file": ("Name of the file; empty for the page itself", {"type": "string"}),
    "partition": ("Partition of the dead-letter topic", _NUMBER),
    "offset": ("Offset of the dead letter", _NUMBER),
}
_WORDS: Final[Mapping[type, str]] = {bool: "boolean", str: "string", int: "integer", dict: "object"}


class ApiDocument:
    """The document of one admin server, made at the first request. The table may get further pages until then."""

    def __init__(self, pages: Sequence[AdminPage]) -> None:
        self._pages = pages
        self._text = b""

    async def answer(self, _request: Request) -> Response:
        """Answer with the document."""
        if not self._text:
            self._text = await beside(partial(_text_of, self._pages))
        return Response(self._text, media_type="application/json")


def _text_of(pages: Sequence[AdminPage]) -> bytes:
    return json.dumps(document(pages), ensure_ascii=False).encode()


def document(pages: Sequence[AdminPage]) -> dict[str, Any]:
    """Return the document for the pages of a server."""
    schemas = SchemaCollection()
    paths: dict[str, dict[str, Any]] = {}
    files = sorted(each.path.rpartition("/")[2] for each in pages if each.listed_as)
    for page in pages:
        path = page.listed_as or page.path
        listed = paths.setdefault(path, {})
        if page.method.lower() not in listed:
            listed[page.method.lower()] = _operation(page, path, files, OPERATIONS[page.method, path], schemas)
    error = {"application/json": {"schema": schemas.of(ErrorAnswer)}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bascule admin server",
            "version": bascule.__version__,
            "description": _ABOUT,
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.named.items())),
            "responses": {_error_name(status): {"description": HTTPStatus(status).phrase, "content": error} for status in ALL_ERRORS},
            "securitySchemes": dict(SECURITY_SCHEMES),
        },
    }


def _operation(page: AdminPage, path: str, files: Sequence[str], operation: Operation, schemas: SchemaCollection) -> dict[str, Any]:
    action = ACTIONS.get(path.removeprefix("/")) if page.method == "POST" else None
    parameters = [_path_parameter(name, files) for name in re.findall(r"{(\w+)}", path)]
    parameters += [
        {"name": each.name, "in": "query", "description": each.about, "required": each.required, "schema": dict(each.schema)}
        for each in operation.parameters
    ]
    found: dict[str, Any] = {
        "operationId": "-".join((page.method.lower(), *re.findall(r"\w+", path))),
        "summary": operation.about,
        "tags": [path.split("/")[1] or "console"],
        "description": f"Needs the role `{page.role.word}`." if page.role is not None else "Needs no role.",
    }
    if (command := COMMANDS.get((page.method, path))) is not None:
        found["x-bascule-command"] = f"bascule {command}"
    if parameters:
        found["parameters"] = parameters
    body = _body(action, operation)
    if body is not None:
        found["requestBody"] = body
    found["responses"] = _responses(page, operation, schemas)
    # In OpenAPI 3.1, the list of a scheme names roles that a request needs.
    found["security"] = [] if page.role is None else [{name: [page.role.word]} for name in SECURITY_SCHEMES]
    return found


def _path_parameter(name: str, files: Sequence[str]) -> dict[str, Any]:
    about, schema = _PATH_PARAMETERS[name]
    if name == "file":
        schema = {**schema, "enum": list(files)}
    return {"name": name, "in": "path", "description": about, "required": True, "schema": schema}


def _body(action: AdminAction | None, operation: Operation) -> dict[str, Any] | None:
    """Return the description of the body, or of the arguments of the action that routes the request, with the words of the operation."""
    if operation.body is not None:
        return {"required": True, "content": {"application/json": {"schema": operation.body}}}
    given = {} if action is None else {**dict.fromkeys(action.required, ""), **action.optional}
    if action is None or not given:
        return None
    properties = {
        name: {"type": _WORDS[type(default)], **({} if name in action.required else {"default": default}), **operation.arguments[name]}
        for name, default in given.items()
    }
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    required = list(action.required)
    if required:
        schema["required"] = required
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _error_name(status: int) -> str:
    return f"Error{status}"


def _responses(page: AdminPage, operation: Operation, schemas: SchemaCollection) -> dict[str, Any]:
    found: dict[int, dict[str, Any]] = {}
    for status, answer in operation.answers.items():
        found[status] = {"description": HTTPStatus(status).phrase}
        if not isinstance(answer, str):
            found[status]["content"] = {"application/json": {"schema": schemas.of(answer)}}
        elif answer:
            found[status]["content"] = {answer.partition(";")[0]: {}}
    errors = {*ERRORS, *operation.errors}
    if page.role is not None:
        errors |= {*ROLE_ERRORS}
    if operation.parameters:
        errors |= {*INPUT_ERRORS}
    if page.method != "GET":
        errors |= {*BODY_ERRORS}
    for status in errors - found.keys():
        found[status] = {"$ref": f"#/components/responses/{_error_name(status)}"}
    return {str(status): each for status, each in sorted(found.items())}
