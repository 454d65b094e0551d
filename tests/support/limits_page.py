"""The page of limits, made from the constants of the product and their comments: docs/reference/limits.md.

    python -m tests.support.limits_page        # writes the page

The value and the reason of a limit come from the code. This module has its description, and its effect when it is reached.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import bascule
from bascule.config.settings import Settings

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"
SOURCES: Final = Path(bascule.__file__).parent
#: Packages that handle input from peers.
PACKAGES: Final = ("amqp", "broker", "core", "jms", "journal", "server")
HEAD: Final = """# Limits

Everything that a client, an HTTP peer or a message can make the broker store or do has a limit. This page lists each limit with its value,
its reason and the action of the broker when the limit is reached. If a client reaches a limit of the first section, change the client or
the setting. The limits of the other sections are constants: change the client.

`python -m tests.support.limits_page` generates this page from the settings, the constants and the comments on them, and a test compares
the page with them. The page [AMQP](amqp.md#conditions) explains the conditions. The section
[memory and spill files](../guides/operations.md#memory-and-spill-files) explains the limit on all memory. A *turn* is one pass of the event
loop, after which the broker serves other clients ([turns](../internals/turns.md)).
"""

CLOSES: Final = "closes the connection with "
ENDS: Final = "ends the session with "
REFUSES_LINK: Final = "refuses the link with "
REJECTS: Final = "rejects the message with "
DETACHES: Final = "detaches the link with "
DECODE: Final = "`amqp:decode-error`"
RESOURCE: Final = "`amqp:resource-limit-exceeded`"
FIELD: Final = "`amqp:invalid-field`"
FRAMING: Final = f"{CLOSES}`amqp:connection:framing-error`"
REFUSED: Final = f"opens and closes the connection with {RESOURCE}"
ROLLED_BACK: Final = f"rolls the transaction back with {RESOURCE}"
NO_CREDIT: Final = "gives producers no credit"
REFUSED_LOGIN: Final = "refuses the login"
UNWRITTEN: Final = "counts them without a line"
HTTP_400: Final = "answers 400"
DECODE_ANYWHERE: Final = f"in a frame: {CLOSES}{DECODE}; in the header, properties, annotations or footer of a message: {REJECTS}{DECODE}"


class Limit(NamedTuple):
    """A constant, its description, and the broker's reaction when it is reached."""

    module: str
    constant: str
    bounds: str
    effect: str
    unit: str = ""


class Setting(NamedTuple):
    """A setting that is a limit, and the broker's reaction when it is reached."""

    key: str
    effect: str


SETTINGS: Final = (
    Setting("max_connections", REFUSED),
    Setting("max_connections_per_address", REFUSED),
    Setting("max_connections_per_user", REFUSED),
    Setting("max_handshakes", "lets the new connection wait, and closes an old one that takes too long"),
    Setting("max_handshakes_per_address", "lets the new connection wait, and closes an old one of this address that takes too long"),
    Setting("handshake_timeout_s", "closes the connection"),
    Setting("idle_timeout_s", f"{CLOSES}{RESOURCE}"),
    Setting("max_sessions_per_user", f"{ENDS}{RESOURCE}"),
    Setting("max_links_per_user", f"{REFUSES_LINK}{RESOURCE}"),
    Setting("max_transactions_per_user", f"refuses the declare with {RESOURCE}"),
    Setting("max_prepared_branches_per_user", "rolls the transaction back, xaCode 100"),
    Setting("transaction_timeout_s", "rolls the transaction back; its commit is refused with `amqp:transaction:timeout`"),
    Setting("max_queues", f"refuses the link or message with {RESOURCE}"),
    Setting("max_queues_per_user", f"refuses the link or message with {RESOURCE}"),
    Setting("max_durable_subscriptions_per_user", f"{REFUSES_LINK}{RESOURCE}"),
    Setting("max_message_bytes", f"{DETACHES}`amqp:link:message-size-exceeded`"),
    Setting("max_messages_per_s_per_user", "gives producers no credit until the next second"),
    Setting("memory_bytes", f"from 80 % on: gives producers no credit, refuses messages in transactions with {RESOURCE}"),
    Setting("spill_bytes", NO_CREDIT),
    Setting("spill_free_bytes", NO_CREDIT),
    Setting("max_messages", "as `when_full` of the address says"),
    Setting("max_bytes", "as `when_full` of the address says"),
    Setting("max_delivery_attempts", "moves the message to the dead-letter address"),
    Setting("duplicate_window_count", "forgets the oldest ids"),
    Setting("duplicate_window_s", "forgets the ids"),
)

LIMITS: Final = {
    "Connections, sessions and links": (
        Limit("amqp.limits", "SASL_FRAME_SIZE_BYTES_MAX", "a frame of the login", FRAMING, "bytes"),
        Limit("amqp.bearer", "TOKEN_SIZE_BYTES_MAX", "a token", REFUSED_LOGIN, "bytes"),
        Limit("amqp.bearer", "TOKEN_FRAME_SIZE_BYTES_MAX", "a frame of the login, with `[broker.oidc]`", FRAMING, "bytes"),
        Limit("amqp.bearer", "TOKEN_PRE_OPEN_BYTES_MAX", "bytes before the open, with `[broker.oidc]`", f"{CLOSES}{RESOURCE}", "bytes"),
        Limit("server.tokens", "USER_LENGTH_MAX", "the name of a user in a token", REFUSED_LOGIN, "characters"),
        Limit("server.tokens", "TIME_S_MAX", "a time in a token", REFUSED_LOGIN, "s"),
        Limit("server.key_set", "KEY_ID_LENGTH_MAX", "the name of a key in a token", REFUSED_LOGIN, "characters"),
        Limit("server.logins", "REQUESTS_WAITING_MAX", "requests to the admin server that wait for an unknown key", "answers 503"),
        Limit("server.key_set", "KEY_WAIT_S", "the time of a login that waits for an unknown key", REFUSED_LOGIN, "s"),
        Limit("amqp.scram", "CLIENT_NONCE_BYTES_MAX", "the nonce of a login by SCRAM", REFUSED_LOGIN, "bytes"),
        Limit("amqp.limits", "SASL_ROUNDS_MAX", "challenges of a login", f"{CLOSES}{RESOURCE}"),
        Limit("server.usage", "ALLOWANCES_MAX", "users without clients whose allowance of messages a second is kept", "forgets the oldest"),
        Limit("server.ingress_refusals", "LOGGED_MAX", "refusals of messages of ingresses that are logged, each once", "logs no more"),
        Limit("server.login_delays", "FREE_FAILURES", "failed logins of a user from an address", "delays further logins of the pair"),
        Limit("server.login_delays", "ADDRESS_FREE_FAILURES", "failed logins from an address", "delays further logins from there"),
        Limit("server.login_delays", "USER_FREE_FAILURES", "failed logins of a user", "delays further logins of the user"),
        Limit("server.login_delays", "DELAY_S_MAX", "the delay of a login", "refuses the login, and does not check its password", "s"),
        Limit("server.login_delays", "ENTRIES_MAX", "users, addresses and pairs of both with failed logins, each", "forgets the oldest"),
        Limit("amqp.limits", "PRE_OPEN_FRAME_SIZE_BYTES_MAX", "the open frame", FRAMING, "bytes"),
        Limit("amqp.limits", "PRE_OPEN_BYTES_MAX", "bytes before the open", f"{CLOSES}{RESOURCE}", "bytes"),
        Limit("amqp.limits", "CLOSE_TIMEOUT_S", "the time to answer a close", "closes the socket", "s"),
        Limit("amqp.limits", "HEARTBEAT_INTERVAL_S_MIN", "the time between two heartbeats, at least", "sends no more of them", "s"),
        Limit("amqp.limits", "FRAME_SIZE_BYTES_MIN", "`max-frame-size` of a peer, at least", f"{CLOSES}{FIELD}", "bytes"),
        Limit("amqp.limits", "FRAME_SIZE_BYTES_DEFAULT", "a frame", FRAMING, "bytes"),
        Limit("amqp.limits", "DELIVERY_FRAME_SIZE_BYTES_MAX", "a frame of a message to a client", "sends more frames", "bytes"),
        Limit("amqp.limits", "PERFORMATIVE_SIZE_BYTES_MAX", "a frame without its payload", f"{CLOSES}{RESOURCE}", "bytes"),
        Limit("amqp.limits", "PERFORMATIVE_ITEMS_MAX", "values in a frame without its payload", f"{CLOSES}{DECODE}"),
        Limit("amqp.limits", "CONTAINER_ID_LENGTH_MAX", "a container id", f"{CLOSES}{FIELD}", "characters"),
        Limit("amqp.limits", "CHANNEL_MAX_DEFAULT", "the highest channel", FRAMING),
        Limit("amqp.limits", "HANDLE_MAX_DEFAULT", "the highest handle of a session", FRAMING),
        Limit("amqp.limits", "LINKS_MAX", "links of a connection", f"{ENDS}{RESOURCE}"),
        Limit("amqp.limits", "LINK_NAME_LENGTH_MAX", "a link's name", f"{ENDS}{FIELD}", "characters"),
        Limit("amqp.limits", "INCOMING_WINDOW_FRAMES", "transfer frames in a window", f"{ENDS}`amqp:session:window-violation`"),
        Limit("amqp.limits", "UNSETTLED_PER_SESSION_MAX", "unsettled deliveries, each way", f"{ENDS}{RESOURCE}; sends no more"),
        Limit("amqp.limits", "DELIVERY_TAG_SIZE_BYTES_MAX", "a delivery tag", f"{ENDS}{FIELD}", "bytes"),
        Limit("amqp.limits", "TRANSACTION_ID_SIZE_BYTES_MAX", "a transaction id", f"{CLOSES}{DECODE}", "bytes"),
        Limit("amqp.limits", "PARTIAL_BYTES_MAX", "incomplete messages of a connection", f"{CLOSES}{RESOURCE}", "bytes"),
        Limit("amqp.limits", "DESCRIPTION_LENGTH_MAX", "the description of a peer's error", "cuts it", "characters"),
        Limit("server.links", "WRITE_BUFFER_BYTES", "messages written for a client and not read", "delivers no more to it", "bytes"),
        Limit("server.connection", "UNREAD_ANSWERS_BYTES", "answers written for a client and not read", "reads no more from it", "bytes"),
        Limit("server.certificate_users", "CERTIFICATE_NAME_LENGTH_MAX", "a name in a certificate", "refuses the login", "characters"),
        Limit("server.websocket", "UNREAD_PONGS_BYTES", "output that a client with pings has not read", "answers no ping", "bytes"),
        Limit("server.links", "PRODUCER_CREDIT", "messages sent without new credit", f"{DETACHES}`amqp:link:transfer-limit-exceeded`"),
    ),
    "Values in frames and messages": (
        Limit("amqp.limits", "DEPTH_MAX", "nesting of values", DECODE_ANYWHERE),
        Limit("amqp.limits", "ITEMS_MAX", "values in one message", "the reader refuses it"),
        Limit("amqp.limits", "ZERO_WIDTH_ITEMS_MAX", "elements of an array that take no bytes", DECODE_ANYWHERE),
        Limit("amqp.limits", "NUMBER_KEYS_MAX", "keys of a map that are not text", DECODE_ANYWHERE),
        Limit("amqp.limits", "SYMBOL_SIZE_BYTES_MAX", "a symbol", DECODE_ANYWHERE, "bytes"),
    ),
    "Messages": (
        Limit("core.topics", "MESSAGE_BYTES_MAX", "`max_message_bytes`, a transaction", ROLLED_BACK, "bytes"),
        Limit("journal.records", "MESSAGES_PER_RECORD_MAX", "messages of a transaction", ROLLED_BACK),
        Limit("jms.checks", "HEADER_SIZE_BYTES_MAX", "the header", f"{REJECTS}{DECODE}", "bytes"),
        Limit("jms.checks", "ANNOTATIONS_SIZE_BYTES_MAX", "annotations, and the footer, each", f"{REJECTS}{DECODE}", "bytes"),
        Limit("jms.checks", "ANNOTATION_ITEMS_MAX", "values in annotations, and in the footer", f"{REJECTS}{DECODE}"),
        Limit("jms.checks", "FIELD_SIZE_BYTES_MAX", "an id, address, text or property name", f"{REJECTS}{DECODE}", "bytes"),
        Limit("jms.checks", "APPLICATION_PROPERTIES_MAX", "application properties", f"{REJECTS}{DECODE}"),
        Limit("jms.checks", "APPLICATION_PROPERTIES_SIZE_BYTES_MAX", "application properties together", f"{REJECTS}{DECODE}", "bytes"),
        Limit("jms.checks", "BODY_SECTIONS_MAX", "sections of a body", f"{REJECTS}{DECODE}"),
        Limit("jms.sections", "TIME_MAX_MS", "a delivery time or delay", f"{REJECTS}{DECODE}", "ms"),
        Limit("jms.annotate", "ANNOTATION_BYTES_MAX", "an annotation that a move adds", "omits it", "bytes"),
        Limit("broker.administration", "TEXT_MAX", "an annotation text in a dead letter", "cuts it", "characters"),
    ),
    "Addresses and selectors": (
        Limit("core.destination", "ADDRESS_MAX", "an address", f"{REFUSES_LINK}{FIELD}", "characters"),
        Limit(
            "core.access", "PATTERN_WORDS_MAX", "words of a topic with wildcards, with `[[permission]]`",
            f"{REFUSES_LINK}`amqp:unauthorized-access`",
        ),
        Limit("core.defaults", "QUEUES_MAX", "`broker.max_queues`", "the setting is refused"),
        Limit("core.defaults", "EXCLUSIVE_DIVERTS_MAX", "exclusive diverts that are enabled", "the settings are refused"),
        Limit("jms.selector.lexer", "TEXT_MAX", "a selector", f"{REFUSES_LINK}{FIELD}", "characters"),
        Limit("jms.selector.lexer", "TOKENS_MAX", "identifiers, literals and operators of a selector", f"{REFUSES_LINK}{FIELD}"),
        Limit("jms.selector.lexer", "CHOICES_MAX", "choices of all IN lists of a selector", f"{REFUSES_LINK}{FIELD}"),
        Limit("jms.selector.parser", "PATTERNS_LENGTH_MAX", "LIKE patterns of a selector together", f"{REFUSES_LINK}{FIELD}", "characters"),
        Limit("jms.selector.parser", "DEPTH_MAX", "nesting of expressions in a selector", f"{REFUSES_LINK}{FIELD}"),
        Limit("jms.selector.parser", "STEPS_MAX", "steps to evaluate a selector for a message", f"{REFUSES_LINK}{FIELD}"),
        Limit(
            "broker.addresses", "SELECTOR_STEPS_MAX", "steps of the selectors of all subscriptions of an address",
            f"{REFUSES_LINK}{RESOURCE}",
        ),
        Limit("broker.fan_out", "LANE_MAX", "non-persistent messages that enter more than 1,000 queues each", "lets the sender wait"),
        Limit("broker.ready", "SELECTORS_MAX", "different selectors of the consumers of a queue", f"{REFUSES_LINK}{RESOURCE}"),
        Limit(
            "broker.addresses", "PATTERN_STEPS_MAX", "steps to compare an address with all subscriptions with wildcards",
            f"{REFUSES_LINK}{RESOURCE}",
        ),
        Limit("jms.selector.like", "LIKE_TEXT_MAX", "a property that LIKE evaluates", "the comparison is unknown", "characters"),
    ),
    "Distributed transactions": (
        Limit("server.management", "REQUEST_SIZE_BYTES_MAX", "a request to `$management`", "answers with status 400", "bytes"),
        Limit("core.xid", "PART_BYTES_MAX", "gtrid and bqual", "answers with status 400", "bytes"),
        Limit("core.xid", "FORMAT_ID_MAX", "a format id", "answers with status 400"),
        Limit("broker.prepared_use", "PREPARED_MAX", "prepared branches", "rolls the transaction back, xaCode 100"),
        Limit("broker.prepared_use", "PREPARED_BYTES_MAX", "prepared branches together", "rolls the transaction back, xaCode 100", "bytes"),
        Limit("broker.branches", "ENDED_MAX", "outcomes remembered", "forgets the oldest"),
    ),
    "Admin HTTP": (
        Limit("server.audit", "VALUE_LENGTH_MAX", "a value in a line of the audit", "cuts it", "characters"),
        Limit("server.audit", "WAITING_LINES_MAX", "lines of the audit that could not be written", "drops the oldest one"),
        Limit("server.admin_http", "CONNECTIONS_MAX", "connections", "closes the oldest one without a login"),
        Limit("server.admin_http", "WAITING_MAX", "connections that wait for a request", "closes the oldest"),
        Limit("server.admin_http", "WAITING_PER_ADDRESS_MAX", "such connections of one remote address", "closes the oldest one"),
        Limit("server.admin_http", "REQUEST_TIMEOUT_S", "the time of a request, and of reading its answer", "closes the connection", "s"),
        Limit("server.admin_http", "KEEP_ALIVE_S", "an idle connection", "closes it", "s"),
        Limit("server.admin_http", "PIECE_BYTES", "bytes of a request parsed in one turn", "continues in the next turn", "bytes"),
        Limit("server.admin_http", "HEADERS_BYTES_MAX", "request line and headers", HTTP_400, "bytes"),
        Limit("server.admin_arguments", "BODY_BYTES_MAX", "the body of a request", HTTP_400, "bytes"),
        Limit("server.admin_arguments", "DEPTH_MAX", "levels of arrays and objects in the body of a request", HTTP_400),
        Limit("server.admin_arguments", "DIGITS_MAX", "characters of a number in a request", HTTP_400),
        Limit("server.admin", "DEAD_LETTERS_MAX", "dead letters listed at once", HTTP_400),
        Limit("server.admin", "PAGES_AT_ONCE", "pages about all queues, consumers or connections at once", "makes the next page later"),
        Limit("server.admin", "STREAMS_AT_ONCE", "`/metrics` and long JSON answers at once", "sends the next answer later"),
        Limit("server.admin", "STREAM_WAIT_S", "the time that a request waits for one of them", "answers 503", "s"),
        Limit(
            "server.answer_places", "SLOW_AFTER_S", "reading one of them while a user or address with at least two fewer of them waits",
            "closes the connection", "s",
        ),
        Limit("server.exposition", "PIECE_BYTES", "a piece of the text of `/metrics`", "makes the next piece later", "bytes"),
        Limit("server.json_pieces", "JSON_PIECE_BYTES", "a piece of a JSON answer", "makes the next piece later", "bytes"),
        Limit("server.json_pieces", "ENCODED_AT_ONCE", "entries of a JSON answer encoded by one call", "encodes the others later"),
        Limit("server.pieces_answer", "ANSWER_TIMEOUT_S", "reading a long answer", "closes the connection", "s"),
        Limit("server.pipelines", "REQUESTS_AT_ONCE", "requests about pipelines at once", "makes the next answer later"),
        Limit("server.pipeline_definitions", "DEFINITIONS_MAX", "pipelines defined at run time", "answers 409"),
        Limit("kafka.control", "DELETIONS_MAX", "records of deleted pipelines without report and positions", "deletes the oldest"),
        Limit("server.pipeline_definitions", "DEFINITION_BYTES_MAX", "the settings of a pipeline defined at run time", HTTP_400, "bytes"),
        Limit("core.linear_regex", "INSTRUCTIONS_MAX", "steps of a regular expression for each character of a text", HTTP_400),
        Limit("core.linear_regex", "PATTERN_LENGTH_MAX", "characters of a regular expression", HTTP_400),
        Limit("core.linear_regex", "CASELESS_CHARACTERS_MAX", "characters of classes in a regular expression with `(?i)`", HTTP_400),
        Limit("core.linear_regex", "GROUP_DEPTH_MAX", "levels of groups in a regular expression", HTTP_400),
        Limit("server.redrive", "LETTERS_MAX", "dead letters of pipelines in one answer", HTTP_400),
        Limit("server.redrive", "SHOWN_MAX", "characters of a value or header of a dead letter that an answer shows", "cuts the rest"),
        Limit("server.redrive", "JOBS_MAX", "redrives that no driver has finished", "answers 409"),
        Limit("server.pipeline_offsets", "PLANS_MAX", "plans of moved positions that wait for a confirmation", "forgets the oldest plan"),
        Limit("server.listing", "PART_ENTRIES_MAX", "entries of a part of a list", HTTP_400),
        Limit("server.listing", "SEARCH_MAX", "a text to search a list for", HTTP_400, "characters"),
        Limit("server.listing", "PART_OFFSET_MAX", "the offset of a part of a list", HTTP_400),
        Limit("server.looks", "LINKS_SHOWN_MAX", "links of a connection that an answer shows", "shows the first ones"),
        Limit("server.browsing", "PAGE_MESSAGES_MAX", "messages of a page", HTTP_400),
        Limit("server.browsing", "PAGE_BYTES", "size of the messages of a page", "ends the page", "bytes"),
        Limit("server.browsing", "LOOKED_AT_MAX", "messages that a search looks at", "ends the page"),
        Limit("server.browsing", "LOOKED_AT_BYTES", "bytes that a search looks at", "ends the page", "bytes"),
        Limit("server.browsing", "MESSAGES_PER_TURN", "messages looked at in one turn", "continues in the next turn"),
        Limit("server.browsing", "SHOWN_MAX", "a text of a message in a page", "cuts it", "characters"),
        Limit("server.browsing", "SHOWN_IN_DETAIL_MAX", "a text of a message in detail", "cuts it", "characters"),
        Limit("jms.sections", "PROPERTIES_READ_BYTES_MAX", "properties whose message id the audit names", "names no id", "bytes"),
        Limit("server.browsing", "SEARCHED_BYTES_PER_TURN", "bytes searched in one turn", "continues in the next turn", "bytes"),
        Limit("server.shown_messages", "DECODED_BYTES_MAX", "a body of a shown message", "cuts it, or shows only bytes", "bytes"),
        Limit("server.shown_messages", "ENTRIES_SHOWN_MAX", "properties, or entries of a map or stream", "shows the first ones"),
        Limit("server.shown_messages", "NESTED_LEVELS_MAX", "levels of a nested value", "shows the first ones"),
        Limit("server.shown_messages", "NESTED_SHOWN_MAX", "values of a nested value", "shows the first ones"),
        Limit("server.browsing", "TEXT_MAX", "a text to search messages for", HTTP_400, "characters"),
        Limit("server.message_life", "SEARCHES_MAX", "searches for the life of a message at once", "answers 503"),
        Limit("server.message_life", "SEARCH_S", "the time of such a search", "ends the search", "s"),
        Limit("server.message_life", "SEARCHED_RECORDS_MAX", "records of all topics that it reads", "ends the search"),
        Limit("server.message_life", "SEARCHED_BYTES_MAX", "bytes of records of all topics that it reads", "ends the search", "bytes"),
        Limit("server.message_life", "SEARCHED_TARGET_RECORDS_MAX", "records of a target partition that it reads", "ends the search there"),
        Limit("server.message_life", "PAUSE_MAX_S", "a pause of such a search", "goes on", "s"),
        Limit("server.message_life", "PERIOD_MAX_S", "the time before now that it can begin at", HTTP_400, "s"),
        Limit("timeline.wanted", "ID_LENGTH_MAX", "the message id of such a search", HTTP_400, "characters"),
        Limit("timeline.life", "MESSAGES_MAX", "messages with the id", "counts the others"),
        Limit("timeline.life", "BRANCHES_MAX", "prepared transactions with the message", "counts the others"),
        Limit("timeline.life", "EVENTS_MAX", "events of the journal about them", "counts the others"),
        Limit("timeline.audit_lines", "AUDIT_EVENTS_MAX", "events of the audit about them", "counts the others"),
        Limit("timeline.question", "OUTCOMES_MAX", "records of diverts for them", "counts the messages of the others"),
        Limit("timeline.targets", "RECORDS_LISTED_MAX", "records of one divert for one message", "shows the first ones"),
        Limit("server.browsing", "IDS_MAX", "messages chosen for an action", HTTP_400),
        Limit("server.sending_messages", "TIME_MS_MAX", "time to live and delay of a message of an administrator", HTTP_400, "ms"),
        Limit("server.console_sessions", "IDLE_S", "a session of the console without a request", "ends it", "s"),
        Limit("server.console_sessions", "LIFE_S", "a session of the console", "ends it", "s"),
        Limit("server.console_sessions", "SESSIONS_MAX", "sessions of the console", "ends the one that was used longest ago"),
        Limit("server.console_sessions", "SESSIONS_PER_USER_MAX", "sessions of one user", "ends the one that was used longest ago"),
        Limit(
            "threads.metrics_server", "CONNECTIONS_MAX", "connections to the metrics of a driver or of your program",
            "ends the oldest one",
        ),
        Limit("threads.metrics_server", "PEER_TIMEOUT_S", "a silence of such a connection", "ends the connection", "s"),
        Limit("pipelines.waiting_choice", "WAITING_DIVERTS_MAX", "diverts with waiting tasks", "carries further ones in micro-batches"),
        Limit("pipelines.exchange", "ANSWER_S", "the time of a transformation for one batch", "carries the batch in a micro-batch", "s"),
        Limit("pipelines.lineage_sender", "EVENTS_MAX", "OpenLineage events that wait for the receiver", "drops further ones"),
        Limit("broker.administration", "REASONS_MAX", "reasons in the answer of an action", 'counts the others as "other reasons"'),
    ),
    "Parts of `broker.memory_bytes`": (
        Limit("broker.memory", "BODIES_SHARE", "message bodies", "moves bodies to the spill files", "%"),
        Limit(
            "broker.memory", "FIRST_BODIES_SHARE", "message bodies at a broker's start, and bodies behind as many bytes of their queues",
            "moves bodies to the spill files", "%",
        ),
        Limit("broker.memory", "TRANSACTIONS_SHARE", "open transactions", f"refuses messages in transactions with {RESOURCE}", "%"),
        Limit("broker.memory", "BRANCHES_SHARE", "prepared branches", "rolls the transaction back, xaCode 100", "%"),
        Limit("server.client_links", "ATTACHES_BYTES_MAX", "attaches of a connection that wait for the journal", "reads later", "bytes"),
        Limit("server.client_links", "ATTACHES_SHORT_BYTES_MAX", "such attaches while producers are blocked", "reads later", "bytes"),
        Limit("server.spill", "WAITING_SHARE", "large bodies that wait to be written to spill files", "keeps them in memory", "%"),
        Limit("broker.memory", "SELECTORS_SHARE", "selectors", f"{REFUSES_LINK}{RESOURCE}", "%"),
        Limit("broker.memory", "QUEUES_SHARE", "queues and subscriptions of users", f"refuses the link or message with {RESOURCE}", "%"),
        Limit("broker.memory", "CONNECTIONS_SHARE", "connections, sessions and links", f"refuses them with {RESOURCE}", "%"),
        Limit("broker.memory", "FORGET_AT", "all parts together, while duplicate windows use more than their share", "forgets ids", "%"),
        Limit("broker.memory", "WINDOWS_SHARE", "duplicate windows", "forgets the oldest ids of the longest windows", "%"),
        Limit("broker.memory", "CACHES_SHARE", "caches", "empties them", "%"),
        Limit("broker.memory", "IN_FLIGHT_SHARE", "journal records in flight", "reads no more from clients", "%"),
        Limit("broker.memory", "ACTIONS_SHARE", "answers that wait for the journal", "reads nothing more from clients", "%"),
        Limit("server.memory", "PARTIAL_SHARE", "incomplete messages", f"{DETACHES}{RESOURCE}, the slowest first", "%"),
        Limit("server.memory", "UNANSWERED_MAX", "ends that a client does not answer", "closes it if its user has no memory left"),
        Limit("server.memory", "FRAMES_SHARE", "incomplete frames", "closes connections whose frame has not ended for 10 s", "%"),
        Limit("server.memory", "BUFFERS_SHARE", "unread output of clients", "closes connections that have read nothing for 10 s", "%"),
    ),
    "Shares of one user": (
        Limit(
            "broker.fair_shares", "USER_SHARE", "transactions, prepared branches, patterns, selectors, memory of queues and connections",
            "as at the limit of all users together", "%",
        ),
        Limit("broker.fair_shares", "SPARE", "the last part of these limits, and the part beyond them", "the same", "%"),
    ),
    "Caches, and work in one turn": (
        Limit("broker.duplicates", "WINDOWS_MAX", "addresses with a duplicate window", "drops the half that was used least recently"),
        Limit("broker.duplicates", "KEPT_IDS_MIN", "ids of a window, at least, while memory is short", "forgets no more ids"),
        Limit("broker.duplicates", "UNUSED_S", "a window without new ids, while windows use twice their share", "drops it", "s"),
        Limit("broker.addresses", "ROUTES_MAX", "routes of addresses", "computes them again"),
        Limit("server.interruptions", "REMEMBERED_MAX", "clients remembered after an interruption", "forgets the oldest"),
        Limit("server.interruptions", "REMEMBERED_BYTES_MAX", "their names together", "forgets the oldest", "bytes"),
        Limit("server.uncaught", "LINES_PER_S", "lines in the log for contained errors in a second", UNWRITTEN),
        Limit("server.refusal_limits", "LINES_AT_ONCE", "lines about refusals of one kind from an address, at once", UNWRITTEN),
        Limit("server.refusal_limits", "LINES_PER_S", "further such lines from an address per second", UNWRITTEN),
        Limit("server.refusal_limits", "ALL_LINES_AT_ONCE", "lines about refusals before a login, at once", UNWRITTEN),
        Limit("server.refusal_limits", "ALL_LINES_PER_S", "further such lines per second", UNWRITTEN),
        Limit("server.refusal_limits", "ADDRESSES_MAX", "kinds and addresses of such refusals", "adds the oldest to the others"),
        Limit("server.audit", "RETRIED_LINES", "lines of the audit written again in one turn", "continues in the next turn"),
        Limit("server.connection", "TURN_S", "the time of a client's frames in one turn", "continues in the next turn", "s"),
        Limit("server.client_turns", "SLICE_S", "work on all links of a client, in one turn", "continues in the next turn", "s"),
        Limit("server.client_turns", "OUTPUT_S", "the time of all connections' output in one turn", "continues in the next turn", "s"),
        Limit("broker.turns", "TURN_STEPS", "steps of long work in one turn of the event loop", "continues in the next turn"),
        Limit("broker.delivery", "DUE_MAX", "actions of the schedule in one turn", "continues in the next turn"),
        Limit("broker.delivery", "COUNTS_MAX", "delivery counts in one journal entry", "writes another entry"),
        Limit("server.links", "BROWSED_STEPS", "steps of a browser in one turn", "continues in the next turn"),
        Limit("server.epoch", "IN_FLIGHT_BYTES_MAX", "bytes of journal records in flight", "reads nothing more from clients", "bytes"),
        Limit("journal.fence", "IN_FLIGHT_MAX", "appends to the journal in flight", "collects the next record"),
    ),
    "Connections of standbys": (
        Limit("server.standbys", "PENDING_MAX", "connections without a greeting", "closes the oldest connection"),
        Limit("server.standbys", "STANDBYS_MAX", "standbys that are connected", "closes the connection"),
        Limit("server.standbys", "LINE_BYTES_MAX", "the greeting of a standby", "closes the connection", "bytes"),
    ),
}  # fmt: skip

#: Constants with MAX in their names that limit nothing that a peer of the broker can cause.
OTHERS: Final = {
    "amqp.composite.UINT_MAX": "the range of a type",
    "amqp.limits.HANDSHAKE_TIMEOUT_S": "a default that broker.handshake_timeout_s replaces",
    "amqp.limits.MESSAGE_SIZE_BYTES_DEFAULT": "a default that broker.max_message_bytes replaces",
    "amqp.limits.UNLIMITED": "a default that server.pieces.DELIVERIES_PER_PIECE and FRAMES_PER_PIECE_BYTES replace",
    "amqp.performatives.UINT_MAX": "the range of a type",
    "amqp.performatives.USHORT_MAX": "the range of a type",
    "amqp.verifiers.ITERATIONS_MAX": "bounds what a server can ask of the client",
    "amqp.verifiers.SALT_BYTES_MAX": "bounds what the owner may configure",
    "amqp.verifiers.SHAPES_MAX": "how many numbers of iterations an unknown user may seem to have",
    "server.admin_access.PORT_MAX": "the range of the number of a port",
    "server.console_sessions.PORT_DIGITS_MAX": "how long the number of a port can be",
    "server.redrive.NUMBER_MAX": "the range of an offset or time",
    "server.pipeline_offsets.PARTITION_MAX": "the range of a number of a partition",
    "server.redrive.PAUSE_MAX_S": "how long a search pauses between its steps",
    "server.key_set.KEYS_MAX": "bounds what the provider of tokens brings",
    "server.key_source.DOCUMENT_SIZE_BYTES_MAX": "bounds what the provider of tokens brings",
    "amqp.unsettled.LOST_MAX": "how many deliveries of ended links a session remembers; more are forgotten",
    "amqp.unsettled.SETTLED_LISTED_MAX": "when a list of ids is rebuilt",
    "amqp.unsettled.UINT_MAX": "the range of a type",
    "broker.takeover.RECONNECT_MAX_S": "the longest pause before a standby connects again",
    "broker.takeover.SEEK_MAX_S": "the longest pause before a standby seeks the elected broker again",
    "broker.takeover.TEXT_MAX": "bounds what Kafka brings",
    "broker.epoch.TIMER_S_MAX": "the longest time of a timer; a later one is set again",
    "broker.local_transactions.REPEATED_MAX": "among how many acknowledgements a repeated one is recognised",
    "broker.ingress_tail.CHUNKS_MAX": "bounds what Kafka brings",
    "broker.message.PRIORITY_MAX": "the same range as in jms.sections",
    "broker.planned_sends.ROUNDS_MAX": "how often outdated pieces of a plan are planned in further turns before a longer turn may end it",
    "broker.schedule.CANCELLED_MAX": "when the schedule is cleared of what was cancelled",
    "broker.collecting.ROUNDS_MAX": "how often a snapshot looks for new messages before its last piece",
    "broker.store_move.ROUND_BYTES_MAX": "how much moves to the store at once",
    "broker.store_move.ROUND_MESSAGES_MAX": "how much moves to the store at once",
    "core.defaults.MAX_DELIVERY_ATTEMPTS": "the default of a setting",
    "core.defaults.MAX_OFFSETS_PER_TRIGGER": "the default of a pipeline's setting",
    "core.topics.RECORD_BYTES_MAX": "what the journal's topic takes: a message and what stands around it",
    "server.login_delays.USER_KEY_MAX": "from which length on a hash stands for a name",
    "server.logins.USER_SHOWN_MAX": "cuts a name in a log line",
    "server.certificates.SUBJECT_SHOWN_MAX": "cuts a name in a log line",
    "server.listener_tls.REASON_SHOWN_MAX": "cuts a reason in a log line",
    "server.websocket.ORIGIN_SHOWN_MAX": "cuts an address in a log line",
    "server.user_ids.SHOWN_MAX": "cuts a name in an error",
    "server.websocket.MESSAGE_BYTES_MAX": "the size of messages that the broker itself sends",
    "journal.fence.STRAY_RECORDS_MAX": "how far readers of the journal look, by the appends in flight",
    "journal.records.INDEX_MAX": "the range of an index in a record",
    "jms.checks.SECTIONS_BEFORE_BODY_BYTES_MAX": "how far the search for an application property looks, by the limits of the sections",
    "jms.sections.PRIORITY_MAX": "the range of a priority; a higher one counts as this",
    "server.connection_reset.RESETS_MAX": "how often the broker itself resets a connection",
    "server.epoch.STILL_MAX": "how long the broker itself may stand still",
    "server.spill.WASTE_MAX": "when spill files are compacted",
    "server.spill.WASTE_SHORT_MAX": "when spill files are compacted",
    "server.supervisor.BACKOFF_MAX_S": "bounds the restarts of a process",
}

_NAME = re.compile(r"^([A-Z][A-Z0-9_]*)(?:: Final(?:\[.*\])?)? = ", re.MULTILINE)


def constants() -> Iterator[str]:
    """Yield the public constants that are limits by their name or place, as MODULE.NAME."""
    for package in PACKAGES:
        for file in sorted((SOURCES / package).rglob("*.py")):
            module = ".".join(file.relative_to(SOURCES).with_suffix("").parts)
            for name in _NAME.findall(file.read_text()):
                if module == "amqp.limits" or "MAX" in name.split("_"):
                    yield f"{module}.{name}"


def reason(module: str, constant: str) -> str:
    """Return the comment above a constant, which the constants in between may share."""
    lines = (SOURCES / f"{module.replace('.', '/')}.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if re.match(rf"{constant}\b", line))
    while number and _NAME.match(lines[number - 1]):
        number -= 1
    above: list[str] = []
    while number and lines[number - 1].startswith("#:"):
        number -= 1
        above.insert(0, lines[number].removeprefix("#:").strip())
    return " ".join(above).replace("``", "`").replace("|", "\\|")


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, for people. A setting of 0 is no limit."""
    if not value:
        return "none"
    if unit == "%":
        return f"{value * 100:g} %"
    if unit == "bytes":
        for factor, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value and value % factor == 0:
                return f"{int(value) // factor} {name}"
    return f"{value:,} {unit}".rstrip() if isinstance(value, int) else f"{value:g} {unit}".rstrip()


def limit_row(limit: Limit) -> str:
    """Return the row of a limit that is a constant."""
    value = getattr(importlib.import_module(f"bascule.{limit.module}"), limit.constant)
    return f"| {limit.bounds} | {shown(value, limit.unit)} | {reason(limit.module, limit.constant)} | {limit.effect} |"


def setting_row(setting: Setting) -> str:
    """Return the row of a limit that is a setting."""
    field = Settings.model_fields["broker"].annotation.model_fields[setting.key]  # type: ignore[union-attr]
    unit = "bytes" if setting.key.endswith("bytes") else "s" if setting.key.endswith("_s") else ""
    value = shown(int(field.default) if unit == "bytes" else field.default, unit)
    return f"| `{setting.key}` | {value} | {field.description} | {setting.effect} |"


def page() -> str:
    """Return the whole page."""
    settings = [
        "## Settings\n",
        "All belong in `[broker]`; settings of addresses may also be in `[[address]]` ([configuration](configuration.md#broker)).\n",
        "| setting | default | bounds | the broker |\n| --- | --- | --- | --- |",
    ]  # fmt: skip
    parts = ["\n".join([HEAD, *settings, *map(setting_row, SETTINGS)])]
    for title, limits in LIMITS.items():
        head = "| limit of | value | reason | the broker |\n| --- | --- | --- | --- |"
        parts.append("\n".join([f"\n## {title}\n", head, *map(limit_row, limits)]))
    return inspect.cleandoc("\n".join(parts)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
