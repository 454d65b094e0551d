"""A soak from its start to its verdict."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.soak.clients import failures_of
from tests.soak.faults import Fault, Faults
from tests.soak.journal import JournalWatch
from tests.soak.load import Load
from tests.soak.measures import Measures, Sample
from tests.soak.plan import EXPIRED, SPILLS, Plan
from tests.soak.records import Record
from tests.soak.site import OwnEnd, Site
from tests.support.history import Audit, Divert, Operation, Tally, check
from tests.support.stalls import Stall
from tests.support.system import Late

PACKAGES = ("bascule", "pyspark", "confluent-kafka")
#: A connection that broke before the system recovered may be detected a moment later.
AFTERMATH_MS = 5_000.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was observed in a soak, for the checker."""

    operations: Sequence[Operation]
    diverted: Mapping[str, Divert]
    ingested: Mapping[str, Sequence[str]]
    left: Mapping[str, Sequence[str]]
    healed_ms: float
    journal: Audit | None
    gap: str = ""  # why there is no audit of the journal

    def judge(self) -> Tally:
        """Check the observations against the promises."""
        return check(
            self.operations,
            diverted=self.diverted,
            ingested=self.ingested,
            journal=self.journal,
            spills=SPILLS,
            expiries=(EXPIRED,),
            left=self.left,
            healed_ms=self.healed_ms + AFTERMATH_MS,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A finished soak. Times are in s since the epoch."""

    plan: Plan
    begun_s: float
    healed_s: float
    ended_s: float
    faults: Sequence[Fault]
    samples: Sequence[Sample]
    own_ends: Sequence[OwnEnd]
    stalls: Sequence[Stall]
    records: Mapping[str, Sequence[Record]]  # of the diverts' topics
    evidence: Evidence
    tally: Tally
    failures: Sequence[str]  # of clients
    environment: Mapping[str, str]

    @property
    def good(self) -> bool:
        """Return whether every promise was kept, as far as it was checked."""
        return not self.faulted and self.tally.sent > 0

    @property
    def faulted(self) -> list[str]:
        """Return what must not happen: anomalies, failed clients, parts that ended without cause, brokers that kept clients waiting."""
        ends = (str(end) for end in self.own_ends if not end.excuse)
        return [*map(str, self.tally.anomalies), *self.failures, *ends, *map(str, self.stalls)]


def soak(plan: Plan, directory: Path, tell: Callable[[str], None]) -> Result:
    """Run a plan; processes, logs and histories are in ``directory``. Call it from a thread that stays alive.

    Raises BasculeError if the parts do not start at all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    left: dict[str, Sequence[str]] = {}
    with Site(plan, directory) as site, JournalWatch(site.bootstrap, plan) as journal, Load(site, directory) as load:
        measures = Measures(site)
        measures.start()
        begun_s = time.time()
        faults = Faults(site, plan, tell)
        faults.run()
        tell(f"{len(faults.done)} faults in {time.time() - begun_s:.0f} s; no more faults")
        try:
            site.heal()
        except Late as error:
            left["the parts"] = [str(error)]
        healed_s = time.time()
        load.finish()
        ended_s = time.time()
        measures.stop()
        evidence = Evidence(
            load.operations(), load.diverted(), load.ingested(), {**left, **load.left}, healed_s * 1000, journal.finish(), journal.gap
        )
        return Result(
            plan, begun_s, healed_s, ended_s, faults.done, measures.samples, site.own_ends, measures.stalls.found,
            {name: load.records(name) for name in load.topics}, evidence, evidence.judge(),
            [*load.failures, *failures_of([journal])], _environment(),
        )  # fmt: skip


def _environment() -> dict[str, str]:
    return {
        "machine": platform.platform(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "load at the end": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def settings_of(plan: Plan) -> dict[str, object]:
    """Return the plan for a report."""
    return {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
