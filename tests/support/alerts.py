"""The alert rules of the Helm chart, evaluated on the metrics of real processes.

    watch = Watch()
    watch.read(broker=system.metrics())
    assert watch.fires("BasculeProducersBlocked")

It knows the part of PromQL that the rules use; ``tests/tidy/test_alerts.py`` compares it with promtool. ``rate`` and ``increase``
do not extrapolate, so they are at most what Prometheus calculates. ``for`` is not waited for.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from prometheus_client.parser import text_string_to_metric_families

RULES: Final[Mapping[str, str]] = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((Path(__file__).parents[2] / "deploy/helm/bascule/files/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
JOB: Final = "bascule"
NAME: Final = "__name__"
#: The labels of a series, its name among them, as sorted pairs.
Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
#: Time in seconds and value of each reading; NaN if the series was missing in a reading.
Samples = list[tuple[float, float]]

_TOKEN: Final = re.compile(r'\s*("[^"]*"|\d+(?:\.\d+)?(?:e\d+)?(?![\dA-Za-z_])|\[\w+\]|[A-Za-z_]\w*|==|!=|>=|<=|=~|!~|[-+*/<>=(){},])')
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
_ARITHMETIC: Final[Mapping[str, Callable[[float, float], float]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else math.nan,
}  # fmt: skip
_LEVELS: Final = (("or",), ("and", "unless"), tuple(_COMPARISONS), ("+", "-"), ("*", "/"))


def _growth(samples: Samples, _range_s: float) -> float:
    """Return the growth of a counter, which may have begun again at 0."""
    values = [value for _, value in samples]
    return sum(after - before if after >= before else after for before, after in itertools.pairwise(values))


_OVER_TIME: Final[Mapping[str, Callable[[Samples, float], float]]] = {
    "increase": _growth,
    "rate": lambda samples, range_s: _growth(samples, range_s) / range_s,
    "changes": lambda samples, _: float(sum(a[1] != b[1] for a, b in itertools.pairwise(samples))),
    "min_over_time": lambda samples, _: min(value for _, value in samples),
    "last_over_time": lambda samples, _: samples[-1][1],
}
#: They need two readings of a series.
_DIFFERENCES: Final = ("increase", "rate")


class Watch:
    """What a Prometheus has read from some processes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._series: dict[Labels, Samples] = {}

    def read(self, *, at_s: float | None = None, **targets: str | None) -> None:
        """Note the metrics of processes by instance, None for one that does not answer. ``at_s`` is the time, by default the present."""
        found: Vector = {}
        for instance, text in targets.items():
            own = {"job": JOB, "instance": instance}
            found[_labels({NAME: "up", **own})] = 0.0 if text is None else 1.0
            for family in text_string_to_metric_families(text or ""):
                found |= {_labels({NAME: each.name, **each.labels, **own}): each.value for each in family.samples}
        self.note(found, time.time() if at_s is None else at_s)

    def note(self, found: Vector, at_s: float) -> None:
        """Note all series of one reading."""
        self.now_s = at_s
        for labels in self._series.keys() | found.keys():
            self._series.setdefault(labels, []).append((at_s, found.get(labels, math.nan)))

    def fires(self, alert: str) -> list[dict[str, str]]:
        """Return the labels of each series for which the condition of an alert holds; none if it does not fire."""
        return [dict(labels) for labels in _Expression(RULES[alert], self).value()]

    def chosen(self, matches: Callable[[Mapping[str, str]], bool]) -> Iterator[tuple[Labels, Samples]]:
        """Yield the series whose labels match, with all their readings."""
        return ((labels, samples) for labels, samples in self._series.items() if matches(dict(labels)))


def _labels(found: Mapping[str, str]) -> Labels:
    return tuple(sorted(found.items()))


def _kept(labels: Labels, names: list[str] | None) -> Labels:
    """Return the labels with these names; all except the name of the metric if None."""
    return tuple(each for each in labels if (each[0] != NAME if names is None else each[0] in names))


class _Expression:
    """A PromQL expression: it is evaluated while it is parsed."""

    def __init__(self, text: str, watch: Watch) -> None:
        self._tokens = _TOKEN.findall(text)
        assert "".join(self._tokens) == re.sub(r"\s+", "", text), f"cannot read {text}"
        self._watch = watch

    def value(self) -> Vector:
        found = self._level(0)
        assert not self._tokens, f"left: {self._tokens}"
        assert isinstance(found, dict)
        return found

    def _take(self, *wanted: str) -> str:
        """Return the next token if it is wanted, else ""."""
        return self._tokens.pop(0) if self._tokens and self._tokens[0] in wanted else ""

    def _need(self, wanted: str) -> None:
        assert self._take(wanted), f"{wanted} expected: {self._tokens}"

    def _level(self, level: int) -> Any:
        if level == len(_LEVELS):
            return self._operand()
        left = self._level(level + 1)
        while symbol := self._take(*_LEVELS[level]):
            on = self._names() if self._take("on") else None
            left = _combined(symbol, left, self._level(level + 1), on)
        return left

    def _names(self) -> list[str]:
        self._need("(")
        found = []
        while not self._take(")"):
            found.append(self._tokens.pop(0))
            self._take(",")
        return found

    def _operand(self) -> Any:
        if self._take("("):
            found = self._level(0)
            self._need(")")
            return found
        word = self._tokens.pop(0)
        if word[0].isdigit():
            return float(word)
        if word in ("sum", "count"):
            return self._aggregated(word)
        if word == "time":
            assert self._names() == []
            return self._watch.now_s
        if word == "absent":
            self._need("(")
            found = self._level(0)
            self._need(")")
            return {} if found else {(): 1.0}
        if word in _OVER_TIME:
            return self._over_time(word)
        assert self._tokens[:1] != ["("], f"the function {word} is not known"
        now_s = self._watch.now_s
        return {
            labels: samples[-1][1] for labels, samples in self._selected(word) if samples[-1][0] == now_s and not math.isnan(samples[-1][1])
        }

    def _aggregated(self, function: str) -> Vector:
        names = self._names() if self._take("by") else []
        self._need("(")
        inner = self._level(0)
        self._need(")")
        found: Vector = {}
        for labels, value in inner.items():
            key = _kept(labels, names)
            found[key] = found.get(key, 0.0) + (value if function == "sum" else 1.0)
        return found

    def _over_time(self, function: str) -> Vector:
        self._need("(")
        series = self._selected("" if self._tokens[0] == "{" else self._tokens.pop(0))
        range_s = float(self._tokens[0][1:-2]) * _UNITS[self._tokens.pop(0)[-2]]
        self._need(")")
        found: Vector = {}
        for labels, samples in series:
            within = [(at_s, value) for at_s, value in samples if at_s >= self._watch.now_s - range_s and not math.isnan(value)]
            if len(within) > (function in _DIFFERENCES):
                found[_kept(labels, None)] = _OVER_TIME[function](within, range_s)
        return found

    def _selected(self, metric: str) -> list[tuple[Labels, Samples]]:
        tests: list[Callable[[Mapping[str, str]], bool]] = [lambda labels: not metric or labels[NAME] == metric]
        if self._take("{"):
            while not self._take("}"):
                tests.append(_matcher(*(self._tokens.pop(0) for _ in range(3))))
                self._take(",")
        return list(self._watch.chosen(lambda labels: all(test(labels) for test in tests)))


def _matcher(label: str, symbol: str, quoted: str) -> Callable[[Mapping[str, str]], bool]:
    text, wanted = quoted.strip('"'), symbol in ("=", "=~")
    if "~" in symbol:
        return lambda labels: (re.fullmatch(text, labels.get(label, "")) is not None) is wanted
    return lambda labels: (labels.get(label, "") == text) is wanted


def _combined(symbol: str, left: Any, right: Any, on: list[str] | None) -> Any:
    """Return the result of an operator. A comparison keeps the series for which it holds."""
    if symbol in ("or", "and", "unless"):
        known = {_kept(labels, on) for labels in (left if symbol == "or" else right)}
        if symbol == "or":
            return {**left, **{labels: value for labels, value in right.items() if _kept(labels, on) not in known}}
        return {labels: value for labels, value in left.items() if (_kept(labels, on) in known) is (symbol == "and")}
    if not isinstance(left, dict) and not isinstance(right, dict):
        return _ARITHMETIC[symbol](left, right)
    pairs = list(_paired(left, right, on))
    if symbol in _COMPARISONS:
        return {labels: a for labels, a, b in pairs if _COMPARISONS[symbol](a, b)}
    return {_kept(labels, None): _ARITHMETIC[symbol](a, b) for labels, a, b in pairs}


def _paired(left: Any, right: Any, on: list[str] | None) -> Iterator[tuple[Labels, float, float]]:
    if not isinstance(right, dict):
        yield from ((labels, value, right) for labels, value in left.items())
    elif not isinstance(left, dict):
        yield from ((labels, left, value) for labels, value in right.items())
    else:
        others = {_kept(labels, on): value for labels, value in right.items()}
        for labels, value in left.items():
            if (key := _kept(labels, on)) in others:
                yield labels, value, others[key]
