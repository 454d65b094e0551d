"""``bascule xa`` lists and finishes transactions that a crash has left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa import TransactionManager, Xid
from bascule.xa.blocking import now_ms
from bascule.xa.errors import Code, ResourceFailed
from bascule.xa.log import Decision, Heuristic, LogState, Outcome
from bascule.xa.xid import branch, new_gtrid
from tests.unit.cli.conftest import Bascule


class Shop:
    """The module of an application, with the branches and decisions that a crash has left."""

    def __init__(self) -> None:
        self.database, self.kafka = DurableBranches(), DurableBranches()
        self.log = LogState()
        self.kafka_down = False

    def manager(self) -> TransactionManager:
        def watch(_point: str) -> None:
            if self.kafka_down:
                raise ResourceFailed("no route")

        resources = [ModelResource("db", self.database), ModelResource("kafka", self.kafka, watch=watch)]
        return TransactionManager("shop", ModelLog(self.log), resources)

    def leave(self, timeout_s: float = 0.0) -> Xid:
        gtrid = new_gtrid("shop", now_ms() + int(timeout_s * 1000))
        self.database.prepared[branch(gtrid, "db")] = ["row"]
        self.kafka.prepared[branch(gtrid, "kafka")] = ["message"]
        return branch(gtrid, "db")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop()
    module = ModuleType("shop_of_test")
    module.manager = shop.manager  # type: ignore[attr-defined]
    module.other = "text"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_of_test", module)
    monkeypatch.setenv("BASCULE_XA_MANAGER", "shop_of_test:manager")
    return shop


def test_xa_list_says_when_no_branches_are_left(bascule: Bascule, shop: Shop) -> None:
    done = bascule("xa", "list")
    assert done == (0, "shop: no unfinished transactions\n", "")


def test_xa_list_shows_each_branch_left_with_its_next_action(bascule: Bascule, shop: Shop) -> None:
    xid, young = shop.leave(), shop.leave(timeout_s=50)
    done = bascule("xa", "list", "--format", "json")
    assert done.returncode == 0
    branches = json.loads(done.stdout)["branches"]
    assert [(each["xid"], each["resource"], each["action"]) for each in branches if each["resource"] == "db"] == [
        (str(xid), "db", "rollback"),
        (str(young), "db", "wait"),
    ]
    assert str(xid) in bascule("xa", "list").stdout
    assert shop.database.prepared


def test_xa_recover_carries_out_the_logged_decision_and_explains_without_changes(bascule: Bascule, shop: Shop) -> None:
    xid = shop.leave()
    shop.log.add(Decision(xid.gtrid, Outcome.COMMIT, ("db", "kafka"), 0, "host/1"))
    assert "the log says commit, by host/1" in bascule("xa", "recover", "--explain").stdout
    assert shop.database.committed == []
    assert bascule("xa", "recover").returncode == 0
    assert (shop.database.committed, shop.kafka.committed) == (["row"], ["message"])


def test_recovery_that_leaves_branches_exits_with_1(bascule: Bascule, shop: Shop) -> None:
    shop.leave()
    shop.kafka_down = True
    done = bascule("xa", "recover")
    assert done.returncode == 1
    assert "kafka does not answer: XAER_RMFAIL: no route" in done.stderr


def test_removed_or_renamed_resource_is_named_and_recovery_exits_with_1(bascule: Bascule, shop: Shop) -> None:
    removed, renamed = new_gtrid("shop", 0), new_gtrid("shop", 0)
    foreign = new_gtrid("other", 0)
    for gtrid, names in ((removed, ("db", "stock")), (renamed, ("db",)), (foreign, ("billing",))):
        shop.log.add(Decision(gtrid, Outcome.COMMIT, names, now_ms(), "host/1"))
    shop.database.prepared[branch(renamed, "old-db")] = ["row"]
    output = bascule("xa", "list").stderr
    assert "1 transactions wait for resource 'stock', which the manager does not have" in output
    assert "'old-db'" in output
    assert "billing" not in output
    assert json.loads(bascule("xa", "list", "--format", "json").stdout)["missing"] == {"old-db": 1, "stock": 1}
    assert bascule("xa", "recover").returncode == 1
    assert removed in shop.log.decisions


def test_branch_of_another_decision_log_is_named_and_recovery_exits_with_1(bascule: Bascule, shop: Shop) -> None:
    shop.log.log_id = "aaaaaaaa"
    xid = branch(new_gtrid("shop", 0, "bbbbbbbb"), "db")
    shop.database.prepared[xid] = ["row"]
    done = bascule("xa", "recover")
    assert done.returncode == 1
    assert "began the branch with decision log bbbbbbbb" in " ".join(
        json.loads(bascule("xa", "list", "--format", "json").stdout)["branches"][0]["why"].split()
    )
    assert list(shop.database.prepared) == [xid]
    assert "Use decision log bbbbbbbb" in " ".join(bascule("xa", "rollback", str(xid)).stderr.split())


def test_transaction_before_its_deadline_is_left_alone_unless_now_is_given(bascule: Bascule, shop: Shop) -> None:
    shop.leave(timeout_s=50)
    assert "wait" in bascule("xa", "recover").stdout
    assert shop.database.prepared
    bascule("xa", "recover", "--now")
    assert shop.database.prepared == shop.kafka.prepared == {}


@pytest.mark.parametrize("command", ["commit", "rollback"])
def test_operator_finishes_transaction_in_all_resources(bascule: Bascule, shop: Shop, command: str) -> None:
    xid = shop.leave()
    done = bascule("xa", command, str(xid))
    assert (done.returncode, done.stderr) == (0, f"{command}: {xid}\n")
    assert shop.database.prepared == shop.kafka.prepared == {}
    assert shop.kafka.committed == (["message"] if command == "commit" else [])


def test_xa_show_prints_decision_branches_and_next_actions(bascule: Bascule, shop: Shop) -> None:
    xid = shop.leave()
    shop.log.add(Decision(xid.gtrid, Outcome.COMMIT, ("db", "kafka"), 0, "host/1"))
    shop.log.add(Heuristic(branch(xid.gtrid, "kafka"), Code.XA_HEURRB, Outcome.COMMIT, "by hand", 0))
    shown = bascule("xa", "show", xid.gtrid.decode())
    assert shown.returncode == 0
    assert all(text in shown.stdout for text in (": committed", "decided: commit, by host/1", "kafka", "by hand"))
    found = json.loads(bascule("xa", "show", str(xid), "--format", "json").stdout)
    assert (found["id"], found["finding"], found["decision"]["by"]) == (xid.gtrid.decode(), "committed", "host/1")
    assert [(each["resource"], each["prepared"], each["action"]) for each in found["branches"]] == [
        ("db", True, "commit"),
        ("kafka", True, "wait"),
    ]
    assert bascule("xa", "show", new_gtrid("shop", 0).decode()).stdout.endswith(": not found\n")
    assert bascule("xa", "show", "nonsense").returncode == 2
    assert shop.database.prepared


def test_xa_commit_that_may_split_the_transaction_is_refused_unless_allowed(bascule: Bascule, shop: Shop) -> None:
    xid = shop.leave(timeout_s=600)
    shop.kafka.prepared.clear()
    refused = bascule("xa", "commit", str(xid))
    assert refused.returncode == 2
    assert all(reason in refused.stderr for reason in ("may still be working", "no prepared branch in kafka", "--allow-split"))
    assert (shop.log.decisions, list(shop.database.prepared)) == ({}, [xid])
    assert bascule("xa", "commit", str(xid), "--allow-split").returncode == 0
    assert shop.database.committed == ["row"]


def test_logged_decision_takes_precedence_over_the_operator(bascule: Bascule, shop: Shop) -> None:
    xid = shop.leave()
    shop.log.add(Decision(xid.gtrid, Outcome.COMMIT, ("db", "kafka"), 0, "host/1"))
    done = bascule("xa", "rollback", str(xid))
    assert done.returncode == 2
    assert "the decision log already has commit" in done.stderr
    assert shop.kafka.committed == ["message"]


def test_xa_list_shows_heuristic_outcome_until_forgotten(bascule: Bascule, shop: Shop) -> None:
    xid = branch(new_gtrid("shop", 0), "db")
    shop.log.add(Heuristic(xid, Code.XA_HEURRB, Outcome.COMMIT, "rolled back by hand", 0))
    shown = bascule("xa", "list").stdout
    assert "XA_HEURRB" in shown
    assert "rolled back by hand" in shown
    assert bascule("xa", "forget", str(xid)).returncode == 0
    assert shop.log.heuristics == {}
    assert bascule("xa", "forget", str(xid)).returncode == 1


@pytest.mark.parametrize("code", [Code.XA_HEURCOM, Code.XA_HEURRB, Code.XA_HEURMIX, Code.XA_HEURHAZ], ids=lambda code: code.name)
@pytest.mark.parametrize(("wanted", "finding"), [(Outcome.COMMIT, "committed"), (Outcome.ROLLBACK, "rolled back")])
def test_operator_command_that_meets_heuristic_outcome_shows_it_until_forgotten(
    bascule: Bascule, shop: Shop, wanted: Outcome, finding: str, code: Code
) -> None:
    xid = shop.leave()
    ModelResource("db", shop.database).force(xid, code)
    ordered = bascule("xa", str(wanted), f"1111577411:{xid.gtrid.decode()}:kafka")
    assert ordered.returncode == 1
    assert code.name in ordered.stdout
    assert shop.kafka.prepared == {}
    shown = bascule("xa", "show", xid.gtrid.decode())
    assert shown.stdout.startswith(f"{xid.gtrid.decode()}: {finding}\n")
    row = " ".join(line for line in shown.stdout.splitlines() if code.name in line)
    assert (str(xid) in row, str(wanted) in row, "was finished by hand" in row) == (True, True, True)
    assert bascule("xa", "forget", str(xid)).returncode == 0
    assert (shop.database.heuristic, shop.log.heuristics) == ({}, {})
    assert bascule("xa", "recover").returncode == 0
    assert bascule("xa", "list").stdout == "shop: no unfinished transactions\n"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("shop_of_test", "must be MODULE:NAME, such as"),
        ("missing_module:manager", "No module named"),
        ("shop_of_test:missing", "no attribute"),
        ("./shop_of_test.py:manager", "must be MODULE:NAME, such as"),
        ("json:loads", "a function must need no arguments: missing a required argument: 's'"),
        ("shop_of_test:other", "is a str, not a TransactionManager"),
    ],
)
def test_unusable_manager_option_is_refused_with_the_reason(bascule: Bascule, shop: Shop, where: str, message: str) -> None:
    done = bascule("xa", "list", "--manager", where)
    assert done.returncode == 2
    assert message in done.stderr


def test_invalid_xid_is_refused_by_the_command(bascule: Bascule, shop: Shop) -> None:
    assert "invalid Xid" in bascule("xa", "commit", "nonsense").stderr


@pytest.mark.parametrize("how", ["flags", "environment", "file"])
def test_log_of_xa_recover_follows_flags_environment_and_file(
    bascule: Bascule, shop: Shop, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    xid = shop.leave()
    flags: tuple[str, ...] = ()
    if how == "flags":
        flags = ("--log-format", "json", "--log-level", "info")
    elif how == "environment":
        monkeypatch.setenv("BASCULE_LOG__FORMAT", "json")
        monkeypatch.setenv("BASCULE_LOG__LEVEL", "info")
    else:
        Path("bascule.toml").write_text('[log]\nformat = "json"\nlevel = "info"\n')
    done = bascule("xa", "recover", *flags)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(each["level"], each["event"], each["outcome"]) for each in lines] == [("info", "recovery finishing branch", "rollback")] * 2
    assert str(xid) in {each["xid"] for each in lines}


@pytest.mark.parametrize("command", ["list", "recover"])
def test_xa_commands_log_nothing_below_warning_by_default(bascule: Bascule, shop: Shop, command: str) -> None:
    shop.leave()
    assert bascule("xa", command).stderr == ""


def test_log_format_alone_leaves_the_level_at_warning(bascule: Bascule, shop: Shop) -> None:
    shop.leave()
    shop.kafka_down = True
    lines = bascule("xa", "recover", "--log-format", "json").stderr.splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert {each["level"] for each in logged} <= {"warning", "error"}
    assert lines[-1] == "kafka does not answer: XAER_RMFAIL: no route"


@pytest.mark.parametrize("arguments", [("list",), ("recover",), ("commit", "7:67:62"), ("rollback", "7:67:62"), ("forget", "7:67:62")])
def test_invalid_settings_are_reported_before_xa_command_acts(bascule: Bascule, shop: Shop, arguments: tuple[str, ...]) -> None:
    shop.leave()
    Path("bascule.toml").write_text('[log]\nlevel = "loud"\n')
    done = bascule("xa", *arguments)
    assert done.returncode == 2
    assert "log.level" in done.stderr
    assert shop.database.prepared
