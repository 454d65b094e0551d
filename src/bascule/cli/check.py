"""``bascule check``: checks of a broker for monitoring systems that run plugins."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.administer import QueueName
from bascule.cli.check_result import CheckFigure, CheckResult, CheckState, above, below, finish
from bascule.cli.completed_names import pipeline_names
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption
from bascule.core.errors import InvalidInput, Unavailable

commands = typer.Typer(
    help="Check a broker for a monitoring system. Exit with 0 (ok), 1 (warning), 2 (critical) or 3 (unknown).",
    epilog="Example:  bascule check depth orders --warning 1000 --critical 10000",
    no_args_is_help=True,
)

WarningOption = Annotated[float | None, typer.Option("--warning", "-w", min=0, help="Limit of the state WARNING", show_default=False)]
CriticalOption = Annotated[float | None, typer.Option("--critical", "-c", min=0, help="Limit of the state CRITICAL", show_default=False)]
#: States of a pipeline that need somebody.
BROKEN: Final = ("failed", "unassigned", "waiting for coverage")
#: States of a pipeline that is as wanted, by the wanted state.
AS_WANTED: Final = {"running": ("running", "catching up", "waiting"), "paused": ("paused",), "stopped": ("stopped",)}
_EXPIRY: Final = re.compile(r'^bascule_certificate_expiry_timestamp_seconds\{setting="([^"]*)"\} (\S+)$', re.MULTILINE)
_METRICS: Final = re.compile(r"^(# HELP |# TYPE )?bascule_", re.MULTILINE)
DAY_S: Final = 86_400


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="check")


@commands.command(epilog="Example:  bascule check alive --admin http://127.0.0.1:8672")
def alive(config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
    """Check that the broker answers. CRITICAL if it does not."""

    def check() -> Iterator[CheckResult]:
        _said(AdminApiClient(admin, config), "livez", ("ok",))
        yield CheckResult(CheckState.OK, "the broker answers")

    finish("alive", check, output, unreachable=CheckState.CRITICAL)


@commands.command(epilog="Example:  bascule check active --standby-ok")
def active(
    standby_ok: Annotated[bool, typer.Option("--standby-ok", help="A standby that is ready to take over is OK, too")] = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that the broker serves clients. CRITICAL with the reason if it does not."""

    def check() -> Iterator[CheckResult]:
        path, known = ("readyz", ("active", "standby")) if standby_ok else ("active", ("active",))
        role = _said(AdminApiClient(admin, config), path, known)
        yield CheckResult(CheckState.OK, f"the broker is {role}")

    finish("active", check, output, unreachable=CheckState.CRITICAL)


def _said(client: AdminApiClient, path: str, known: tuple[str, ...]) -> str:
    """Return the word that the broker answers. Raises Unavailable if something else answers at its address."""
    word = client.download(path).decode(errors="replace").strip()
    if word not in known:
        raise Unavailable(f"the answer is not from the admin server of a broker: {word!r:.60}")
    return word


@commands.command(epilog="Example:  bascule check brokers --warning 2 --critical 1")
def brokers(
    warning: WarningOption = 2,
    critical: CriticalOption = 1,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that at least as many brokers run as the limits: the active one and its standbys. CRITICAL if none is elected.

    A broker that was killed counts until its session at Kafka ends.
    """

    def check() -> Iterator[CheckResult]:
        found = AdminApiClient(admin, config).look("brokers")
        figure = CheckFigure("brokers", len(found), warning, critical)
        names = ", ".join(each["name"] + (" (elected)" if each["elected"] else "") for each in found)
        if any(each["elected"] for each in found):
            yield CheckResult(below(len(found), warning, critical), f"{len(found)} brokers: {names}", (figure,))
        else:
            yield CheckResult(CheckState.CRITICAL, f"no broker is elected; {len(found)} brokers stand for election: {names}", (figure,))

    finish("brokers", check, output)


@commands.command(epilog="Example:  bascule check depth orders --warning 1000 --critical 10000")
def depth(
    name: QueueName,
    warning: WarningOption = None,
    critical: CriticalOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that a queue has at most as many messages as the limits: waiting, with consumers, and delayed messages together."""

    def check() -> Iterator[CheckResult]:
        queue = AdminApiClient(admin, config).look("queues", name=name)
        yield _depth(queue["name"], queue["messages"] + queue["delivering"] + queue["delayed"], warning, critical)

    finish("depth", check, output)


def _depth(name: str, messages: int, warning: float | None, critical: float | None) -> CheckResult:
    figure = CheckFigure(f"{name} messages", messages, warning, critical)
    return CheckResult(above(messages, warning, critical), f"{name} has {messages:,} messages", (figure,))


@commands.command(epilog="Example:  bascule check consumers orders --warning 2 --critical 1")
def consumers(
    name: QueueName,
    warning: WarningOption = None,
    critical: CriticalOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that a queue has at least as many consumers as the limits."""

    def check() -> Iterator[CheckResult]:
        count = AdminApiClient(admin, config).look("queues", name=name)["consumers"]
        figure = CheckFigure(f"{name} consumers", count, warning, critical)
        yield CheckResult(below(count, warning, critical), f"{name} has {count:,} consumers", (figure,))

    finish("consumers", check, output)


@commands.command(epilog="Example:  bascule check age orders --warning 60 --critical 600")
def age(
    name: QueueName,
    warning: WarningOption = None,
    critical: CriticalOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that the next message of a queue is at most as old as the limits, in seconds since its JMSTimestamp.

    The check reads a message, so it needs the role `edit`, and leaves a record in the audit log.
    """

    def check() -> Iterator[CheckResult]:
        found = AdminApiClient(admin, config).look("messages", queue=name, count=1)["messages"]
        if not found or found[0]["state"] != "waiting":
            yield CheckResult(CheckState.OK, f"{name} has no waiting message", (CheckFigure(f"{name} age", 0, warning, critical, "s"),))
            return
        sent_ms = found[0].get("timestamp_ms")
        if not sent_ms:
            yield CheckResult(CheckState.UNKNOWN, f"the next message of {name} has no JMSTimestamp")
            return
        age_s = max(0.0, time.time() - sent_ms / 1000)
        figure = CheckFigure(f"{name} age", round(age_s, 3), warning, critical, "s")
        yield CheckResult(above(age_s, warning, critical), f"the next message of {name} is {age_s:,.0f} s old", (figure,))

    finish("age", check, output)


@commands.command("dead-letters", epilog="Example:  bascule check dead-letters --warning 0 --critical 100")
def dead_letters(
    warning: WarningOption = 0,
    critical: CriticalOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that the dead-letter queue has at most as many messages as the limits. By default one message is a WARNING."""

    def check() -> Iterator[CheckResult]:
        found = AdminApiClient(admin, config).look("overview")
        yield _depth(found["dead_letter_address"], found["dead_letters"], warning, critical)

    finish("dead-letters", check, output)


@commands.command(epilog="Example:  bascule check pipelines --warning 1000 --critical 100000")
def pipelines(
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Names of diverts and ingresses (default: all)", show_default=False, autocompletion=pipeline_names
        ),
    ] = None,
    warning: WarningOption = None,
    critical: CriticalOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check the state of diverts and ingresses, and that their lag in records does not exceed the limits.

    CRITICAL: a pipeline has failed, or no driver runs it. WARNING: a pipeline is not yet as wanted. A pipeline that was paused or stopped
    on request is OK.
    """

    def check() -> Iterator[CheckResult]:
        client = AdminApiClient(admin, config)
        found = [*client.look("diverts"), *client.look("ingresses")]
        if unknown := set(name or ()) - {each["name"] for each in found}:
            raise InvalidInput(f"there is no divert or ingress {min(unknown)!r:.60}")
        yield from (_pipeline(each, warning, critical) for each in found if not name or each["name"] in name)

    finish("pipelines", check, output)


def _pipeline(found: dict[str, Any], warning: float | None, critical: float | None) -> CheckResult:
    what, state, lag = f"{found['kind']} {found['name']}", found["state"], found["lag"]
    figures = () if lag is None else (CheckFigure(f"{what} lag", lag, warning, critical),)
    if state in BROKEN and found["wanted"] == "running":
        why = f": {found['error']}" if found["error"] else ""
        return CheckResult(CheckState.CRITICAL, f"{what} is {state}{why}", figures)
    if state != "disabled" and state not in (*AS_WANTED.get(found["wanted"], ()), *BROKEN):
        why = f": {found['error']}" if state == "stopped" and found["error"] else ""
        return CheckResult(CheckState.WARNING, f"{what} is {state}, wanted {found['wanted']}{why}", figures)
    lag_state = CheckState.OK if lag is None or found["wanted"] != "running" else above(lag, warning, critical)
    return CheckResult(lag_state, f"{what} is {state}" + ("" if lag is None else f", lag {lag:,}"), figures)


@commands.command(epilog="Example:  bascule check certificates --warning 30 --critical 7")
def certificates(
    warning: WarningOption = 30,
    critical: CriticalOption = 7,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that the certificates of the broker's listeners are valid for at least as many days as the limits."""

    def check() -> Iterator[CheckResult]:
        text = AdminApiClient(admin, config).download("metrics").decode(errors="replace")
        if not _METRICS.search(text):
            raise InvalidInput("the answer to /metrics has no metric of a broker")
        for setting, end in _EXPIRY.findall(text):
            days = (float(end) - time.time()) / DAY_S
            if not math.isfinite(days):
                raise InvalidInput(f"the end of {setting} is {end!r:.60}, which is no time")
            figure = CheckFigure(f"{setting} days", round(days, 2), warning, critical)
            said = f"{setting} expires in {days:,.1f} days" if days > 0 else f"{setting} has expired"
            yield CheckResult(CheckState.CRITICAL if days <= 0 else below(days, warning, critical), said, (figure,))

    finish("certificates", check, output)


@commands.command(epilog="Example:  bascule check memory --warning 70 --critical 90")
def memory(
    warning: WarningOption = 75,
    critical: CriticalOption = 90,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that the broker uses at most as many percent of broker.memory_bytes as the limits. CRITICAL if it blocks producers."""

    def check() -> Iterator[CheckResult]:
        found = AdminApiClient(admin, config).look("overview")["memory"]
        if found is None:
            yield CheckResult(CheckState.UNKNOWN, "the broker has not loaded its state yet")
            return
        percent = 100 * found["used_bytes"] / max(1, found["limit_bytes"])
        figures = (CheckFigure("memory", round(percent, 2), warning, critical, "%"), CheckFigure("used", found["used_bytes"], unit="B"))
        if found["blocked"]:
            yield CheckResult(CheckState.CRITICAL, f"producers are blocked: {found['blocked']}", figures)
        else:
            yield CheckResult(above(percent, warning, critical), f"{percent:.1f} % of the memory limit are used", figures)

    finish("memory", check, output)


@commands.command(epilog="Example:  bascule check journal --warning 1000000000 --critical 5000000000")
def journal(
    warning: WarningOption = None,
    critical: CriticalOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that nothing keeps more bytes of the journal than the limits. CRITICAL if unread records of a pipeline are deleted."""
    finish("journal", partial(_journal, admin, config, warning, critical), output)


def _journal(admin: str | None, config: Any, warning: float | None, critical: float | None) -> Iterator[CheckResult]:
    pins = AdminApiClient(admin, config).look("overview")["pins"]
    for pin in pins:
        what = f"{pin['keeper']} {pin['name']}".strip()
        figure = CheckFigure(f"{what} bytes", pin["bytes"], warning, critical, "B")
        if pin["released"]:
            yield CheckResult(
                CheckState.CRITICAL, f"unread records of {what} are deleted, since it exceeds journal.pinned_bytes", (figure,)
            )
        else:
            yield CheckResult(above(pin["bytes"], warning, critical), f"{what} keeps {pin['bytes']:,} bytes", (figure,))
