"""Where brokers are: ``amqp://``, ``amqps://`` and ``failover:(...)`` URLs, with the options of Qpid JMS that mean something here."""

from __future__ import annotations

import random
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from bascule.core.errors import InvalidInput

PORTS: Final = {"amqp": 5672, "amqps": 5671}
_FORM: Final = "a broker is given as amqp://[USER:PASSWORD@]HOST[:PORT], amqps://... or failover:(URL,URL)"


class Endpoint(NamedTuple):
    """One broker."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Reconnect:
    """How often and how fast to connect again. ``attempts_max`` -1 is for ever; so many rounds over all endpoints are tried."""

    initial_delay_s: float = 0.0
    delay_s: float = 0.1
    delay_max_s: float = 30.0
    multiplier: float = 2.0
    attempts_max: int = -1
    startup_attempts_max: int = -1
    randomize: bool = False


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """What a URL says. ``reconnect`` is None for one broker that is not to be connected to again; None: the URL does not say."""

    endpoints: tuple[Endpoint, ...]
    reconnect: Reconnect | None = None
    user: str | None = None
    password: str | None = None
    client_id: str | None = None
    prefetch: int | None = None
    timeout_s: float | None = None

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Of a URL. Raises InvalidInput, which names what is wrong."""
        failover = re.fullmatch(r"failover:(?://)?\((?P<urls>[^()]*)\)(?:\?(?P<query>.*))?", url)
        if failover is None:
            return _single(url)
        addresses = [_single(each.strip()) for each in failover["urls"].split(",")]
        endpoints = tuple(endpoint for each in addresses for endpoint in each.endpoints)
        return _with_options(replace(addresses[0], endpoints=endpoints, reconnect=Reconnect()), failover["query"] or "")


def _single(url: str) -> BrokerUrl:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise InvalidInput(f"{url!r}: {error}") from error
    if parts.scheme not in PORTS or not parts.hostname or parts.path.strip("/"):
        raise InvalidInput(f"{url!r}: {_FORM}")
    user, password = (urllib.parse.unquote(part) if part else None for part in (parts.username, parts.password))
    return _with_options(BrokerUrl((Endpoint(parts.hostname, port, parts.scheme == "amqps"),), None, user, password), parts.query)


def _milliseconds(text: str) -> float:
    return int(text) / 1000


def _limited(text: str) -> float | None:
    return _milliseconds(text) if int(text) >= 0 else None


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


#: Options of Qpid JMS: the field that each sets, and how its text is read. Times are in ms there.
_OPTIONS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "jms.username": ("user", str),
    "jms.password": ("password", str),
    "jms.clientID": ("client_id", str),
    "jms.prefetchPolicy.all": ("prefetch", int),
    "jms.requestTimeout": ("timeout_s", _limited),
    "failover.initialReconnectDelay": ("initial_delay_s", _milliseconds),
    "failover.reconnectDelay": ("delay_s", _milliseconds),
    "failover.maxReconnectDelay": ("delay_max_s", _milliseconds),
    "failover.reconnectBackOffMultiplier": ("multiplier", float),
    "failover.maxReconnectAttempts": ("attempts_max", int),
    "failover.startupMaxReconnectAttempts": ("startup_attempts_max", int),
    "failover.randomize": ("randomize", _truth),
}


def _with_options(address: BrokerUrl, query: str) -> BrokerUrl:
    for name, text in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise InvalidInput(f"URL option {name!r} is not known; there are {', '.join(_OPTIONS)}")
        if name.startswith("failover.") and address.reconnect is None:
            raise InvalidInput(f"URL option {name} belongs behind failover:(...)")
        to, read = _OPTIONS[name]
        try:
            value = read(text)
        except (ValueError, KeyError):
            raise InvalidInput(f"URL option {name}={text!r} cannot be read") from None
        if name.startswith("failover.") and address.reconnect is not None:
            address = replace(address, reconnect=replace(address.reconnect, **{to: value}))
        else:
            address = replace(address, **{to: value})
    return address


@dataclass(slots=True)
class Plan:
    """Which broker to try next, and after which wait."""

    endpoints: list[Endpoint]
    reconnect: Reconnect | None
    random: random.Random = field(default_factory=random.Random)
    _tried: int = 0  # since the last success
    _ever: bool = False

    def next(self) -> tuple[Endpoint, float] | None:
        """The next endpoint, and how long to wait before it; None when all has been tried."""
        policy = self.reconnect
        turn, place = divmod(self._tried, len(self.endpoints))
        self._tried += 1
        if policy is None:
            return (self.endpoints[place], 0.0) if not self._ever and not turn else None
        limit = policy.attempts_max if self._ever or policy.startup_attempts_max < 0 else policy.startup_attempts_max
        if 0 <= limit < turn:  # the first round is no repetition
            return None
        if place == 0 and policy.randomize:
            self.random.shuffle(self.endpoints)
        delay_s = 0.0
        if place == 0 and turn:
            delay_s = min(policy.delay_s * policy.multiplier ** min(turn - 1, 60), policy.delay_max_s)
        elif place == 0 and self._ever:
            delay_s = policy.initial_delay_s
        return self.endpoints[place], delay_s

    def succeeded(self, endpoint: Endpoint) -> None:
        """Connected. The same broker is the first to be tried again."""
        self._tried, self._ever = 0, True
        if not (self.reconnect and self.reconnect.randomize):
            self.endpoints.remove(endpoint)
            self.endpoints.insert(0, endpoint)

    def learn(self, endpoint: Endpoint) -> None:
        """A broker that another one named."""
        if self.reconnect is not None and endpoint not in self.endpoints:
            self.endpoints.append(endpoint)
