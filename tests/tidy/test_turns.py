"""Every loop over a collection in the code of the event loop is divided into turns, or has a known bound.

The test reads the sources of ``amqp``, ``broker`` and ``server``. It counts each attribute that is assigned a collection as a collection,
and reports each function that goes through one, by a loop, a comprehension or a function such as ``sorted``. Generators are exempt: work
that is divided into turns is a generator. The test finds no loop over a local variable, and cannot tell whether a bound is true.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parents[2] / "src" / "bascule"
PACKAGES: Final = ("amqp", "broker", "server")
COLLECTIONS: Final = frozenset(
    {
        "ClientLinks", "Counter", "Holdings", "Mapping", "MutableMapping", "OrderedDict", "Unsettled", "defaultdict", "deque", "dict",
        "list", "set",
    }
)  # fmt: skip
VIEWS: Final = frozenset({"copy", "items", "keys", "values"})
#: Functions that go through their arguments.
GO_THROUGH: Final = frozenset({"all", "any", "dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"})
#: Functions whose result goes through their first argument, or for ``filter`` and ``map`` their last one.
WRAPPERS: Final = GO_THROUGH | {"chain", "enumerate", "filter", "iter", "map", "reversed", "zip"}

#: The functions with a loop, by the bound of the loop. docs/internals/turns.md has the long ones of them, with their times.
BOUNDS: Final[dict[str, tuple[str, ...]]] = {
    "the connections of the admin server that have sent no request: WAITING_MAX": (
        "server/handshakes.py Handshakes.connecting", "server/handshakes.py Handshakes.displace_connecting",
    ),
    "the places for long answers, STREAMS_AT_ONCE, for each of the requests that wait for one, CONNECTIONS_MAX at most": (
        "server/answer_places.py AnswerPlaces._places_of", "server/answer_places.py AnswerPlaces._take",
        "server/answer_places.py AnswerPlaces.changed",
    ),
    "the different selectors of a queue, SELECTORS_MAX, for an attach with another one": ("broker/ready.py Ready._check",),
    "the two listeners for clients": (
        "server/life.py BrokerLife._room_for_another", "server/life.py BrokerLife.refused_connections",
        "server/life.py BrokerLife.serve", "server/life.py BrokerLife.stop_listening",
    ),
    "the values of a frame or message that the broker itself makes": ("amqp/encoder.py _write_array",),
    "the sessions of a connection: CHANNEL_MAX_DEFAULT": (
        "amqp/connection.py Connection._end", "amqp/connection.py Connection._flush_settled", "amqp/connection.py Connection._send_close",
        "amqp/connection.py Connection._take_in", "amqp/outgoing.py OutgoingMessages.write_more", "server/client.py Client.release",
    ),
    "the links of a session, HANDLE_MAX_DEFAULT": (
        "amqp/session.py Session._detach_links", "amqp/session.py Session._on_attach", "amqp/session.py Session._withhold",
        "amqp/session.py Session.give_back",
    ),
    "the links of a connection, LINKS_MAX, once in the life of the connection or for one of a few connections of a page or reload": (
        "server/client.py Client.close_coordinators", "server/client.py Client.close_for_reset", "server/reload.py _lost",
        "server/status.py connection_status",
    ),
    "the unsettled deliveries of a session, UNSETTLED_PER_SESSION_MAX, once in the life of a link or session": (
        "amqp/session.py Session.abandon", "amqp/unsettled.py SentDeliveries.clear", "amqp/unsettled.py SentDeliveries.pop_link",
        "broker/delivery.py Deliveries.detach", "server/links.py ConsumerLink.fail_oldest",
    ),
    "the pipelines defined at run time: DEFINITIONS_MAX": (
        "broker/coverage.py DivertCoverage._cover", "broker/coverage.py DivertCoverage._mark", "server/coverage.py CoverageControl._read",
        "server/coverage.py CoverageControl.decide_access",
    ),
    "LOST_MAX": ("amqp/unsettled.py SentDeliveries._lose", "amqp/unsettled.py SentDeliveries.lost"),
    "a piece of output: FRAMES_PER_PIECE_BYTES": ("amqp/outgoing.py OutgoingDeliveries.write_more",),
    "the last piece of a snapshot: LAST_QUEUES, broker.max_queues, WINDOWS_MAX": (
        "broker/collecting.py Collector._finish", "broker/collecting.py Collector.stop", "broker/collecting.py Collector._changed_windows",
    ),
    "runs in another thread": (
        "broker/collecting.py CollectedQueue.state", "broker/collecting.py CollectedState.snapshot",
        "broker/remembered_ids.py RememberedIds._packed", "broker/remembered_ids.py RememberedIds.without",
        "broker/rounds.py Rounds._in_store", "broker/snapshot.py EncodedSnapshot.joined", "broker/snapshot.py Snapshot.oldest",
        "broker/snapshot.py EncodedSnapshot.size_bytes", "broker/snapshot.py encode", "server/divert_users.py DivertUsers.changes",
        "server/housekeeping.py StoredMessages.mids_now", "server/openapi.py document",
        "server/tls_watch.py TlsWatch._run", "server/user_directory.py NextUsers.names",
        "server/user_directory.py UserDirectory._use", "server/user_directory.py _roles_in",
    ),
    "loads the state, when no client is served": (
        "broker/destinations.py Destinations.create_configured", "broker/duplicates.py DuplicateWindows.expire_ms",
        "broker/loading.py Loader._delete", "broker/loading.py Loader._end_deliveries",
        "broker/loading.py Loader._fill", "broker/loading.py Loader._restore", "broker/loading.py Loader.finish",
        "broker/wanted.py WantedMessages.left",
    ),
    "ends the broker, which serves nobody any more": (
        "server/effects.py LoopEffects.cancel_spawned", "server/handshakes.py Handshakes.abort_all", "server/node.py Node.close_clients",
        "server/spill.py SpillFiles.close",
    ),
    "the steps of the turn": (
        "broker/duplicates.py DuplicateWindows._sweep",
        "broker/ingress_tail.py IngressTaking._take", "broker/journaling.py Journaling.carry_out", "broker/turns.py Turns.go_on",
    ),
    "appends in flight: IN_FLIGHT_MAX": (
        "broker/epoch.py EpochProtocol._append_closed", "broker/epoch.py EpochProtocol._settle", "server/life.py BrokerLife.check_room",
    ),
    "the connections of standbys: PENDING_MAX and STANDBYS_MAX": ("server/standbys.py StandbyListener.dismiss",),
    "one snapshot waits at a time": ("broker/journaling.py Journaling._look_between",),
    "few records are in flight": ("broker/journaling.py Journaling.actions",),
    "the acknowledgements and entries of one record: RECORD_BYTES_MAX": (
        "broker/journaling.py AtomicEntries._take_back", "broker/journaling.py Journaling.flush",
    ),
    "the messages of one transaction: MESSAGES_PER_RECORD_MAX and RECORD_BYTES_MAX; long ones go on in turns": (
        "broker/branch_entries.py PreparePlan.entry", "broker/branches.py _over",
        "broker/local_transactions.py LocalTransactions._is_persistent", "broker/local_transactions.py LocalTransactions.commit",
        "broker/local_transactions.py LocalTransactions.rollback", "server/connection_reset.py rollback_loses_messages",
    ),
    "the transactions that one request joins: REQUEST_SIZE_BYTES_MAX": ("broker/transactions.py LocalTransaction.hand_over",),
    "ROLLED_BACK_AT_ONCE transactions, and their queues": ("broker/local_transactions.py LocalTransactions.rollback_all",),
    "a piece of a plan, or all of its ids after five rounds: MESSAGES_PER_RECORD_MAX": (
        "broker/intake.py Intake.plan_lacks_room",
        "broker/planned_sends.py Piece.count",
        "broker/planned_sends.py PlannedSends._expect", "broker/planned_sends.py PlannedSends._few_outdated",
        "broker/planned_sends.py PlannedSends._known_outdated", "broker/planned_sends.py PlannedSends.decide",
    ),
    "the queues of one message: broker.max_queues, counted as steps of the message or with the credit for many messages": (
        "broker/intake.py Intake.lacks_room", "broker/room.py SendersRoom._free", "broker/room.py SendersRoom._register",
        "broker/sending.py Sending._make_room",
    ),
    "the ids of a planned message or piece, and the segments of one window: duplicate_count of the address": (
        "broker/duplicates.py DuplicateWindow.add_all", "broker/duplicates.py DuplicateWindow.remembered",
    ),
    "clients that are forgotten in favour of others: REMEMBERED_MAX": ("server/interruptions.py Interruptions.lost",),
    "the planned commits in flight to the journal, each of more than PLANNED_STEPS: IN_FLIGHT_SHARE of the memory": (
        "broker/duplicates.py DuplicateWindows.repeats_pending", "broker/planned_sends.py PlannedSends._repeats_pending",
    ),
    "WINDOWS_MAX": ("broker/duplicates.py DuplicateWindows._drop_half",),
    "BUCKETS": ("broker/groups.py Groups.leave",),
    "the steps of a turn": ("broker/delivery.py Deliveries._dispatch",),
    "the selectors of the consumers of one queue, counted as steps": (
        "broker/ready.py Ready.in_views", "broker/ready.py Ready.insert", "broker/ready.py Ready.take",
    ),
    "the blocks of one queue: a five-hundredth of its messages": ("broker/held.py Held.__len__",),
    "ten priorities": ("broker/order.py Lines.peek", "broker/order.py Lines.pop_some"),
    "the queues of a range: DELIVERIES_PER_PIECE for each piece of it": ("broker/returns.py RangeReturn.end",),
    "ROUND_MESSAGES_MAX": ("broker/rounds.py Rounds._all_stored",),
    "pipelines, partitions, topics and limits of the owner's configuration": (
        "server/flow.py FlowPage._flow", "server/pipeline_offsets.py OffsetPages.show", "server/pipelines.py PipelinePages.known",
        "server/pipelines.py PipelinePages.names",
        "server/policies.py user_limits_of",
        "broker/housekeeping.py HousekeepingProtocol.retention_holds", "server/ingress.py _Effects.first_seen",
        "server/topics.py TopicWatch._run",
    ),
    "the outputs of the audit: a file and a topic": (
        "server/audit.py AuditTrail.blocked", "server/audit.py AuditTrail.close", "server/audit.py AuditTrail.poll",
        "server/audit.py AuditTrail.record", "server/audit.py AuditTrail.write_to",
    ),
    "the parts of the account": ("broker/memory.py MemoryAccount.measured",),
    "a list of all connections, and CLOSES_PER_TURN closes in a turn": ("server/actions.py _close",),
    "the queues of the owner's configuration": (
        "broker/policy_change.py check_policy",
    ),
    "SESSIONS_MAX, once for a log-in at the console": ("server/console_sessions.py ConsoleSessions.open",),
    "the connections until one has the wanted address, once for a request of an administrator": ("server/looks.py _links",),
    "the transactions of a client that the broker is about to reset, once for each discharge": (
        "server/connection_reset.py ConnectionReset._check",
    ),
    "the transactions of a link, at the end of the link or after their number has doubled": (
        "server/coordinator.py CoordinatorLink._forget_branches", "server/coordinator.py CoordinatorLink.abandon",
    ),
    "segments of broker.spill_bytes": ("server/spill.py SpillFiles.wasteful",),
    "the processes of the supervisor, which serves no client": (
        "server/supervisor.py Supervisor._write_pids", "server/supervisor.py Supervisor.all_ready",
        "server/supervisor.py Supervisor.hang_up", "server/supervisor.py Supervisor.look", "server/supervisor.py Supervisor.run",
    ),
}  # fmt: skip


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((SOURCES / package).rglob("*.py")):
            yield str(path.relative_to(SOURCES)), ast.parse(path.read_text())


def called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""


def is_collection(value: ast.expr | None, annotation: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call) and called(value) in COLLECTIONS:
        return True
    name = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(name, ast.Name) and name.id in COLLECTIONS


def collections_of(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes that are assigned a collection."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, annotation = node.targets, None
        elif isinstance(node, ast.AnnAssign):
            targets, annotation = [node.target], node.annotation
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and is_collection(node.value, annotation):
                yield target.attr


def gone_through(expression: ast.expr) -> str:
    """Return the attribute whose items an expression yields, "" if there is none."""
    while not isinstance(expression, ast.Attribute):
        if isinstance(expression, ast.Starred):
            expression = expression.value
        elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) and expression.func.attr in VIEWS:
            expression = expression.func.value
        elif isinstance(expression, ast.Call) and called(expression) in WRAPPERS and expression.args:
            expression = expression.args[-1 if called(expression) in ("filter", "map") else 0]
        else:
            return ""
    return expression.attr


def iterations(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a node goes through itself."""
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.While):
        yield from (each for each in ast.walk(node.test) if isinstance(each, ast.Attribute))
    elif isinstance(node, ast.Starred):
        yield node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GO_THROUGH:
        yield from node.args


def loops_in(node: ast.AST, known: frozenset[str], names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the qualified name of each function that goes through a known collection, except in generators."""
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (*names, child.name)
            if not isinstance(child, ast.ClassDef) and any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(child)):
                continue
        if any(gone_through(each) in known for each in iterations(child)):
            yield ".".join(inner)
        yield from loops_in(child, known, inner)


def test_each_loop_over_a_collection_is_divided_or_has_a_known_bound() -> None:
    trees = dict(sources())
    known = frozenset(name for tree in trees.values() for name in collections_of(tree))
    found = {f"{file} {name}" for file, tree in trees.items() for name in loops_in(tree, known)}
    bounded = [function for functions in BOUNDS.values() for function in functions]
    assert sorted(found.difference(bounded)) == []  # divide the loop into turns, or state its bound in BOUNDS and on the page
    assert sorted(set(bounded) - found) == []
    assert len(bounded) == len(set(bounded))


def test_loops_in_all_forms_are_found() -> None:
    forms = (
        "for each in self.all: pass", "for each in list(self.all.values()): pass", "[each for each in self.all]",
        "return sum(each for each in self.all)", "return sorted(other.all)", "while self.all: self.all.pop()", "return [*self.all]",
        "return any(map(bool, self.all.items()))", "for number, each in enumerate(self.all): pass", "async def run(): return max(self.all)",
    )  # fmt: skip
    for form in forms:
        text = f"class A:\n def __init__(self):\n  self.all: dict[str, int] = {{}}\n def go(self):\n  {form}\n"
        tree = ast.parse(text)
        known = frozenset(collections_of(tree))
        assert known == {"all"}
        assert [*loops_in(tree, known)], form
    divided = ast.parse("class A:\n def __init__(self):\n  self.all = []\n def go(self):\n  for each in self.all:\n   yield 1\n")
    assert [*loops_in(divided, frozenset(collections_of(divided)))] == []
