"""All processes are killed and suspended at random under load: no message is lost or duplicated. This is the short form of `make soak`.

BASCULE_CHAOS_SEED repeats a seed that was printed. BASCULE_CHAOS_ROUNDS is the number of kills in the rounds of `make slow`.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak import KINDS, Plan, Result, soak
from tests.soak.plan import MOVED, PAYMENTS, REGIONAL
from tests.soak.report import write_report
from tests.soak.run import Evidence
from tests.support.history import ANOMALIES, Operation

#: Each kind once.
FAULTS = len(KINDS)
SECONDS = 30.0
ROUNDS = int(os.environ.get("BASCULE_CHAOS_ROUNDS", "20"))
ROUND_S = 5.0

#: The first test that needs the run waits for it.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line although pytest captures the output."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None

    def tell(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"soak: {text}")  # noqa: T201

    return tell


def run(tell: Callable[[str], None], directory: Path, **plan: object) -> Result:
    seed = int(os.environ.get("BASCULE_CHAOS_SEED", random.randrange(1 << 32)))
    tell(f"seed {seed}")
    result = soak(Plan(seed=seed, **plan), directory, tell)  # type: ignore[arg-type]
    tell(f"{result.tally}; report: {write_report(result, directory)}")
    return result


@pytest.fixture(scope="module")
def result(tell: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Share one run among all tests."""
    directory = tmp_path_factory.mktemp("short")
    return run(
        tell, directory, seconds=SECONDS, faults=FAULTS, pause_max_s=8.0, down_max_s=2.0, rate=15, snapshot_records=500, prefix="short"
    )


def test_no_message_is_lost_or_doubled_under_random_kills_and_stops(result: Result) -> None:
    assert result.faulted == []
    assert result.tally.unjudged == set(), result.evidence.gap
    assert result.tally.sent > 0
    assert len(result.faults) >= FAULTS
    assert {fault.kind for fault in result.faults} == set(KINDS)


def test_report_lists_every_fault_and_every_anomaly_by_name(result: Result, tmp_path: Path) -> None:
    page = write_report(result, tmp_path).read_text()
    assert all(f"<td>{name}</td>" in page for name in (*ANOMALIES, *KINDS))
    figures = {figure.partition(",")[0]: figure for figure in page.split("<figcaption>")[1:]}
    for caption in ("Messages", "From send to answer", "Messages in all queues", "Faults and anomalies so far"):
        assert figures[caption].count('<line class="mark') == len(result.faults) + 1, caption
        assert "<polyline" in figures[caption], caption
    assert "No anomaly" in page
    assert "http" not in page  # nothing is fetched


Plant = Callable[[Evidence], Evidence]


def doubled_record(evidence: Evidence) -> Evidence:
    topic, divert = next(iter(evidence.diverted.items()))
    return dataclasses.replace(evidence, diverted={**evidence.diverted, topic: divert._replace(ids=[*divert.ids, divert.ids[0]])})


def missing_record(evidence: Evidence) -> Evidence:
    topic, divert = next(iter(evidence.diverted.items()))
    return dataclasses.replace(evidence, diverted={**evidence.diverted, topic: divert._replace(ids=divert.ids[1:])})


def stranger(evidence: Evidence) -> Evidence:
    topic, divert = next(iter(evidence.diverted.items()))
    return dataclasses.replace(evidence, diverted={**evidence.diverted, topic: divert._replace(ids=[*divert.ids, "a stranger"])})


def taken(evidence: Evidence, place: str) -> Operation:
    """Return a receive of messages of whose arrival a send was told: what a kill left in doubt may be missing."""
    doubtful = {id for each in evidence.operations if each.target is not None and each.outcome != "ok" for id in each.ids}
    return next(
        each for each in evidence.operations if each.source == place and each.outcome == "ok" and each.ids and not doubtful & set(each.ids)
    )


def forgotten(place: str) -> Plant:
    def plant(evidence: Evidence) -> Evidence:
        gone = set(taken(evidence, place).ids)
        return dataclasses.replace(
            evidence, operations=[each for each in evidence.operations if each.source != place or not gone & set(each.ids)]
        )

    return plant


def unknown_answer(evidence: Evidence) -> Evidence:
    assert evidence.journal is not None
    gone = set(taken(evidence, MOVED).ids)
    return dataclasses.replace(
        evidence, journal=evidence.journal._replace(sent={**evidence.journal.sent, MOVED: evidence.journal.sent[MOVED] - gone})
    )


def looped(evidence: Evidence) -> Evidence:
    returned = {
        topic: divert._replace(ids=evidence.ingested[PAYMENTS][:1])
        for topic, divert in evidence.diverted.items()
        if divert.source == PAYMENTS
    }
    return dataclasses.replace(evidence, diverted={**evidence.diverted, **returned})


def taken_again(evidence: Evidence) -> Evidence:
    return dataclasses.replace(evidence, operations=[*evidence.operations, taken(evidence, MOVED)])


PLANTED: list[tuple[str, Plant]] = [
    ("divert-dup", doubled_record),
    ("divert-loss", missing_record),
    ("unexpected", stranger),
    ("lost", forgotten(REGIONAL)),
    ("ingress-loss", forgotten(PAYMENTS)),
    ("duplicated", taken_again),
    ("loop", looped),
    ("zombie-ack", unknown_answer),
]


@pytest.mark.parametrize(("name", "plant"), PLANTED, ids=[name for name, _ in PLANTED])
def test_planted_anomaly_in_the_evidence_is_detected(result: Result, name: str, plant: Plant) -> None:
    found = Counter(anomaly.name for anomaly in plant(result.evidence).judge().anomalies)
    assert found[name] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_message_is_lost_or_doubled_in_many_rounds_of_kills(tmp_path: Path, tell: Callable[[str], None]) -> None:
    kinds = ("kill-active", "kill-driver", "kill-worker")
    result = run(tell, tmp_path, seconds=ROUNDS * ROUND_S, faults=ROUNDS, kinds=kinds, brokers=1, down_max_s=0.5, prefix="rounds")
    assert result.faulted == []
    assert len(result.faults) >= ROUNDS
