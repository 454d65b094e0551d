"""The words of the OpenAPI document: what each request to the admin server does, its parameters, and the type of its answer.

Methods, paths and roles are not here: the document takes them from the table that routes the requests (``bascule.server.openapi``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bascule.config.defined import refused
from bascule.config.pipeline import Divert, Ingress
from bascule.core.destination import ADDRESS_MAX
from bascule.core.permissions import Permission
from bascule.server import answers, browsing, listing, looks, pipeline_answers, redrive, status
from bascule.server.message_life import PERIOD_MAX_S
from bascule.server.pipeline_definitions import REVISION
from bascule.server.schemas import Schema
from bascule.server.sending_messages import PROPERTY_TYPES, SENT_KINDS, TIME_MS_MAX
from bascule.writer.redrive import PLACES_MAX

#: Media types of answers that are not JSON.
TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
BYTES: Final = "application/octet-stream"
#: The answer is a file of the console.
FILE: Final = "*/*"
#: The answer has no body.
NOTHING: Final = ""


class Parameter(NamedTuple):
    """A parameter in the query of a request."""

    name: str
    about: str
    schema: Mapping[str, Any] = {"type": "string"}
    required: bool = False


class Operation(NamedTuple):
    """A request. ``answers`` has a type or a media type for each status of an answer that is not an error.

    ``arguments`` adds to the schemas of an action's arguments. ``body`` is the schema of the body that another request needs. ``errors``
    are statuses of errors besides those that every request may get.
    """

    about: str
    answers: Mapping[int, Any]
    parameters: tuple[Parameter, ...] = ()
    arguments: Mapping[str, Schema] = {}
    body: Schema | None = None
    errors: tuple[int, ...] = ()


def _number(lowest: int, highest: int, default: int | None = None) -> Schema:
    found: Schema = {"type": "integer", "minimum": lowest, "maximum": highest}
    return found if default is None else {**found, "default": default}


def _text(about: str, **further: Any) -> Schema:
    return {"type": "string", "description": about, **further}


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of a body with at least one of these properties."""
    found: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False, "minProperties": 1}
    return {**found, "required": list(required)} if required else found


def _part(what: str, answer: Any, columns: listing.ListColumns) -> Operation:
    searched = ", ".join(columns.searched)
    return Operation(
        f"A part of the list of {what}, searched and sorted by the server",
        {200: answer},
        (
            Parameter("search", f"Text to find in {searched}", {"type": "string", "maxLength": listing.SEARCH_MAX}),
            Parameter("sort", "Column to sort by", {"enum": list(columns.sortable), "default": columns.sortable[0]}),
            Parameter("order", "Order", {"enum": ["ascending", "descending"], "default": "ascending"}),
            Parameter("offset", "Number of entries to skip", _number(0, listing.PART_OFFSET_MAX, 0)),
            Parameter("limit", "Maximum number of entries", _number(1, listing.PART_ENTRIES_MAX, listing.PART_ENTRIES)),
        ),
    )


_QUEUE: Final = Parameter("queue", "Name of the queue, or of the queue of a subscription; by default the dead-letter address")
_MESSAGE: Final = Parameter("id", "Id of the message in a list of messages, valid within one epoch of the broker", required=True)
_NAME: Final = _text("Name of the queue, or of the queue of a subscription")
_SELECTOR: Final = _text("JMS selector of the messages; all by default")
_IDS: Final = _text(f"Ids of messages, as a list of messages has them, separated by spaces; at most {browsing.IDS_MAX}")
_FORCE: Final = {"description": "Also with messages or consumers"}
_XID: Final = _text("Xid of the branch: FORMAT:GTRID:BQUAL")

_HEALTH: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/livez"): Operation("Whether the process answers", {200: TEXT}),
    ("GET", "/readyz"): Operation("The role of the broker; 503 with the reason if it is not ready", {200: TEXT, 503: TEXT}),
    ("GET", "/active"): Operation("Whether the broker serves clients; 503 with the reason if not", {200: TEXT, 503: TEXT}),
    ("GET", "/metrics"): Operation("Metrics for Prometheus", {200: METRICS}),
    ("GET", "/openapi.json"): Operation("This document", {200: dict[str, Any]}),
}
_STATUS: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/status"): Operation("The status of the broker with all lists", {200: status.BrokerStatus}),
    ("GET", "/queues"): Operation(
        "All queues; one in detail with `name`",
        {200: list[status.QueueStatus] | status.QueueDetail},
        (Parameter("name", "Name of a queue, or of the queue of a subscription"),),
        errors=(404,),
    ),
    ("GET", "/subscriptions"): Operation("All subscriptions of topics", {200: list[status.SubscriptionStatus]}),
    ("GET", "/connections"): Operation("All connections of clients", {200: list[status.ConnectionStatus]}),
    ("GET", "/dead-letters"): Operation(
        "The first dead letters of a queue",
        {200: list[answers.DeadLetterAnswer]},
        (_QUEUE, Parameter("count", "Maximum number of dead letters", _number(1, 1_000, 100))),
        errors=(404,),
    ),
}
_LOOKS: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/overview"): Operation("The status without lists, with sums over all queues", {200: answers.OverviewAnswer}),
    ("GET", "/definitions"): Operation(
        "The queues and durable subscriptions that the broker holds besides its settings", {200: answers.DefinitionsAnswer}
    ),
    ("GET", "/list/queues"): _part("queues", answers.QueuesPart, looks.QUEUE_COLUMNS),
    ("GET", "/list/topics"): _part("topics", answers.TopicsPart, looks.TOPIC_COLUMNS),
    ("GET", "/list/subscriptions"): _part("subscriptions", answers.SubscriptionsPart, looks.SUBSCRIPTION_COLUMNS),
    ("GET", "/list/connections"): _part("connections", answers.ConnectionsPart, looks.CONNECTION_COLUMNS),
    ("GET", "/list/branches"): _part("branches of distributed transactions", answers.BranchesPart, looks.BRANCH_COLUMNS),
    ("GET", "/connections/links"): Operation(
        "The producers and consumers of a connection", {200: answers.LinksAnswer},
        (Parameter("id", "HOST:PORT of the connection", required=True),),
    ),
    ("GET", "/settings"): Operation("All settings; secrets are masked", {200: list[answers.SettingAnswer]}),
    ("GET", "/permissions"): Operation(
        "The rules of permissions; a decision if `user`, `permission` and `address` are given", {200: answers.PermissionsAnswer},
        (
            Parameter("user", "Name of the user"),
            Parameter("permission", "Permission", {"enum": [each.value for each in Permission]}),
            Parameter("address", "Address", {"type": "string", "maxLength": ADDRESS_MAX}),
        ),
    ),
    ("GET", "/messages"): Operation(
        "A page of the messages of a queue, without removing them", {200: answers.MessagesAnswer},
        (
            _QUEUE,
            Parameter("selector", "JMS selector of the messages"),
            Parameter("text", "Text that the messages contain", {"type": "string", "maxLength": browsing.TEXT_MAX}),
            Parameter("mark", "List the other messages, too, with `matches` = false", {"type": "boolean", "default": False}),
            Parameter("after", "Value of `next` of the page before"),
            Parameter("count", "Maximum number of messages", _number(1, browsing.PAGE_MESSAGES_MAX, browsing.PAGE_MESSAGES)),
        ),
        errors=(404,),
    ),
    ("GET", "/messages/show"): Operation("A message in detail", {200: answers.MessageAnswer}, (_QUEUE, _MESSAGE), errors=(404,)),
    ("GET", "/messages/body"): Operation(
        "The whole body of a message: a text in UTF-8, bytes, or the encoded message for other kinds", {200: BYTES}, (_QUEUE, _MESSAGE),
        errors=(404,),
    ),
    ("GET", "/messages/life"): Operation(
        "What happened to the messages with a JMSMessageID", {200: answers.LifeAnswer},
        (
            Parameter("id", "JMSMessageID", required=True),
            Parameter("last_s", "Read the journal of the last N seconds; 0 = all", _number(0, PERIOD_MAX_S, 0)),
        ),
    ),
}  # fmt: skip
_PROPERTY: Final[Schema] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"type": {"enum": list(PROPERTY_TYPES)}, "value": {"type": "string"}},
            "required": ["type", "value"],
            "additionalProperties": False,
        },
    ]
}
_SENT: Final[Mapping[str, Schema]] = {
    "to": _text("Name of the queue or topic"),
    "topic": {"description": "Send to a topic"},
    "kind": {"description": "Kind of the body", "enum": list(SENT_KINDS)},
    "body": _text("Text; base64 if `kind` is bytes; a JSON object as text if it is map; empty if it is message"),
    "properties": {"description": "JMS properties: a string, or type and value", "additionalProperties": _PROPERTY},
    "correlation_id": _text("JMSCorrelationID"),
    "reply_to": _text("Name of the queue for replies (JMSReplyTo)"),
    "type": _text("JMSType"),
    "group_id": _text("JMSXGroupID"),
    "priority": {"description": "JMSPriority", "minimum": 0, "maximum": 9},
    "ttl_ms": {"description": "Time to live in ms; 0 = for ever", "minimum": 0, "maximum": TIME_MS_MAX},
    "delay_ms": {"description": "Delivery delay in ms", "minimum": 0, "maximum": TIME_MS_MAX},
    "persistent": {"description": "Whether the message survives a crash"},
}
_SUBSCRIPTION: Final[Mapping[str, Schema]] = {
    "name": _text("Name of the subscription"),
    "topic": _text("Name of the topic"),
    "client_id": _text("Client id; empty for a shared subscription of clients without a client id"),
    "selector": _text("JMS selector of the messages"),
    "no_local": {"description": "Leave out messages of the same client id"},
    "shared": {"description": "Whether several consumers share the subscription"},
    "user": _text("User who may use the subscription; empty: every user"),
}
_ACTIONS: Final[dict[tuple[str, str], Operation]] = {
    ("POST", "/queues/create"): Operation(
        "Create a queue that stays while it is unused", {200: answers.CreatedAnswer}, arguments={"name": _NAME}, errors=(409,)
    ),
    ("POST", "/queues/delete"): Operation(
        "Delete a queue with its messages", {200: answers.DeletedAnswer}, arguments={"name": _NAME, "force": _FORCE}, errors=(404, 409)
    ),
    ("POST", "/queues/purge"): Operation(
        "Remove messages of a queue", {200: answers.PurgedAnswer},
        arguments={"name": _NAME, "selector": _SELECTOR, "ids": _IDS}, errors=(404,),
    ),
    ("POST", "/queues/move"): Operation(
        "Move messages to another queue", {200: answers.MovedAnswer},
        arguments={"name": _NAME, "to": _text("Name of the other queue"), "selector": _SELECTOR, "ids": _IDS}, errors=(404, 409),
    ),
    ("POST", "/dead-letters/return"): Operation(
        "Return dead letters to their queues", {200: answers.ReturnedAnswer},
        arguments={"queue": _text(_QUEUE.about), "selector": _SELECTOR, "ids": _IDS}, errors=(404, 409),
    ),
    ("POST", "/messages/send"): Operation("Send a message", {200: answers.SentAnswer}, arguments=_SENT, errors=(409, 413)),
    ("POST", "/subscriptions/create"): Operation(
        "Create a durable subscription", {200: answers.CreatedAnswer}, arguments=_SUBSCRIPTION, errors=(409,)
    ),
    ("POST", "/subscriptions/delete"): Operation(
        "Delete a subscription with its messages", {200: answers.DeletedAnswer}, arguments={"name": _NAME, "force": _FORCE},
        errors=(404, 409),
    ),
    ("POST", "/connections/close"): Operation(
        "Close connections", {200: answers.ClosedAnswer},
        arguments={"id": _text("HOST:PORT of a connection, or a client id")}, errors=(404,),
    ),
    ("POST", "/branches/commit"): Operation(
        "Commit a prepared branch without its manager", {200: answers.ForcedAnswer}, arguments={"xid": _XID}, errors=(404, 409)
    ),
    ("POST", "/branches/rollback"): Operation(
        "Roll back a prepared branch without its manager", {200: answers.ForcedAnswer}, arguments={"xid": _XID}, errors=(404, 409)
    ),
    ("POST", "/branches/forget"): Operation(
        "Forget a branch that an administrator has ended", {200: answers.ForgottenAnswer}, arguments={"xid": _XID}, errors=(404, 409)
    ),
    ("POST", "/ingress/reset"): Operation(
        "Read the ingress topic from its start after it was recreated", {200: answers.ResetAnswer}, errors=(404, 409)
    ),
    ("POST", "/config/reload"): Operation("Read the settings again", {200: answers.ReloadAnswer}),
}  # fmt: skip
_CONSOLE: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/"): Operation("Lead a browser to the console", {307: NOTHING}),
    ("GET", "/console"): Operation("Lead a browser to the console", {307: NOTHING}),
    ("GET", "/console/{file}"): Operation("A file of the console", {200: FILE}),
    ("GET", "/console/session"): Operation("Who is logged in at the console", {200: answers.SessionAnswer}),
    ("POST", "/console/login"): Operation("Begin a session of the console, with credentials", {200: answers.SessionAnswer}, errors=(401,)),
    ("POST", "/console/logout"): Operation("End the session of the console", {200: dict[str, Any]}, errors=(401,)),
}
_PLAN: Final[Mapping[str, Schema]] = {
    "to": {"type": ["string", "integer"], "description": "For a plan: earliest, latest, an offset or a timestamp"},
    "shift_by": {"type": "integer", "description": "For a plan, in place of `to`: number of records"},
    "topic": _text("For a plan: topic of the source; all by default"),
    "partition": {"type": "integer", "minimum": 0, "description": "For a plan: partition of `topic`; all by default"},
    "token": _text("To store a plan for the driver: the plan's token"),
    "discard": {"type": "boolean", "description": "With `token`: messages may be lost", "default": False},
}

_RESET: Final = (
    Parameter("topic", _PLAN["topic"]["description"]),
    Parameter("partition", _PLAN["partition"]["description"], {"type": "integer", "minimum": 0}),
    Parameter("token", _PLAN["token"]["description"]),
    Parameter("discard", _PLAN["discard"]["description"], {"type": "boolean", "default": False}),
)

_RESTART: Final = (
    Parameter("includeTasks", "As in Kafka Connect; a pipeline has one task, which is restarted", {"type": "boolean", "default": False}),
    Parameter("onlyFailed", "Do nothing if the task has not failed", {"type": "boolean", "default": False}),
)


def _of_pipelines(kind: str, collection: str) -> dict[tuple[str, str], Operation]:
    one, a = f"{collection}/{{name}}", "an" if kind == "ingress" else "a"
    wanted = {
        verb: Operation(f"Store that {a} {kind} shall {what}", {202: pipeline_answers.WantedAnswer}, errors=(404, 409))
        for verb, what in (("pause", "pause"), ("resume", "run"), ("stop", "stop"))
    }
    return {
        ("GET", collection): Operation(
            f"All pipelines of the kind {kind} with their states; an object by name with `expand`, as in Kafka Connect",
            {200: list[pipeline_answers.PipelineAnswer] | dict[str, pipeline_answers.ExpandedPipeline]},
            (Parameter("expand", "What to answer about each name", {"type": "array", "items": {"enum": ["status", "info"]}}),),
        ),
        ("GET", one): Operation(f"The definition of {a} {kind}", {200: pipeline_answers.DefinitionAnswer}, errors=(404,)),
        ("GET", f"{one}/status"): Operation(
            f"State, lag and last error of {a} {kind}", {200: pipeline_answers.PipelineAnswer}, errors=(404,)
        ),
        ("GET", f"{one}/config"): Operation(f"The settings of {a} {kind}, as in Kafka Connect", {200: dict[str, Any]}, errors=(404,)),
        **{("PUT", f"{one}/{verb}"): operation for verb, operation in wanted.items()},
        ("POST", f"{one}/restart"): Operation(
            f"Restart the task of {a} {kind}", {202: pipeline_answers.RestartAnswer}, _RESTART, errors=(404, 409)
        ),
        ("GET", f"{one}/offsets"): Operation(f"The positions of {a} {kind}", {200: pipeline_answers.OffsetsAnswer}, errors=(404,)),
        ("PATCH", f"{one}/offsets"): Operation(
            f"Plan a move of the positions of {a} {kind}, or store a plan",
            {200: pipeline_answers.PlanAnswer, 202: pipeline_answers.ConfirmedAnswer},
            body=_object(_PLAN),
            errors=(404, 409),
        ),
        ("DELETE", f"{one}/offsets"): Operation(
            f"Plan a reset of the positions of {a} {kind} to where its setting `start` says, or store a plan",
            {200: pipeline_answers.PlanAnswer, 202: pipeline_answers.ConfirmedAnswer},
            _RESET,
            errors=(404, 409),
        ),
    }


_REVISION: Final = Parameter(REVISION, "Revision that is replaced, 0 for none; 409 if it is another one", {"type": "integer", "minimum": 0})


def _definitions_of(kind: str, collection: str, model: type[Divert | Ingress], needed: str) -> dict[tuple[str, str], Operation]:
    """Return the operations that define pipelines of a kind at run time. ``needed`` says which settings must be given."""
    found = model.model_json_schema()["properties"]
    allowed = {name: schema for name, schema in found.items() if name not in refused(kind)}
    given = {name: {key: each for key, each in schema.items() if key != "title"} for name, schema in allowed.items()}
    config: Schema = {"type": "object", "description": needed, "properties": given, "additionalProperties": False}
    defined: Schema = {
        "type": "object",
        "properties": {"name": _text(f"Name of the {kind}, unique among diverts and ingresses"), "config": config},
        "required": ["name", "config"],
        "additionalProperties": False,
    }
    # No setting is needed, and each may be null.
    nullable = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in given.items()}
    changes: Schema = {"type": "object", "description": "null removes a setting", "properties": nullable, "additionalProperties": False}
    a, errors = ("an", (409,)) if kind == "ingress" else ("a", (409, 503))
    return {
        ("POST", collection): Operation(
            f"Create {a} {kind} at run time", {202: pipeline_answers.PipelineDefinedAnswer}, body=defined, errors=errors
        ),
        ("PUT", f"{collection}/{{name}}/config"): Operation(
            f"Replace the settings of {a} {kind}, or create it", {202: pipeline_answers.PipelineDefinedAnswer}, (_REVISION,), body=config,
            errors=errors,
        ),
        ("PATCH", f"{collection}/{{name}}/config"): Operation(
            f"Change some settings of {a} {kind} that was defined at run time", {202: pipeline_answers.PipelineDefinedAnswer}, (_REVISION,),
            body=changes, errors=(404, *errors),
        ),
        ("DELETE", f"{collection}/{{name}}"): Operation(
            f"Stop {a} {kind} that was defined at run time, and forget its positions", {202: pipeline_answers.PipelineDeletedAnswer},
            errors=(404, 409),
        ),
    }  # fmt: skip


_DEFINITIONS: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/brokers"): Operation("The brokers of the journal, and which one is elected", {200: list[answers.BrokerAnswer]}),
    ("GET", "/flow"): Operation("All pipelines with their states and rates, and the queues at their ends", {200: answers.FlowAnswer}),
    ("GET", "/definitions/pipelines"): Operation(
        "The diverts and ingresses that are defined at run time", {200: pipeline_answers.PipelineDefinitionsAnswer}
    ),
    **_definitions_of("divert", "/diverts", Divert, "`from` is needed"),
    **_definitions_of("ingress", "/ingresses", Ingress, "`topics` or `pattern` is needed"),
}

_LETTERS: Final[Mapping[str, Schema]] = {
    "places": {
        "type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": PLACES_MAX, "description": "Places, each PARTITION:OFFSET",
    },
    "all": {"type": "boolean", "description": "All dead letters, in place of places or a filter"},
    "pipeline": _text("Of this pipeline: divert:NAME or ingress:NAME"),
    "reason": _text("With this text in the name or message of the error"),
    "since_ms": {"type": "integer", "minimum": 0, "description": "Of messages or records from this time on, in ms since 1970"},
    "until_ms": {"type": "integer", "minimum": 0, "description": "Of messages or records from before this time, in ms since 1970"},
    "headers": {"type": "object", "additionalProperties": {"type": "string"}, "description": "With these headers"},
    "upto": _text("Value of a list of dead letters: none that is newer than the list"),
    "accept_lost_marks": {
        "type": "boolean", "default": False, "description": "Also if it is not known which of them were done before, see the guide",
    },
}  # fmt: skip
_JOB: Final = _object(_LETTERS)
_DISCARD: Final = _object({**_LETTERS, "confirm": {"const": True, "description": "Must be true"}}, "confirm")
_REDRIVE: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/redrive/letters"): Operation(
        "Dead letters of pipelines that wait", {200: pipeline_answers.LettersAnswer},
        (
            Parameter("pipeline", "Of this pipeline: divert:NAME or ingress:NAME"),
            Parameter("reason", "With this text in the name or message of the error"),
            Parameter("since_ms", "Of messages or records from this time on, in ms since 1970", {"type": "integer", "minimum": 0}),
            Parameter("until_ms", "Of messages or records from before this time, in ms since 1970", {"type": "integer", "minimum": 0}),
            Parameter("header", "With these headers, each NAME:VALUE", {"type": "array", "items": {"type": "string"}}),
            Parameter("count", "Maximum number of dead letters", _number(0, redrive.LETTERS_MAX, redrive.LETTERS)),
            Parameter("from", "Only those from this place on: `next` of an earlier answer"),
        ),
    ),
    ("GET", "/redrive/letters/{partition}/{offset}"): Operation(
        "A dead letter of a pipeline with its content", {200: pipeline_answers.LetterContentAnswer}, errors=(400, 404)
    ),
    ("GET", "/redrive/jobs"): Operation("The requests of the last week, and their results", {200: list[pipeline_answers.JobAnswer]}),
    ("POST", "/redrive/run"): Operation(
        "Carry dead letters of pipelines again", {202: pipeline_answers.JobStoredAnswer}, body=_JOB, errors=(404, 409)
    ),
    ("POST", "/redrive/discard"): Operation(
        "Mark dead letters of pipelines as done, without carrying them", {202: pipeline_answers.JobStoredAnswer}, body=_DISCARD,
        errors=(404, 409),
    ),
}  # fmt: skip

#: Operations by method and path.
OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    **_HEALTH, **_STATUS, **_LOOKS, **_ACTIONS, **_of_pipelines("divert", "/diverts"), **_of_pipelines("ingress", "/ingresses"),
    **_DEFINITIONS, **_REDRIVE, **_CONSOLE,
}  # fmt: skip
