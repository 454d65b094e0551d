"""Results of checks in the format of monitoring plugins (Nagios, Icinga, Sensu): one line, figures behind ``|``, and an exit code."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import typer

from bascule.cli.expected_answers import unexpected_answer
from bascule.cli.output import Format, line, printable, show_document
from bascule.core.errors import BasculeError, Unavailable


class CheckState(enum.IntEnum):
    """The state of a check; its number is the exit code."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


#: From the best state to the worst.
ORDER: Final = (CheckState.OK, CheckState.UNKNOWN, CheckState.WARNING, CheckState.CRITICAL)


class CheckFigure(NamedTuple):
    """A number with its limits, for graphs. ``unit`` is "", "s", "B" or "%"."""

    label: str
    value: float
    warning: float | None = None
    critical: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        label = self.label.replace("'", "''").replace("=", "_")
        limits = ";".join("" if each is None else f"{each:.15g}" for each in (self.warning, self.critical))
        return f"'{label}'={self.value:.15g}{self.unit};{limits}"


class CheckResult(NamedTuple):
    """The state of one thing, with the reason and the figures."""

    state: CheckState
    text: str
    figures: tuple[CheckFigure, ...] = ()


def above(value: float, warning: float | None, critical: float | None) -> CheckState:
    """Return the state of a value that should not exceed limits."""
    if critical is not None and value > critical:
        return CheckState.CRITICAL
    return CheckState.WARNING if warning is not None and value > warning else CheckState.OK


def below(value: float, warning: float | None, critical: float | None) -> CheckState:
    """Return the state of a value that should not fall below limits."""
    if critical is not None and value < critical:
        return CheckState.CRITICAL
    return CheckState.WARNING if warning is not None and value < warning else CheckState.OK


def finish(
    name: str, check: Callable[[], Iterable[CheckResult]], output: Format, *, unreachable: CheckState = CheckState.UNKNOWN
) -> NoReturn:
    """Run a check, print its results and exit with the worst state. ``unreachable`` is the state if the broker does not answer.

    The results are one line, as a table too, or an object of JSON or CSV. The worst results come first.
    """
    results = sorted(_results(check, unreachable), key=lambda each: ORDER.index(each.state), reverse=True)
    worst = results[0].state if results else CheckState.OK
    show_document(_document(name, worst, results), output, partial(line, f"{name.upper()} {_line(worst, results)}"))
    raise typer.Exit(worst)


def _results(check: Callable[[], Iterable[CheckResult]], unreachable: CheckState) -> list[CheckResult]:
    """Return the results of a check, or its error as one."""
    try:
        return list(check())
    except Unavailable as error:
        return [CheckResult(unreachable, str(error))]
    except BasculeError as error:
        return [CheckResult(CheckState.UNKNOWN, str(error))]
    except Exception as error:  # a crash would exit with the code of WARNING
        said = unexpected_answer(error)
        other = f"the broker gave another answer than this version of the command expects: {said}"
        why = f"unexpected error, which is a defect of the check: {error!r}" if said is None else other
        return [CheckResult(CheckState.UNKNOWN, why)]


def _document(name: str, worst: CheckState, results: Iterable[CheckResult]) -> dict[str, Any]:
    """Return the results for output as JSON or CSV."""
    found = [{"state": each.state.name, "text": each.text, "figures": [figure._asdict() for figure in each.figures]} for each in results]
    return {"check": name, "state": worst.name, "exit_code": worst.value, "results": found}


def _line(worst: CheckState, results: Sequence[CheckResult]) -> str:
    """Return the line of results, the worst first, without the name of the check."""
    # The bar separates the figures from the text, and names come from clients.
    text = printable("; ".join(each.text for each in results) or "nothing to check").replace("|", "/")
    figures = printable(" ".join(str(figure) for each in results for figure in each.figures)).replace("|", "/")
    return f"{worst.name} - {text}" + (f" | {figures}" if figures else "")
