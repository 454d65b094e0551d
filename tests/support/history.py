"""Judges the history that clients recorded (java/Storm.java, tests.sim) by the promises of JMS and of the bridge.

The rules come from the promises, not from the broker's code. A delivered message counts as delivered, whatever became of its
acknowledgement. An operation in doubt allows both outcomes. The destinations must have been emptied at the end, because only an empty
system shows that every message came out. :data:`ANOMALIES` lists all findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Final, NamedTuple

from bascule.jms.selector import compile_selector
from tests.support.operations import Facts, Operation, Outcome, Place, after, operation_of, read_history, timed

__all__ = [
    "ANOMALIES",
    "BRANCH_ANOMALIES",
    "CLAIM_ANOMALIES",
    "Anomaly",
    "Audit",
    "Divert",
    "Facts",
    "Operation",
    "Outcome",
    "Place",
    "Tally",
    "check",
    "operation_of",
    "read_history",
]

#: Most ids that an anomaly shows.
SHOWN_MAX: Final = 5

#: The description of every anomaly, by name.
ANOMALIES: Final[Mapping[str, str]] = {
    "lost": "surely sent, and never given out, or given out and never again after a rollback",
    "duplicated": "given out again after it was acknowledged",
    "unexpected": "given out without having been sent, or from a transaction that was rolled back",
    "torn-tx": "part of a transaction is there, and part is not",
    "redelivered-unmarked": "given out a second time without JMSRedelivered",
    "out-of-order": "given out before what its producer had sent earlier with the same priority",
    "sub-gap": "a durable subscription misses what was sent while it existed",
    "sub-ghost": "a subscription gets what was sent before it existed",
    "selector-leak": "given to a selector that does not match it",
    "selector-miss": "never given to a subscription whose selector matches it",
    "divert-loss": "not in the topic that its destination is diverted to",
    "divert-dup": "twice in the topic, or taken by an exclusive divert and given out here as well",
    "ingress-loss": "a Kafka record that never became a message",
    "ingress-dup": "a Kafka record that became two messages",
    "loop": "back on the side that it came from",
    "zombie-ack": "answered by a broker whose records no longer counted",
    "expired-delivered": "given out after it had expired",
    "early-delivered": "given out before its delivery time",
    "stuck": "still waiting, or without an answer, though nothing was broken any more",
}
#: Anomalies of transactions over several resources, which only the calls on their branches show (history_branches).
BRANCH_ANOMALIES: Final[Mapping[str, str]] = {
    "xa-split": "a branch has ended otherwise than was decided for its transaction",
    "xa-told": "an application was told another outcome than its transaction has",
    "xa-heuristic": "a branch was ended against the decision, and neither log nor application says so",
    "xa-disturbed": "recovery rolled a transaction back that was not left behind, or not its manager's",
    "xa-stuck": "a branch, or a decision, without an end though nothing was broken any more",
}

#: Anomalies of claims on positions; only the simulation sees them.
CLAIM_ANOMALIES: Final[Mapping[str, str]] = {"claimed-twice": "a task worked from a position that another driver run held"}


class Divert(NamedTuple):
    """The messages in a Kafka topic, in order, and the destination whose messages it must have."""

    source: str
    ids: Sequence[str]
    selector: str = ""
    exclusive: bool = False
    ordered: bool = False  # one partition: each producer's order must be kept


class Audit(NamedTuple):
    """The content of the journal at the end, read independently: ids by destination, and by the place of their acknowledgement."""

    sent: Mapping[str, Collection[str]]
    taken: Mapping[Place, Collection[str]]


class Anomaly(NamedTuple):
    """One kind of anomaly at one place."""

    name: str
    where: str
    ids: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.ids[:SHOWN_MAX]) + (", ..." if len(self.ids) > SHOWN_MAX else "")
        return f"{self.name}: {len(self.ids)} {self.where} ({shown})"


@dataclass(slots=True)
class Tally:
    """The result of a check. Without anomalies the history keeps the promises."""

    sent: int = 0  # certainly
    maybe_sent: int = 0
    recovered: int = 0  # sends in doubt that did arrive
    taken: int = 0  # certainly
    copies: dict[str, int] = field(default_factory=dict)  # records in each Kafka topic
    anomalies: list[Anomaly] = field(default_factory=list)
    unjudged: set[str] = field(default_factory=set)  # names of anomalies that could not be checked

    @property
    def names(self) -> set[str]:
        """Return the names of the anomalies."""
        return {anomaly.name for anomaly in self.anomalies}

    def __str__(self) -> str:
        kafka = "".join(f", {count} in {topic}" for topic, count in self.copies.items())
        end = "; ".join(map(str, self.anomalies)) or "no anomaly"
        unjudged = f" (not judged: {', '.join(sorted(self.unjudged))})" if self.unjudged else ""
        return f"{self.sent} sent, {self.maybe_sent} in doubt ({self.recovered} arrived), {self.taken} taken{kafka}: {end}{unjudged}"

    def report(self, name: str, where: str, ids: Iterable[str]) -> None:
        """Add an anomaly, if there are ids for it."""
        assert name in {*ANOMALIES, *BRANCH_ANOMALIES, *CLAIM_ANOMALIES}
        if found := sorted(set(ids)):
            self.anomalies.append(Anomaly(name, where, tuple(found)))


def check(
    operations: Iterable[Operation],
    *,
    diverted: Mapping[str, tuple[str, Sequence[str]] | Divert] | None = None,
    ingested: Mapping[str, Sequence[str]] | None = None,
    journal: Audit | None = None,
    spills: Mapping[str, Sequence[str]] | None = None,
    expiries: Collection[str] = (),
    left: Mapping[str, Sequence[str]] | None = None,
    healed_ms: float | None = None,
    clock_ms: float = 100,
) -> Tally:
    """Judge a history whose destinations were emptied at the end.

    ``diverted`` is Kafka topic -> its content; ``ingested`` is destination -> the committed records of the topics that feed it; ``journal``
    is the result of an audit (without one, "zombie-ack" is not judged). ``spills`` is destination -> dead-letter and expiry addresses of
    its messages; expired messages must go to those of them that are ``expiries``, and no other message may. ``left`` are the messages that
    still wait, by place. From ``healed_ms`` on nothing was broken any more. Clocks differ by up to ``clock_ms``.
    """
    history = _History(
        operations,
        ingested or {},
        spills or {},
        {topic: Divert(*found) for topic, found in (diverted or {}).items()},
        clock_ms,
        frozenset(expiries),
    )
    tally = history.count()
    for look in _CHECKS:
        look(tally, history)
    if journal is None:
        tally.unjudged.add("zombie-ack")
    else:
        _check_audit(tally, history, journal)
    for where, ids in (left or {}).items():
        tally.report("stuck", f"waiting in {where} at the end", ids)
    if healed_ms is not None:
        unanswered = (each for each in history.operations if each.outcome == "indeterminate" and (each.begun_ms or 0) > healed_ms)
        tally.report("stuck", "without an answer though all was well", (id for each in unanswered for id in each.ids))
    return tally


class _Delivery(NamedTuple):
    id: str
    operation: Operation
    marked: bool
    again: bool  # certainly after another delivery of it at the same place
    acknowledged: bool  # certainly after it had been acknowledged there


class _History:
    """The operations of a history, indexed for the checks."""

    def __init__(
        self, operations: Iterable[Operation], ingested: Mapping[str, Sequence[str]], spills: Mapping[str, Sequence[str]],
        diverts: Mapping[str, Divert], clock_ms: float, expiries: frozenset[str],
    ) -> None:  # fmt: skip
        self.operations = timed(operations)
        self.ingested, self.spills, self.diverts, self.clock_ms, self.expiries = ingested, spills, diverts, clock_ms, expiries
        self.sends: dict[str, list[Operation]] = defaultdict(list)
        self.takes: dict[Place, list[Operation]] = defaultdict(list)
        self.begins: dict[Place, Operation] = {}
        self.ends: dict[Place, Operation] = {}
        self.facts: dict[str, Facts] = {}
        for each in self.operations:
            self._note(each)
        subscribed = {place.destination for place in (*self.takes, *self.begins) if place.subscription}
        queues = {Place(name) for name in (*self.sends, *ingested) if name not in subscribed}
        self.places = sorted({*self.takes, *self.begins, *queues})
        self.seen = {place: {id for each in self.takes.get(place, ()) for id in each.ids} for place in self.places}
        self.deliveries = {place: list(_deliveries(self.takes.get(place, ()))) for place in self.places}
        # Called for each send.
        self.taken_away = cache(self._taken_away)
        self.spilled = cache(self._spilled)
        self.spilling = {name for names in spills.values() for name in names}
        self.copies = {topic: frozenset(divert.ids) for topic, divert in diverts.items()}

    def _note(self, each: Operation) -> None:
        self.facts.update(each.facts)
        place = each.place
        if each.op in ("subscribe", "unsubscribe"):
            assert place is not None
            if each.outcome != "fail":
                (self.begins if each.op == "subscribe" else self.ends).setdefault(place, each)
            return
        if each.target is not None:
            self.sends[each.target].append(each)
        if place is not None:
            self.takes[place].append(each)

    def count(self) -> Tally:
        tally = Tally(copies={topic: len(divert.ids) for topic, divert in self.diverts.items()})
        everywhere = {id for seen in self.seen.values() for id in seen}
        for each in self.operations:
            if each.outcome == "ok":
                tally.sent += len(each.ids) if each.source is None else 0
                tally.taken += len(each.ids) if each.target is None else 0
            elif each.outcome == "indeterminate" and each.source is None:
                tally.maybe_sent += len(each.ids)
                tally.recovered += len(everywhere.intersection(each.ids))
        return tally

    def facts_of(self, id: str) -> Facts:
        return self.facts.get(id, Facts())

    def must_arrive(self, destination: str, id: str) -> bool:
        """Return True if a message must be found there, or at its destination after expiry."""
        facts = self.facts_of(id)
        return facts.must_arrive or (facts.persistent and not self.expiries.isdisjoint(self.spills.get(destination, ())))

    def matching(self, selector: str, ids: Iterable[str]) -> set[str]:
        if not selector:
            return set(ids)
        matches = compile_selector(selector).matches
        return {id for id in ids if matches(self.facts_of(id).properties.get)}

    def sent(self, destination: str, *outcomes: Outcome) -> dict[str, Operation]:
        """Return the sends to a destination with one of the outcomes, by message id."""
        return {id: each for each in self.sends.get(destination, ()) if each.outcome in outcomes for id in each.ids}

    def due_at(self, place: Place, sent: Mapping[str, Operation]) -> set[str]:
        """Return the messages of a destination that a place must deliver."""
        begin, end = self.begins.get(place), self.ends.get(place)
        if begin is not None and begin.outcome != "ok":
            return set()
        ids = {
            id
            for id, send in sent.items()
            if (begin is None or after(send, begin)) and (end is None or after(end, send)) and self.must_arrive(place.destination, id)
        }
        return self.matching(begin.selector if begin is not None else "", ids) - self.taken_away(place.destination)

    def _taken_away(self, destination: str) -> set[str]:
        """Return the messages of a destination that an exclusive divert takes."""
        ids = self.sent(destination, "ok", "indeterminate")
        exclusive = (divert for divert in self.diverts.values() if divert.exclusive and divert.source == destination)
        return {id for divert in exclusive for id in self.matching(divert.selector, ids)}

    def _spilled(self, destination: str) -> set[str]:
        """Return the messages that were delivered from the dead-letter and expiry addresses of a destination."""
        return {id for place, seen in self.seen.items() if place.destination in self.spills.get(destination, ()) for id in seen}

    def may_hold(self, destination: str) -> set[str]:
        """Return the messages that may be delivered from a destination."""
        into = [destination, *(name for name, spills in self.spills.items() if destination in spills)]
        return {id for name in into for id in (*self.sent(name, "ok", "indeterminate"), *self.ingested.get(name, ()))}


def _deliveries(takes: Iterable[Operation]) -> Iterator[_Delivery]:
    earlier: dict[str, list[Operation]] = defaultdict(list)
    for each in takes:
        here: set[str] = set()
        for id in each.ids:
            before = [other for other in earlier[id] if after(each, other)]
            yield _Delivery(id, each, id in each.redelivered, id in here or bool(before), any(other.outcome == "ok" for other in before))
            here.add(id)
        for id in here:
            earlier[id].append(each)


def _check_taken_once(tally: Tally, history: _History) -> None:
    """Check that an acknowledged message is gone, here and, if no other subscription had it, at its dead-letter address."""
    sure: dict[Place, dict[str, Operation]] = {place: {} for place in history.places}
    twice: dict[Place, set[str]] = {}
    for place, takes in history.takes.items():
        gone, again = sure[place], twice.setdefault(place, set())
        for each in takes:
            again |= {id for id in each.ids if id in gone and (each.outcome == "ok" or after(each, gone[id]))}
            if each.outcome == "ok":
                again |= {id for id, count in Counter(each.ids).items() if count > 1}
                gone.update(dict.fromkeys(each.ids, each))
    for place, again in twice.items():
        everywhere = (gone for other, gone in sure.items() if other.destination == place.destination)
        again |= history.spilled(place.destination).intersection(*everywhere)
        from_kafka = again & set(history.ingested.get(place.destination, ()))
        tally.report("ingress-dup", f"Kafka records given out again from {place}", from_kafka)
        tally.report("duplicated", f"given out again from {place} after they had been acknowledged", again - from_kafka)


def _check_arrived(tally: Tally, history: _History) -> None:
    """Check that certain sends are delivered, and that only sent messages are delivered."""
    for place, seen in history.seen.items():
        destination = place.destination
        due = history.due_at(place, history.sent(destination, "ok"))
        missing = due - seen - history.spilled(destination)
        begin = history.begins.get(place)
        name = "lost" if begin is None else "selector-miss" if begin.selector else "sub-gap"
        tally.report(name, f"sent and never given out from {place}", missing)
        ingested = set(history.ingested.get(destination, ()))
        if begin is None:
            tally.report("ingress-loss", f"Kafka records never given out from {place}", ingested - seen - history.spilled(destination))
        open_ids = {id for each in history.takes.get(place, ()) if each.outcome != "fail" for id in each.ids}
        left = {id for id in seen - open_ids - history.spilled(destination) if history.must_arrive(destination, id)}
        tally.report("lost", f"given back to {place} and never given out again", left)
        strange = seen - history.may_hold(destination)
        looped = {id for id in strange if any(id in copies for copies in history.copies.values())} if ingested else set()
        tally.report("loop", f"diverted to Kafka and back in {place}", looped)
        tally.report("unexpected", f"in {place} without having been sent", strange - looped)
        if begin is not None:
            sent = history.sent(destination, "ok", "indeterminate")
            tally.report("sub-ghost", f"in {place}, sent before it existed", {id for id in seen & set(sent) if after(begin, sent[id])})


def _check_marks(tally: Tally, history: _History) -> None:
    """Check that second deliveries are marked. If two deliveries may have been in either order, one of them must be marked.

    After an acknowledgement the delivery itself is the fault, so its mark is not checked. A non-persistent message is lost with its broker;
    if its sender repeats it, it is a new message to the next broker.
    """
    for place, deliveries in history.deliveries.items():
        silent = [each for each in deliveries if not each.marked and not each.acknowledged]
        times = Counter(each.id for each in silent)
        second = {each.id for each in silent if each.again or times[each.id] > 1}
        unmarked = {id for id in second if history.facts_of(id).persistent}
        tally.report("redelivered-unmarked", f"second time from {place}", unmarked)


class _Rank(NamedTuple):
    line: tuple[
        str, int, bool
    ]  # producer, priority, persistence: only within these the order is kept (Jakarta Messaging 3.1, section 6.2.9.2)
    number: int


def _ranks(history: _History, destination: str) -> dict[str, _Rank]:
    """Return the order in which messages were sent to a destination. Of repeated moves the certain one counts, or the last one."""
    found: dict[str, _Rank] = {}
    numbers = count()
    sure = history.sent(destination, "ok")
    for each in history.sends.get(destination, ()):
        if each.outcome != "fail":
            for id in each.ids:
                facts = history.facts_of(id)
                if not facts.due_ms and (each.outcome == "ok" or id not in sure):
                    found[id] = _Rank((each.client, facts.priority, facts.persistent), next(numbers))
    return found


def _overtaken(ids: Iterable[str], ranks: Mapping[str, _Rank]) -> Iterator[str]:
    newest: dict[tuple[str, int, bool], int] = {}
    for id in ids:
        if id in ranks:
            line, number = ranks[id]
            if number < newest.get(line, -1):
                yield id
            else:
                newest[line] = number


def _check_order(tally: Tally, history: _History) -> None:
    """Check that one consumer gets a producer's messages in order, except redelivered ones."""
    for place, deliveries in history.deliveries.items():
        ranks = _ranks(history, place.destination)
        by_consumer: dict[str, list[str]] = defaultdict(list)
        for each in deliveries:
            if not each.marked and not each.again:
                by_consumer[each.operation.client].append(each.id)
        late = {id for ids in by_consumer.values() for id in _overtaken(ids, ranks)}
        tally.report("out-of-order", f"late from {place}", late)
    for topic, divert in history.diverts.items():
        if divert.ordered:
            ranks = {id: _Rank((line[0], 0, line[2]), number) for id, (line, number) in _ranks(history, divert.source).items()}
            tally.report("out-of-order", f"late in topic {topic}", _overtaken(divert.ids, ranks))


def _check_conditions(tally: Tally, history: _History) -> None:
    """Check selectors, expiry and delivery time of every delivery."""
    for place, deliveries in history.deliveries.items():
        begin = history.begins.get(place)
        subscribed = begin.selector if begin is not None else ""
        leaked, expired, early, alive = set(), set(), set(), set()
        for id, operation, *_ in deliveries:
            facts = history.facts_of(id)
            for selector in filter(None, (subscribed, operation.selector)):
                leaked |= {id} - history.matching(selector, (id,))
            assert operation.begun_ms is not None
            assert operation.ended_ms is not None
            if 0 < facts.expiry_ms < operation.begun_ms - history.clock_ms and place.destination not in history.spilling:
                expired.add(id)
            if operation.ended_ms < facts.due_ms - history.clock_ms:
                early.add(id)
            if place.destination in history.expiries and not 0 < facts.expiry_ms <= operation.ended_ms + history.clock_ms:
                alive.add(id)
        tally.report("selector-leak", f"from {place} to who did not ask for them", leaked)
        tally.report("expired-delivered", f"from {place}", expired)
        tally.report("early-delivered", f"from {place}", early)
        tally.report("unexpected", f"in {place} without having expired", alive)


def _check_torn(tally: Tally, history: _History) -> None:
    """Check that a transaction is complete or absent, over all its destinations and their topics in Kafka."""
    units: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for number, each in enumerate(history.operations):
        if each.source is None and each.target is not None and each.outcome != "fail":
            units[each.client, each.transaction or f"#{number}"].append(each)
    torn = set()
    for parts in units.values():
        there = {present for each in parts for present in _presence(history, each)}
        if len(there) > 1 and any(each.outcome == "indeterminate" for each in parts):
            torn.add(parts[0].ids[0])
    tally.report("torn-tx", "transactions are there in part, which begin", torn)
    routes = {(each.place, each.target) for each in history.operations if each.place is not None and each.target is not None}
    for place, target in sorted(routes):
        gone = history.seen[place] - {
            id for each in history.takes[place] if each.target is None and each.outcome != "fail" for id in each.ids
        }
        gone = {id for id in gone if history.must_arrive(place.destination, id)} - history.spilled(place.destination)
        arrived = {id for other, seen in history.seen.items() if other.destination == target for id in seen} | history.spilled(target)
        tally.report("torn-tx", f"taken from {place} and never seen in {target}", gone - arrived)


def _presence(history: _History, send: Operation) -> Iterator[bool]:
    """Yield for each message of a send whether it is at each place where it would have to be."""
    assert send.target is not None
    ids = dict.fromkeys(send.ids, send)
    for place, seen in history.seen.items():
        if place.destination == send.target:
            yield from (id in seen or id in history.spilled(send.target) for id in history.due_at(place, ids))
    for topic, divert in history.diverts.items():
        if divert.source == send.target:
            yield from (id in history.copies[topic] for id in history.matching(divert.selector, ids) if history.facts_of(id).persistent)


def _check_diverts(tally: Tally, history: _History) -> None:
    """Check that a topic has each message of its destination once, and no other."""
    for topic, divert in history.diverts.items():
        source, copies = divert.source, set(divert.ids)
        seen = {id for place, seen in history.seen.items() if place.destination == source for id in seen}
        ingested = {id for ids in history.ingested.values() for id in ids}
        sure = {id for id in (*seen, *history.sent(source, "ok")) if history.facts_of(id).persistent} - ingested
        wanted = history.matching(divert.selector, sure)
        tally.report("divert-dup", f"twice in topic {topic}", (id for id, count in Counter(divert.ids).items() if count > 1))
        tally.report("divert-loss", f"in {source} and missing in topic {topic}", wanted - copies)
        tally.report("loop", f"from Kafka and back in topic {topic}", copies & ingested)
        tally.report(
            "unexpected",
            f"in topic {topic} and never sent to {source}",
            copies - ingested - set(history.sent(source, "ok", "indeterminate")),
        )
        tally.report("selector-leak", f"in topic {topic}, which did not ask for them", copies - history.matching(divert.selector, copies))
        if divert.exclusive:
            tally.report("divert-dup", f"in topic {topic} and given out from {source} as well", copies & seen)


def _check_audit(tally: Tally, history: _History, journal: Audit) -> None:
    """Check that answered operations are in the journal."""
    for destination in history.sends:
        sure = {id for id in history.sent(destination, "ok") if history.facts_of(id).persistent}
        tally.report(
            "zombie-ack", f"sent to {destination}, answered, and not in the journal", sure - set(journal.sent.get(destination, ()))
        )
    for place, takes in history.takes.items():
        sure = {id for each in takes if each.outcome == "ok" for id in each.ids if history.facts_of(id).persistent}
        tally.report("zombie-ack", f"acknowledged at {place} and not in the journal", sure - set(journal.taken.get(place, ())))


_CHECKS: Final[tuple[Callable[[Tally, _History], None], ...]] = (
    _check_taken_once, _check_arrived, _check_marks, _check_order, _check_conditions, _check_torn, _check_diverts,
)  # fmt: skip
