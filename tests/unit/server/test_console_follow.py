"""The console follows the life of a message: when it asks the broker again, and when it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from bascule.cli import why
from bascule.server.console import ROOT, files

MODULE: Final = "life-follow.js"
#: Runs one following: each step is the state of an answer, or the status of an error. The clock goes on by `took` during a search.
SCRIPT: Final = """
import { followLife, PAUSE_MS, PAUSES } from "./follow.mjs";
const { steps, took, unchecked, left, hidden } = JSON.parse(process.argv[2]);
const asking = new AbortController();
const waits = [], seen = [];
let ms = 0, searches = 0, hides = hidden;
await followLife({
  signal: asking.signal, now: () => ms, follows: () => searches < unchecked, hidden: () => hides-- > 0,
  wait: async (pause) => { waits.push(pause); if (searches >= left) asking.abort(); },
  search: async () => {
    ms += took;
    const step = steps[Math.min(searches, steps.length - 1)];
    searches += 1;
    if (typeof step === "number") throw Object.assign(new Error(), { status: step });
    return { ended: step };
  },
  show: (life, again) => seen.push([life.ended, again]), fail: (error) => seen.push(error.status),
});
console.log(JSON.stringify({ searches, waits, seen, PAUSE_MS, PAUSES }));
"""


def followed(tmp_path: Path, *steps: bool | int, took: float = 0, unchecked: int = 99, left: int = 99, hidden: int = 0) -> dict[str, Any]:
    node = shutil.which("node")
    assert node is not None, "Node.js runs the scripts of the console"
    (tmp_path / "follow.mjs").write_bytes(files()[f"{ROOT}{MODULE}"][0])
    (tmp_path / "script.mjs").write_text(SCRIPT)
    given = json.dumps({"steps": steps, "took": took, "unchecked": unchecked, "left": left, "hidden": hidden})
    run = subprocess.run([node, tmp_path / "script.mjs", given], capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_broker_is_asked_until_two_answers_have_the_end(tmp_path: Path) -> None:
    found = followed(tmp_path, False, True, False, True, True)
    assert (found["searches"], found["waits"]) == (5, [2000] * 4)
    assert found["seen"] == [[False, True], [True, True], [False, True], [True, True], [True, False]]


def test_pauses_are_those_of_the_command(tmp_path: Path) -> None:
    found = followed(tmp_path, False, True, took=3000)
    assert found["waits"] == [12_000, 12_000]
    assert (found["PAUSE_MS"], found["PAUSES"]) == (1000 * why.LOOK_S, why.LOOK_PAUSES)


def test_search_without_following_is_one_request(tmp_path: Path) -> None:
    found = followed(tmp_path, False, unchecked=1)
    assert (found["searches"], found["waits"], found["seen"]) == (1, [], [[False, False]])


@pytest.mark.parametrize(("status", "searches"), [(503, 3), (0, 3), (401, 1), (403, 1)])
def test_error_that_may_pass_does_not_end_it(status: int, searches: int, tmp_path: Path) -> None:
    found = followed(tmp_path, status, True)
    assert (found["searches"], found["seen"][0]) == (searches, status)


def test_page_that_is_left_asks_no_more(tmp_path: Path) -> None:
    assert followed(tmp_path, False, left=2)["searches"] == 2


def test_hidden_page_asks_when_it_is_shown_again(tmp_path: Path) -> None:
    found = followed(tmp_path, False, True, hidden=3)
    assert (found["searches"], found["waits"]) == (3, [2000] * 5)
