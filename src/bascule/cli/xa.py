"""``bascule xa``: unfinished transactions, and operations on them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.log import LogFormatOption, LogLevelOption, settings_with_log
from bascule.cli.output import Format, FormatOption, line, note, show_document, table
from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bascule.xa import TransactionManager
    from bascule.xa.log import Heuristic, Outcome
    from bascule.xa.plan import Step
    from bascule.xa.recovery_protocol import Pass
    from bascule.xa.report import TransactionReport

commands = typer.Typer(
    help="Show and finish distributed transactions.",
    epilog="Example:  bascule xa list --manager shop.payments:manager",
    no_args_is_help=True,
)

ManagerOption = Annotated[
    str,
    typer.Option(
        "--manager",
        metavar="MODULE:NAME",
        envvar="BASCULE_XA_MANAGER",
        help="Python name of the application's TransactionManager, or of a function that returns it",
    ),
]
XidArgument = Annotated[str, typer.Argument(metavar="XID", help="Xid of a branch, as `bascule xa list` shows it")]
NowOption = Annotated[
    bool,
    typer.Option(
        "--now", help="Do not wait for the deadline of transactions that may still be running; roll them back if they have no decision"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="xa")


@commands.command("list", epilog="Example:  bascule xa list --manager shop.payments:manager")
def list_branches(
    manager: ManagerOption,
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show prepared branches with their pending outcomes, and heuristic outcomes."""
    settings_with_log(config, log_format, log_level)
    found = loaded(manager)
    _show(found, found.recoverer().look(patient=True), output)


@commands.command(epilog="Example:  bascule xa show shop/0199... --manager shop.payments:manager")
def show(
    transaction: Annotated[str, typer.Argument(metavar="ID", help="Id of a transaction, as in an error, or xid of one of its branches")],
    manager: ManagerOption,
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the decision of a transaction, its branches, and what recovery would do. Change nothing."""
    settings_with_log(config, log_format, log_level)
    found = loaded(manager)
    report = found.outcome(transaction)
    found.log.close()
    decision = report.decision
    branches = [{"resource": each.resource, "prepared": each.prepared, "action": each.action, "why": each.why} for each in report.branches]
    heuristics = [_heuristic(each) for each in report.heuristics]
    decided = None if decision is None else {"outcome": decision.outcome, "by": decision.by, "at_ms": decision.at_ms}
    content = {"id": report.id, "finding": report.finding, "decision": decided, "branches": branches, "heuristics": heuristics}
    show_document(content, output, partial(_draw, report, heuristics))


def _draw(report: TransactionReport, heuristics: Sequence[dict[str, Any]]) -> None:
    decision, branches = report.decision, report.branches
    line(f"{report.id}: {report.finding}")
    if decision is not None:
        line(f"decided: {decision.outcome}, by {decision.by}, {_when(decision.at_ms)}")
    if branches:
        prepared = {True: "yes", False: "no", None: "not known"}
        table(
            ("resource", "prepared", "action", "why"),
            ((each.resource, prepared[each.prepared], each.action or "", each.why) for each in branches),
        )
    _show_heuristics(heuristics)


@commands.command(epilog="Example:  bascule xa recover --manager shop.payments:manager --explain")
def recover(
    manager: ManagerOption,
    explain: Annotated[bool, typer.Option("--explain", help="Show what recovery would do, and why; change nothing")] = False,
    now: NowOption = False,
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Finish transactions that a crash has left, as the decision log says. Safe while the application runs. Exit with 1 if any remain."""
    settings_with_log(config, log_format, log_level)
    found = loaded(manager)
    recoverer = found.recoverer()
    done = recoverer.look(patient=not now) if explain else recoverer.run(patient=not now)
    _show(found, done, output)
    found.log.close()
    if not explain and (done.unreachable or done.failed or done.missing or done.foreign or done.undecidable):
        raise typer.Exit(1)


@commands.command(epilog="Example:  bascule xa commit 1111577411:shop/0199...:orders-db --manager shop.payments:manager")
def commit(
    xid: XidArgument,
    manager: ManagerOption,
    allow_split: Annotated[
        bool,
        typer.Option(
            "--allow-split",
            help="Commit even if the transaction may still be running, or a resource does not answer or has no prepared branch: "
            "some resources may commit and others not",
        ),
    ] = False,
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Commit a transaction that has no decision, in all resources.

    Refuse, with exit code 2, a transaction that may still be running, or of which a resource of the manager has no prepared branch.
    If the decision log already has ROLLBACK, roll the transaction back and exit with 2. Exit with 1 if a branch has a heuristic outcome.
    """
    settings_with_log(config, log_format, log_level)
    _finish(manager, xid, "commit", allow_split=allow_split)


@commands.command(epilog="Example:  bascule xa rollback 1111577411:shop/0199...:orders-db --manager shop.payments:manager")
def rollback(
    xid: XidArgument,
    manager: ManagerOption,
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Roll a transaction that has no decision back, in all resources.

    If the decision log already has COMMIT, commit the transaction and exit with 2. Exit with 1 if a branch has a heuristic outcome.
    """
    settings_with_log(config, log_format, log_level)
    _finish(manager, xid, "rollback")


@commands.command(epilog="Example:  bascule xa forget 1111577411:shop/0199...:orders-db --manager shop.payments:manager")
def forget(
    xid: XidArgument,
    manager: ManagerOption,
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Delete the record of a heuristic outcome that you have resolved, at the resource and in the decision log."""
    from bascule.xa import Xid

    settings_with_log(config, log_format, log_level)
    found = loaded(manager)
    found.recoverer().forget(Xid.parse(xid))
    found.log.close()
    note(f"forgotten: {xid}")


def loaded(where: str) -> TransactionManager:
    """Return the manager at MODULE:NAME, or the result of the function there. Raises InvalidInput."""
    from bascule.xa import TransactionManager

    module, _, name = where.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise InvalidInput(f"--manager {where!r}: must be MODULE:NAME, such as shop.payments:manager")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"--manager {where}: {error}") from error
    if not isinstance(found, TransactionManager) and callable(found):
        found = _called(where, found)
    if not isinstance(found, TransactionManager):
        raise InvalidInput(f"--manager {where} is a {type(found).__name__}, not a TransactionManager")
    return found


def _called(where: str, function: Callable[..., object]) -> object:
    try:
        inspect.signature(function).bind()
    except ValueError:
        pass  # some functions written in C do not say which arguments they need
    except TypeError as error:
        raise InvalidInput(f"--manager {where}: a function must need no arguments: {error}") from error
    return function()


def _finish(manager: str, xid: str, outcome: str, *, allow_split: bool = False) -> None:
    from bascule.xa import Xid
    from bascule.xa.log import Outcome

    found = loaded(manager)
    wanted: Outcome = Outcome(outcome)
    stands = found.recoverer().finish_now(Xid.parse(xid), wanted, allow_split=allow_split)
    heuristics = found.outcome(xid).heuristics
    found.log.close()
    _show_heuristics([_heuristic(each) for each in heuristics])
    if stands is not wanted:
        raise InvalidInput(f"the decision log already has {stands} for {xid}; this outcome was applied")
    note(f"{outcome}: {xid}")
    if heuristics:
        raise typer.Exit(1)


def _row(step: Step, done: Pass) -> dict[str, Any]:
    return {
        "xid": str(step.xid),
        "resource": step.resource,
        "action": str(step.action),
        "why": step.why,
        "failed": done.failed.get(step),
    }


def _show(manager: TransactionManager, done: Pass, output: Format) -> None:
    steps = [_row(step, done) for step in done.steps if step.resource]
    heuristics = [_heuristic(each) for each in done.heuristics]
    content = {
        "manager": manager.name,
        "branches": steps,
        "unreachable": done.unreachable,
        "missing": done.missing,
        "heuristics": heuristics,
    }
    show_document(content, output, partial(_draw_pass, manager.name, done, steps, heuristics))


def _draw_pass(manager: str, done: Pass, steps: Sequence[dict[str, Any]], heuristics: Sequence[dict[str, Any]]) -> None:
    if steps:
        table(("xid", "resource", "action", "why", "failed"), (list(step.values()) for step in steps))
    _show_heuristics(heuristics)
    for name, reason in done.unreachable.items():
        note(f"{name} does not answer: {reason}")
    for name, count in done.missing.items():
        note(f"{count} transactions wait for resource {name!r}, which the manager does not have; add a resource with this name")
    if not (steps or heuristics or done.unreachable or done.missing):
        line(f"{manager}: no unfinished transactions")


def _heuristic(heuristic: Heuristic) -> dict[str, Any]:
    return {**asdict(heuristic), "xid": str(heuristic.xid), "code": heuristic.code.name}


def _show_heuristics(heuristics: Sequence[dict[str, Any]]) -> None:
    if heuristics:
        table(
            ("xid", "heuristic outcome", "decision", "when", "reported by the resource"),
            ([each["xid"], each["code"], each["wanted"], _when(each["at_ms"]), each["text"]] for each in heuristics),
        )


def _when(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))
