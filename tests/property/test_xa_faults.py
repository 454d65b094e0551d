"""Transactions and decision logs under random faults: small models, in orders that no hand-written test covers."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.core.errors import Unavailable
from bascule.xa import file_log
from bascule.xa.errors import ResourceFailed
from bascule.xa.file_log import FileLog
from bascule.xa.log import Decision, Outcome
from tests.unit.xa.crashes import ENDINGS, VOTES, Crash, World, run, verdict

#: A transaction over four resources passes about this number of points; a recovery pass fewer.
POINTS = 60


class Weather:
    """Something may happen at each point, as drawn."""

    def __init__(self, world: World, plan: dict[int, str]) -> None:
        self._world = world
        self._plan = plan
        self._seen = 0
        self._down: set[str] = set()
        self._crashed = False

    def __call__(self, point: str) -> None:
        what = self._plan.get(self._seen, "")
        self._seen += 1
        who = point.partition(".")[0]
        if what == "crash" or self._crashed:
            self._crashed = True
            raise Crash
        if what == "recover":
            self._world.recover()
        elif what == "up":
            self._down.clear()
        elif what == "down":
            self._down.add(who)
        if who in self._down:
            raise Unavailable("the log is down") if who == "log" else ResourceFailed(f"{who} is down")


plans = st.dictionaries(st.integers(0, POINTS), st.sampled_from(["crash", "recover", "down", "up", "recover"]), max_size=8)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(VOTES), min_size=1, max_size=4), st.sampled_from(ENDINGS), plans, st.lists(plans, max_size=3))
def test_random_faults_split_no_transaction(votes: list[str], ending: str, plan: dict[int, str], later: list[dict[int, str]]) -> None:
    world = World(votes)
    told = run(world, ending, Weather(world, plan))
    for each in later:  # recoveries with faults of their own
        try:
            world.recover(Weather(world, each))
        except (Crash, Unavailable):
            continue
    for _ in range(2):
        world.recover()
    # One resource alone may have been committed, and nothing records it.
    assert verdict(world, told) == []


operations = st.one_of(
    st.tuples(st.just("decide"), st.integers(0, 1), st.integers(0, 5), st.sampled_from(list(Outcome))),
    st.tuples(st.just("forget"), st.integers(0, 1), st.integers(0, 5), st.none()),
    st.tuples(st.just("crash"), st.integers(0, 1), st.integers(0, 80), st.none()),
)


@given(st.lists(operations, max_size=40))
def test_file_log_equals_its_model_under_crashes(steps: list[tuple[str, int, int, Outcome | None]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        logs = [FileLog(path), FileLog(path)]
        model: dict[bytes, Outcome] = {}
        forgotten: list[set[bytes]] = [set(), set()]  # not yet written: a crash brings them back
        for call, who, number, outcome in steps:
            gtrid = b"shop/%d" % number
            if call == "decide" and outcome is not None:
                for gone in forgotten[who]:
                    model.pop(gone, None)
                forgotten[who].clear()
                stands = logs[who].decide(Decision(gtrid, outcome, (), 0, "x")).outcome
                assert stands is model.setdefault(gtrid, outcome)
            elif call == "forget":
                logs[who].forget([gtrid])
                forgotten[who].add(gtrid)
            else:
                logs[who] = FileLog(path)
                forgotten[who].clear()
                with path.open("ab") as torn:
                    torn.write(b"0123abcd + {" + b"x" * number)
        file_log.FileLog.read(logs[0])
        for gone in forgotten[0]:
            model.pop(gone, None)
        assert {gtrid: each.outcome for gtrid, each in FileLog(path).read().decisions.items()} == model
        for log in logs:
            log.close()
