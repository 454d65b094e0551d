"""Judges the history that clients recorded (java/Storm.java): nothing lost, nothing doubled, no transaction torn.

Written from what JMS promises, not from the broker. The destinations must have been emptied at the end: each message is sent, moved on any
number of times, and taken; whoever lost contact at a commit leaves it open whether that took place, so such an operation counts as may-be.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "fail", "indeterminate"]
#: How many names an anomaly shows.
SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Operation:
    """One send, receive or transaction, and how it ended for its client."""

    client: str
    ids: tuple[str, ...]
    outcome: Outcome
    source: str | None = None  # where the ids were taken from
    target: str | None = None  # where they were sent to


def read_history(file: Path) -> list[Operation]:
    """The operations of a Storm's history, in order."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        Operation(line["client"], tuple(line["ids"]), line["outcome"], line.get("from"), line.get("to")) for line in lines if "op" in line
    ]


@dataclass(slots=True)
class Tally:
    """What a check found. ``anomalies`` has one sentence for each kind and place; empty is what the promises say."""

    sent: int = 0  # surely
    maybe_sent: int = 0
    taken: int = 0  # surely
    copies: dict[str, int] = field(default_factory=dict)  # records in each Kafka topic
    anomalies: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """For people."""
        kafka = "".join(f", {count} in {topic}" for topic, count in self.copies.items())
        end = "; ".join(self.anomalies) or "0 lost, 0 doubled, 0 torn"
        return f"{self.sent} sent, {self.maybe_sent} in doubt, {self.taken} taken{kafka}: {end}"

    def report(self, what: str, ids: Iterable[str]) -> None:
        """An anomaly, if there are such ids."""
        if found := sorted(ids):
            self.anomalies.append(f"{len(found)} {what} ({', '.join(found[:SHOWN_MAX])}{', ...' if len(found) > SHOWN_MAX else ''})")


def check(operations: Sequence[Operation], *, diverted: Mapping[str, tuple[str, Sequence[str]]] | None = None) -> Tally:
    """Judge a history. ``diverted`` is Kafka topic -> (the destination whose messages it must have, the ids found in it, in order)."""
    tally = Tally()
    arrivals: dict[str, list[Operation]] = defaultdict(list)
    departures: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.target is not None:
            arrivals[operation.target].append(operation)
        if operation.source is not None:
            departures[operation.source].append(operation)
        if operation.outcome == "ok":
            tally.sent += len(operation.ids) if operation.source is None else 0
            tally.taken += len(operation.ids) if operation.target is None else 0
        elif operation.outcome == "indeterminate" and operation.source is None:
            tally.maybe_sent += len(operation.ids)
    seen: dict[str, set[str]] = {}
    for destination in sorted(set(arrivals) | set(departures)):
        seen[destination] = _check_queue(tally, destination, departures[destination])
    for destination, seen_there in seen.items():
        _check_arrivals(tally, destination, arrivals[destination], seen_there)
    _check_moves(tally, operations, seen)
    for topic, (destination, copies) in (diverted or {}).items():
        tally.copies[topic] = len(copies)
        tally.report(f"doubled in topic {topic}", (id for id, count in Counter(copies).items() if count > 1))
        tally.report(f"taken from {destination} and missing in topic {topic}", seen[destination] - set(copies))
        tally.report(f"in topic {topic} and never taken from {destination}", set(copies) - seen[destination])
    return tally


def _check_queue(tally: Tally, destination: str, departures: Sequence[Operation]) -> set[str]:
    """What was taken from one destination: each message once. Returns what surely was in it."""
    gone: set[str] = set()
    seen: set[str] = set()
    again: set[str] = set()
    for operation in departures:
        again |= gone.intersection(operation.ids)
        seen.update(operation.ids)
        if operation.outcome == "ok":
            gone.update(operation.ids)
    tally.report(f"delivered again from {destination} after they had been acknowledged", again)
    doubled = (id for id, count in Counter(id for each in departures for id in set(each.ids) if each.outcome == "ok").items() if count > 1)
    tally.report(f"taken twice from {destination}", doubled)
    # Only where it was committed: what an interrupted transaction had got, it gets again.
    repeated = {id for each in departures if each.outcome == "ok" for id in each.ids if each.ids.count(id) > 1}
    tally.report(f"twice in one transaction from {destination}", repeated)
    tally.report(f"left in {destination}", seen - {id for each in departures if each.outcome != "fail" for id in each.ids})
    return seen


def _check_arrivals(tally: Tally, destination: str, arrivals: Sequence[Operation], seen: set[str]) -> None:
    """What was sent to one destination: all of it came out again, or was never promised; a transaction in whole."""
    sure = {id for each in arrivals if each.outcome == "ok" for id in each.ids}
    open_ids = {id for each in arrivals if each.outcome == "indeterminate" for id in each.ids}
    tally.report(f"lost in {destination}", sure - seen)
    tally.report(f"in {destination} without having been sent", seen - sure - open_ids)
    torn = {
        each.ids[0]
        for each in arrivals
        if each.outcome == "indeterminate" and each.source is None and 0 < len(seen.intersection(each.ids)) < len(set(each.ids))
    }
    tally.report(f"transactions torn in {destination}, which begin", torn)


def _check_moves(tally: Tally, operations: Sequence[Operation], seen: Mapping[str, set[str]]) -> None:
    """Messages that were moved on are in the next destination; so none is in none."""
    routes = {(each.source, each.target) for each in operations if each.source is not None and each.target is not None}
    for source, target in sorted(routes):
        assert source is not None
        assert target is not None
        tally.report(f"taken from {source} and never seen in {target}", seen[source] - seen[target])
